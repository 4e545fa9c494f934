//! The driver of this process: the library, its devices, and the state that exists once per device.
//!
//! The backend and every event and stream share it, so that they can be dropped in any order; the last of them releases
//! the primary contexts (see [`context`](super::context)).

use std::ffi::c_int;
use std::fmt;
use std::ops::Deref;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};

use device_ipc_core::backend::{Unavailable, check_backend};
use device_ipc_core::{BorrowedStream, DeviceOrdinal, Error, Result};

use crate::bindings::api::Stream;
use crate::library::status::number;
use crate::library::{CudaLibrary, NAME, no_device};
use crate::objects::device::Device;

/// libcuda with the devices of this process. Dereferences to the library, for its calls and errors.
pub(crate) struct Driver {
    library: CudaLibrary,
    pub(crate) devices: Vec<Device>,
    /// Whether a device can access the memory of another: one row per accessing device.
    peers: Vec<OnceLock<bool>>,
    /// Locked while a device's context or kernel is created.
    pub(super) creating: Mutex<()>,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("library", &self.library)
            .field("devices", &self.devices.len())
            .finish_non_exhaustive()
    }
}

impl Deref for Driver {
    type Target = CudaLibrary;

    fn deref(&self) -> &CudaLibrary {
        &self.library
    }
}

impl Driver {
    /// Loads libcuda, initialises it and lists the devices. Creates no context.
    pub(crate) fn load(path: Option<&Path>) -> Result<Arc<Self>, Unavailable> {
        let library = CudaLibrary::load(path)?;
        let devices = Device::list(&library)?;
        if devices.is_empty() {
            return Err(Unavailable::NoDevice { detail: no_device("cuDeviceGetCount returned 0") });
        }
        let mut peers = Vec::new();
        peers.resize_with(devices.len().pow(2), OnceLock::new);
        tracing::debug!(target: crate::LOG,
            library = library.file,
            version = library.version(),
            devices = devices.len(),
            "loaded CUDA"
        );
        Ok(Arc::new(Self { library, devices, peers, creating: Mutex::new(()) }))
    }

    /// Returns the device with this ordinal.
    pub(crate) fn device(&self, ordinal: DeviceOrdinal) -> Result<&Device> {
        self.devices.get(ordinal.index()).ok_or(Error::NoSuchDevice {
            backend: NAME,
            ordinal,
            count: self.devices.len(),
        })
    }

    /// Returns the driver's handle of a stream of this backend on an existing device.
    pub(crate) fn stream(&self, stream: BorrowedStream<'_>) -> Result<Stream> {
        check_backend("the stream", stream.backend(), NAME)?;
        self.device(stream.device())?;
        Ok(Stream(stream.raw() as usize))
    }

    /// Returns whether `from` can read and write the memory of `to`. Cached, because every open asks.
    pub(crate) fn peer_access(&self, from: DeviceOrdinal, to: DeviceOrdinal) -> Result<bool> {
        let (accessing, home) = (self.device(from)?.handle, self.device(to)?.handle);
        if from == to {
            return Ok(true);
        }
        let cached = &self.peers[from.index() * self.devices.len() + to.index()];
        if let Some(cached) = cached.get() {
            return Ok(*cached);
        }
        let mut can: c_int = 0;
        // SAFETY: writes one int; both handles are of `cuDeviceGet`.
        let status = unsafe { (self.api.device_can_access_peer)(&raw mut can, accessing, home) };
        self.check("cuDeviceCanAccessPeer", status)?;
        Ok(*cached.get_or_init(|| can != 0))
    }

    /// Returns an attribute of a device, or `None` if the driver does not know it.
    pub(crate) fn device_attribute(&self, device: DeviceOrdinal, attribute: c_int) -> Option<c_int> {
        let device = self.device(device).ok()?;
        let mut value = 0;
        // SAFETY: writes one int; an attribute that the driver does not know is an error.
        let status = unsafe { (self.api.device_get_attribute)(&raw mut value, attribute, device.handle) };
        (status == number::SUCCESS).then_some(value)
    }
}
