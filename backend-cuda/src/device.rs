//! The devices: who they are and what they can do, asked without creating a context.
//!
//! "Device Management" (`group__CUDA__DEVICE`) and "Peer Context Memory Access" (`group__CUDA__PEER__ACCESS`).

use std::ffi::{CStr, c_char, c_int};
use std::sync::{Arc, OnceLock};

use device_ipc_core::{Capabilities, DeviceIdentity, DeviceInfo, DeviceOrdinal, Result, Unavailable};

use crate::api::{self, DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, Uuid};
use crate::context::Retained;
use crate::driver::Driver;
use crate::event::CudaIpcEvent;
use crate::kernel::Kernel;
use crate::staging::Staging;
use crate::status::number;

/// A device, and what is made for it once.
pub(crate) struct Device {
    pub(crate) handle: api::Device,
    pub(crate) info: DeviceInfo,
    pub(crate) context: OnceLock<Retained>,
    pub(crate) add_f32: OnceLock<Kernel>,
    pub(crate) staging: Staging,
    ipc_events: OnceLock<bool>,
}

impl Device {
    /// The devices that this process sees, in its numbering.
    pub(crate) fn list(driver: &Driver) -> Result<Vec<Self>, Unavailable> {
        let mut count: c_int = 0;
        // SAFETY: writes one int.
        driver.started("cuDeviceGetCount", unsafe { (driver.api.device_get_count)(&raw mut count) })?;
        (0..u32::try_from(count).unwrap_or(0)).map(|position| Self::describe(driver, position)).collect()
    }

    fn describe(driver: &Driver, position: u32) -> Result<Self, Unavailable> {
        let api = &driver.api;
        let mut handle = 0;
        // SAFETY: writes one device; the position is below the count.
        driver.started("cuDeviceGet", unsafe { (api.device_get)(&raw mut handle, position as c_int) })?;

        let mut name = [0u8; 256];
        // SAFETY: writes at most as many bytes as it is told.
        let status =
            unsafe { (api.device_get_name)(name.as_mut_ptr().cast::<c_char>(), name.len() as c_int, handle) };
        driver.started("cuDeviceGetName", status)?;
        let name = CStr::from_bytes_until_nul(&name).map(|name| name.to_string_lossy().into_owned());

        let mut uuid = Uuid { bytes: [0; 16] };
        // A GPU that is cut into instances (MIG) has one UUID for all of them in the older function.
        let get_uuid = api.device_get_uuid_v2.unwrap_or(api.device_get_uuid);
        // SAFETY: writes 16 bytes.
        driver.started("cuDeviceGetUuid", unsafe { get_uuid(&raw mut uuid, handle) })?;

        let mut bytes = 0;
        // SAFETY: writes one size.
        driver.started("cuDeviceTotalMem", unsafe { (api.device_total_mem)(&raw mut bytes, handle) })?;

        let ordinal = DeviceOrdinal::new(position);
        let identity = DeviceIdentity::Uuid(uuid.bytes);
        Ok(Self {
            handle,
            info: DeviceInfo::new(ordinal, identity, name.unwrap_or_default(), bytes as u64),
            context: OnceLock::new(),
            add_f32: OnceLock::new(),
            staging: Staging::default(),
            ipc_events: OnceLock::new(),
        })
    }

    /// Gives back what was made for the device, and its context.
    pub(crate) fn release(&self, driver: &Driver) {
        if self.context.get().is_none() {
            return;
        }
        if let Ok(_current) = driver.enter(self.info.ordinal) {
            self.staging.release(driver);
            if let Some(kernel) = self.add_f32.get() {
                kernel.unload(driver);
            }
        }
        // SAFETY: the context was retained once, and nothing that uses it is left: all of it shares the driver, which
        // is being dropped.
        let status = unsafe { (driver.api.device_primary_ctx_release)(self.handle) };
        if !matches!(
            status,
            number::SUCCESS | number::ERROR_DEINITIALIZED | number::ERROR_CONTEXT_IS_DESTROYED
        ) {
            tracing::warn!(status, device = %self.info.ordinal, "cuDevicePrimaryCtxRelease failed");
        }
    }
}

impl Driver {
    /// Can `from` read and write the memory of `to`? Asked once, as every open wants to know.
    pub(crate) fn peer_access(&self, from: DeviceOrdinal, to: DeviceOrdinal) -> Result<bool> {
        let (accessing, home) = (self.device(from)?.handle, self.device(to)?.handle);
        if from == to {
            return Ok(true);
        }
        let known = &self.peers[from.index() * self.devices.len() + to.index()];
        if let Some(known) = known.get() {
            return Ok(*known);
        }
        let mut can: c_int = 0;
        // SAFETY: writes one int; both handles are of `cuDeviceGet`.
        let status = unsafe { (self.api.device_can_access_peer)(&raw mut can, accessing, home) };
        self.check("cuDeviceCanAccessPeer", status)?;
        Ok(*known.get_or_init(|| can != 0))
    }
}

/// What a device can do: what the driver says, and what was seen to work when it was tried, once. That creates the
/// device's context.
pub(crate) fn capabilities(driver: &Arc<Driver>, ordinal: DeviceOrdinal) -> Result<Capabilities> {
    let device = driver.device(ordinal)?;
    let ipc_events = match device.ipc_events.get() {
        Some(known) => *known,
        None => {
            let mut value: c_int = 0;
            // SAFETY: writes one int; an attribute that the driver does not know is an error.
            let status = unsafe {
                (driver.api.device_get_attribute)(
                    &raw mut value,
                    DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED,
                    device.handle,
                )
            };
            let supported = match status {
                number::SUCCESS => value != 0,
                _ => CudaIpcEvent::create(driver, ordinal).is_ok(),
            };
            *device.ipc_events.get_or_init(|| supported)
        }
    };
    let timelines = driver.has_timelines(ordinal)?;
    Ok(Capabilities::NONE.with_ipc_events(ipc_events).with_timelines(timelines).with_generations(true))
}
