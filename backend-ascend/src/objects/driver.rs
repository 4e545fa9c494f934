//! The runtime of this process: the library, its devices, and the state that exists once per device.
//!
//! The backend and every event and stream share it, so that they can be dropped in any order; the last of them releases
//! the devices (see [`context`](super::context)).

use std::collections::HashSet;
use std::ffi::c_void;
use std::fmt;
use std::ops::Deref;
use std::path::Path;
use std::sync::{Arc, Mutex};

use device_ipc_core::backend::{Unavailable, check_backend};
use device_ipc_core::{BorrowedStream, DeviceOrdinal, Error, Result};

use super::device::Device;
use crate::bindings::*;
use crate::library::{AclLibrary, NAME, no_device};

/// ACL with the devices of this process. Dereferences to the library, for its calls and errors.
pub(crate) struct Driver {
    library: AclLibrary,
    pub(crate) devices: Vec<Device>,
    /// Locked while a device's context is created.
    pub(super) creating: Mutex<()>,
    /// The pairs of devices whose peer access this backend enabled, each with the lower ordinal first.
    pub(super) peers: Mutex<HashSet<(DeviceOrdinal, DeviceOrdinal)>>,
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
    type Target = AclLibrary;

    fn deref(&self) -> &AclLibrary {
        &self.library
    }
}

impl Driver {
    /// Loads ACL and lists the devices. Creates no context, and leaves `aclInit` to the first one.
    pub(crate) fn load(path: Option<&Path>) -> Result<Arc<Self>, Unavailable> {
        let mut library = AclLibrary::load(path)?;
        let devices = Device::list(&library)?;
        library.query_version();
        if devices.is_empty() {
            return Err(Unavailable::NoDevice { detail: no_device("aclrtGetDeviceCount returned 0") });
        }
        tracing::debug!(target: crate::LOG,
            library = library.file,
            version = library.version(),
            devices = devices.len(),
            "loaded ACL"
        );
        Ok(Arc::new(Self { library, devices, creating: Mutex::default(), peers: Mutex::default() }))
    }

    /// Returns the device with this ordinal.
    pub(crate) fn device(&self, ordinal: DeviceOrdinal) -> Result<&Device> {
        self.devices.get(ordinal.index()).ok_or(Error::NoSuchDevice {
            backend: NAME,
            ordinal,
            count: self.devices.len(),
        })
    }

    /// Returns the runtime's handle of a stream of this backend on an existing device.
    pub(crate) fn stream(&self, stream: BorrowedStream<'_>) -> Result<aclrtStream> {
        check_backend("the stream", stream.backend(), NAME)?;
        self.device(stream.device())?;
        Ok(aclrtStream(stream.raw() as usize as *mut c_void))
    }
}
