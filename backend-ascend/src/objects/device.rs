//! The devices, listed without creating a context and without `aclInit`.
//!
//! "Device Management" of the ACL manual. A device number in a call is the *user* id: the position in
//! `ASCEND_RT_VISIBLE_DEVICES`, which is the ordinal here.

use std::ffi::CStr;
use std::sync::OnceLock;

use device_ipc_core::backend::{HostId, Unavailable};
use device_ipc_core::{DeviceIdentity, DeviceInfo, DeviceOrdinal, Result};

use super::chip::Chip;
use super::retired::RetiredStreams;
use super::staging::Staging;
use crate::bindings::*;
use crate::library::{AclLibrary, call};

/// A device, with the objects that exist once per device.
pub(crate) struct Device {
    pub(crate) info: DeviceInfo,
    pub(crate) chip: Chip,
    /// The default context, as a number.
    pub(crate) context: OnceLock<usize>,
    pub(crate) staging: Staging,
    pub(super) retired: RetiredStreams,
    /// The physical number of the chip, if the runtime returns it (CANN 8.5). On A3 a chip has two dies, each of which
    /// is a device.
    pub(crate) chip_number: Option<i64>,
    pub(super) ipc_events: OnceLock<bool>,
    pub(super) timelines: OnceLock<bool>,
}

impl Device {
    /// Lists the devices that this process sees, in its numbering.
    pub(crate) fn list(library: &AclLibrary) -> Result<Vec<Self>, Unavailable> {
        let mut count = 0u32;
        // SAFETY: writes one number.
        let mut status = unsafe { call!(library, aclrtGetDeviceCount(&raw mut count)) };
        // No runtime with known sources requires `aclInit` here; the manual requires it before everything else.
        if status == ACL_ERROR_UNINITIALIZE {
            library.check_startup("aclInit", library.initialise())?;
            // SAFETY: as above.
            status = unsafe { call!(library, aclrtGetDeviceCount(&raw mut count)) };
        }
        library.check_startup("aclrtGetDeviceCount", status)?;
        let soc = soc_name(library);
        (0..count).map(|position| Self::describe(library, position, &soc)).collect()
    }

    fn describe(library: &AclLibrary, position: u32, soc: &str) -> Result<Self, Unavailable> {
        let identity = identity(library, position)?;
        // 0 if the runtime does not return the size without a context.
        let bytes =
            property(library, position, aclrtDevAttr::ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE).unwrap_or(0);
        let ordinal = DeviceOrdinal::new(position);
        Ok(Self {
            info: DeviceInfo::new(ordinal, identity, soc, u64::try_from(bytes).unwrap_or(0)),
            chip: Chip::of(soc),
            context: OnceLock::new(),
            staging: Staging::default(),
            retired: RetiredStreams::default(),
            ipc_events: OnceLock::new(),
            chip_number: property(library, position, aclrtDevAttr::ACL_DEV_ATTR_PHY_CHIP_ID),
            timelines: OnceLock::new(),
        })
    }

    /// Returns whether both devices are dies of one chip.
    pub(crate) fn shares_chip_with(&self, other: &Self) -> bool {
        self.chip == Chip::A3
            && other.chip == Chip::A3
            && self.chip_number.is_some_and(|chip| other.chip_number == Some(chip))
    }

    /// Returns the device number for calls.
    pub(crate) fn number(&self) -> i32 {
        self.info.ordinal.get() as i32
    }

    /// Destroys the idle ones of the retired streams. The device's context must be current.
    pub(super) fn sweep_retired(&self, library: &AclLibrary) {
        self.retired.sweep(library, &self.staging);
    }
}

/// Returns a property of a device, or `None` if the runtime does not return it.
fn property(library: &AclLibrary, position: u32, property: aclrtDevAttr) -> Option<i64> {
    let mut value = 0i64;
    // SAFETY: writes one number.
    let status = unsafe { call!(library, aclrtGetDeviceInfo(position, property, &raw mut value)) };
    if status != ACL_SUCCESS {
        tracing::debug!(target: crate::LOG, status, device = position, property = property.0, "aclrtGetDeviceInfo failed");
    }
    (status == ACL_SUCCESS).then_some(value)
}

/// Returns the UUID, on A2, A3 and 950; else the host and the physical id.
fn identity(library: &AclLibrary, position: u32) -> Result<DeviceIdentity, Unavailable> {
    let mut uuid = aclrtUuid { bytes: [0; 16] };
    // SAFETY: writes 16 bytes.
    let status = unsafe { call!(library, aclrtDeviceGetUuid(position as i32, &raw mut uuid)) };
    let bytes = uuid.bytes.map(|byte| byte as u8);
    if status == ACL_SUCCESS && bytes != [0; 16] {
        return Ok(DeviceIdentity::Uuid(bytes));
    }
    if library.acl.aclrtGetPhyDevIdByLogicDevId.is_err() {
        return Err(Unavailable::TooOld {
            library: library.file.clone(),
            missing: "aclrtGetPhyDevIdByLogicDevId".into(),
            needed: "CANN 8.5 or newer, required for chips without a UUID,".into(),
        });
    }
    let mut physical = 0;
    // According to the manual, the argument called the logical id is in fact the user id.
    // SAFETY: writes one number.
    let status = unsafe { call!(library, aclrtGetPhyDevIdByLogicDevId(position as i32, &raw mut physical)) };
    library.check_startup("aclrtGetPhyDevIdByLogicDevId", status)?;
    Ok(DeviceIdentity::HostPhysical { host: HostId::local(), physical: physical.cast_unsigned() })
}

fn soc_name(library: &AclLibrary) -> String {
    let name = match &library.acl.aclrtGetSocName {
        // SAFETY: takes no arguments; returns null or a text that lives as long as the library.
        Ok(function) => unsafe { function() },
        Err(_) => std::ptr::null(),
    };
    if name.is_null() {
        return "Ascend NPU".to_owned();
    }
    // SAFETY: not null, so a text that ends with a NUL.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    if name.is_empty() { "Ascend NPU".to_owned() } else { name.into_owned() }
}
