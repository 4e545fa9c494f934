//! The devices, listed without creating a context ("Device Management", `group__CUDA__DEVICE`).

use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

use device_ipc_core::backend::Unavailable;
use device_ipc_core::{DeviceIdentity, DeviceInfo, DeviceOrdinal, Result};

use crate::bindings::api::{self, Context, Uuid};
use crate::library::CudaLibrary;
use crate::objects::kernel::Kernel;
use crate::objects::staging::Staging;

/// A device, with the objects that exist once per device.
pub(crate) struct Device {
    pub(crate) handle: api::Device,
    pub(crate) info: DeviceInfo,
    pub(crate) context: OnceLock<PrimaryContext>,
    pub(super) add_f32: OnceLock<Kernel>,
    pub(super) copy_blocks: OnceLock<Kernel>,
    /// `None` if the driver or the device does not accept it.
    pub(super) large_copy_blocks: OnceLock<Option<Kernel>>,
    pub(crate) staging: Staging,
    pub(crate) ipc_events: OnceLock<bool>,
    /// Whether this process uses the device through MPS; `None` if the driver does not report it.
    pub(super) mps: OnceLock<Option<bool>>,
}

/// A primary context that this backend has retained.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PrimaryContext {
    pub(super) context: Context,
    /// Distinguishes the context from its successor after a reset; `None` if the driver is too old to return it (before
    /// CUDA 12).
    pub(super) id: Option<u64>,
}

impl Device {
    /// Lists the devices that this process sees, in its numbering.
    pub(crate) fn list(library: &CudaLibrary) -> Result<Vec<Self>, Unavailable> {
        let mut count: c_int = 0;
        // SAFETY: writes one int.
        let status = unsafe { (library.api.device_get_count)(&raw mut count) };
        library.check_startup("cuDeviceGetCount", status)?;
        (0..u32::try_from(count).unwrap_or(0)).map(|position| Self::describe(library, position)).collect()
    }

    fn describe(library: &CudaLibrary, position: u32) -> Result<Self, Unavailable> {
        let api = &library.api;
        let mut handle = 0;
        // SAFETY: writes one device; the position is below the count.
        let status = unsafe { (api.device_get)(&raw mut handle, position as c_int) };
        library.check_startup("cuDeviceGet", status)?;

        let mut name = [0u8; 256];
        // SAFETY: writes at most the stated number of bytes.
        let status =
            unsafe { (api.device_get_name)(name.as_mut_ptr().cast::<c_char>(), name.len() as c_int, handle) };
        library.check_startup("cuDeviceGetName", status)?;
        let name = CStr::from_bytes_until_nul(&name).map(|name| name.to_string_lossy().into_owned());

        let mut uuid = Uuid { bytes: [0; 16] };
        // The older function returns one UUID for all instances of a partitioned GPU (MIG).
        let get_uuid = api.device_get_uuid_v2.unwrap_or(api.device_get_uuid);
        // SAFETY: writes 16 bytes.
        library.check_startup("cuDeviceGetUuid", unsafe { get_uuid(&raw mut uuid, handle) })?;

        let mut bytes = 0;
        // SAFETY: writes one size.
        let status = unsafe { (api.device_total_mem)(&raw mut bytes, handle) };
        library.check_startup("cuDeviceTotalMem", status)?;

        let ordinal = DeviceOrdinal::new(position);
        let identity = DeviceIdentity::Uuid(uuid.bytes);
        Ok(Self {
            handle,
            info: DeviceInfo::new(ordinal, identity, name.unwrap_or_default(), bytes as u64),
            context: OnceLock::new(),
            add_f32: OnceLock::new(),
            copy_blocks: OnceLock::new(),
            large_copy_blocks: OnceLock::new(),
            staging: Staging::default(),
            ipc_events: OnceLock::new(),
            mps: OnceLock::new(),
        })
    }
}
