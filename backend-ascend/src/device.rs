//! The devices: their identities and what they can do, asked without creating a context, and without `aclInit`.
//!
//! "Device Management" of the ACL manual. A number of a device in a call is the *user* id: the position after
//! `ASCEND_RT_VISIBLE_DEVICES`, which is the ordinal here.

use std::ffi::CStr;
use std::sync::OnceLock;

use device_ipc_core::{Capabilities, DeviceIdentity, DeviceInfo, DeviceOrdinal, HostId, Result, Unavailable};

use crate::bindings::*;
use crate::chip::Chip;
use crate::driver::{Driver, call};
use crate::staging::Staging;
use crate::{event, timelines};

/// A device, and what is made for it once.
pub(crate) struct Device {
    pub(crate) info: DeviceInfo,
    pub(crate) chip: Chip,
    /// The default context, as a number.
    pub(crate) context: OnceLock<usize>,
    pub(crate) staging: Staging,
    /// The physical number of the chip, where the runtime tells it (CANN 8.5). On A3 a chip has two dies, each of
    /// which is a device.
    pub(crate) chip_number: Option<i64>,
    ipc_events: OnceLock<bool>,
    timelines: OnceLock<bool>,
}

impl Device {
    /// The devices that this process sees, in its numbering.
    pub(crate) fn list(driver: &Driver) -> Result<Vec<Self>, Unavailable> {
        let mut count = 0u32;
        // SAFETY: writes one number.
        let mut status = unsafe { call!(driver, aclrtGetDeviceCount(&raw mut count)) };
        // No runtime whose sources are known asks for `aclInit` here; the manual asks for it before everything else.
        if status == ACL_ERROR_UNINITIALIZE {
            driver.started("aclInit", driver.initialise())?;
            // SAFETY: as above.
            status = unsafe { call!(driver, aclrtGetDeviceCount(&raw mut count)) };
        }
        driver.started("aclrtGetDeviceCount", status)?;
        let soc = soc_name(driver);
        (0..count).map(|position| Self::describe(driver, position, &soc)).collect()
    }

    fn describe(driver: &Driver, position: u32, soc: &str) -> Result<Self, Unavailable> {
        let identity = identity(driver, position)?;
        // Where the size cannot be told without a context it is 0.
        let bytes = property(driver, position, aclrtDevAttr::ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE).unwrap_or(0);
        let ordinal = DeviceOrdinal::new(position);
        Ok(Self {
            info: DeviceInfo::new(ordinal, identity, soc, u64::try_from(bytes).unwrap_or(0)),
            chip: Chip::of(soc),
            context: OnceLock::new(),
            staging: Staging::default(),
            ipc_events: OnceLock::new(),
            chip_number: property(driver, position, aclrtDevAttr::ACL_DEV_ATTR_PHY_CHIP_ID),
            timelines: OnceLock::new(),
        })
    }

    /// Returns whether both are dies of one chip.
    pub(crate) fn is_on_the_chip_of(&self, other: &Self) -> bool {
        self.chip == Chip::A3
            && other.chip == Chip::A3
            && self.chip_number.is_some_and(|chip| other.chip_number == Some(chip))
    }

    /// The number that calls take.
    pub(crate) fn number(&self) -> i32 {
        self.info.ordinal.get() as i32
    }

    /// Gives back what was made for the device, and the device itself.
    pub(crate) fn release(&self, driver: &Driver) {
        if self.context.get().is_none() {
            return;
        }
        if let Ok(_current) = driver.enter(self.info.ordinal) {
            self.staging.release(driver);
            driver.retired.sweep(driver, self.info.ordinal);
        }
        // SAFETY: takes back the one `aclrtSetDevice` of `enter`. Nothing that uses the context is left: all of it shares
        // the driver, which is being dropped.
        let status = unsafe { call!(driver, aclrtResetDevice(self.number())) };
        if status != ACL_SUCCESS {
            tracing::warn!(status, device = %self.info.ordinal, "aclrtResetDevice failed");
        }
    }
}

/// Returns a property of a device, or nothing where the runtime does not tell it.
fn property(driver: &Driver, position: u32, property: aclrtDevAttr) -> Option<i64> {
    let mut value = 0i64;
    // SAFETY: writes one number.
    let status = unsafe { call!(driver, aclrtGetDeviceInfo(position, property, &raw mut value)) };
    if status != ACL_SUCCESS {
        tracing::debug!(
            status,
            device = position,
            property = property.0,
            "aclrtGetDeviceInfo does not tell a property"
        );
    }
    (status == ACL_SUCCESS).then_some(value)
}

/// What a device can do. What has to be tried is tried once.
pub(crate) fn capabilities(driver: &std::sync::Arc<Driver>, ordinal: DeviceOrdinal) -> Result<Capabilities> {
    let device = driver.device(ordinal)?;
    let ipc_events = has_events(driver, ordinal)?;
    let timelines = *device.timelines.get_or_init(|| timelines::work(driver, ordinal));
    Ok(Capabilities::NONE.with_ipc_events(ipc_events).with_timelines(timelines))
}

/// Returns whether the device has events that processes share, by a trial that is made once.
pub(crate) fn has_events(driver: &std::sync::Arc<Driver>, ordinal: DeviceOrdinal) -> Result<bool> {
    let device = driver.device(ordinal)?;
    Ok(*device.ipc_events.get_or_init(|| event::work(driver, ordinal)))
}

/// The UUID, on A2, A3 and 950; else the host and the physical id.
fn identity(driver: &Driver, position: u32) -> Result<DeviceIdentity, Unavailable> {
    let mut uuid = aclrtUuid { bytes: [0; 16] };
    // SAFETY: writes 16 bytes.
    let status = unsafe { call!(driver, aclrtDeviceGetUuid(position as i32, &raw mut uuid)) };
    let bytes = uuid.bytes.map(|byte| byte as u8);
    if status == ACL_SUCCESS && bytes != [0; 16] {
        return Ok(DeviceIdentity::Uuid(bytes));
    }
    if driver.acl.aclrtGetPhyDevIdByLogicDevId.is_err() {
        return Err(Unavailable::TooOld {
            library: driver.file.clone(),
            missing: "aclrtGetPhyDevIdByLogicDevId".into(),
            needed: "CANN 8.5 or newer, where the chip has no UUID that would tell which one it is,".into(),
        });
    }
    let mut physical = 0;
    // The manual says that the argument called the logical id is in fact the user id.
    // SAFETY: writes one number.
    let status = unsafe { call!(driver, aclrtGetPhyDevIdByLogicDevId(position as i32, &raw mut physical)) };
    driver.started("aclrtGetPhyDevIdByLogicDevId", status)?;
    Ok(DeviceIdentity::HostPhysical { host: HostId::local(), physical: physical.cast_unsigned() })
}

fn soc_name(driver: &Driver) -> String {
    let name = match &driver.acl.aclrtGetSocName {
        // SAFETY: takes nothing; gives null or a text that lives as long as the library.
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
