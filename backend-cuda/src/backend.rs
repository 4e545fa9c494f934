//! The backend as the rest of device-ipc sees it.

use std::path::Path;
use std::sync::Arc;

use device_ipc_core::{
    Access, BackendInfo, Capabilities, DeviceEvent, DeviceInfo, DeviceIpc, DeviceMemory, DeviceOrdinal,
    DeviceRange, Exported, Extent, HandleKind, HandleKindInfo, Opened, Rank, ReceivedHandle, Registration,
    Result, Unavailable,
};

use crate::driver::Driver;
use crate::event::CudaIpcEvent;
use crate::{NAME, device, kinds};

/// NVIDIA CUDA by its driver library. See the [crate's documentation](crate).
///
/// Make it once for a process and share it: [`Backends`](device_ipc_core::Backends) does. Two of them are two tables of
/// opened handles for whoever keeps such a table.
#[derive(Debug)]
pub struct CudaBackend {
    driver: Arc<Driver>,
    info: BackendInfo,
}

/// This backend, for [`Backends::with`](device_ipc_core::Backends::with).
pub const REGISTRATION: Registration = Registration::new(NAME, Rank::CUDA, load);

device_ipc_core::register_backend!(REGISTRATION);

fn load() -> Result<Arc<dyn DeviceIpc>, Unavailable> {
    Ok(CudaBackend::load()?)
}

impl CudaBackend {
    /// Loads the library that [`LIBRARY_VARIABLE`](crate::LIBRARY_VARIABLE) names, else the system's `libcuda.so.1`.
    ///
    /// # Errors
    ///
    /// Why CUDA cannot be used here, and what to do about it.
    pub fn load() -> Result<Arc<Self>, Unavailable> {
        Driver::load(None).map(Self::new)
    }

    /// Loads the library at `path`, or of that name. It has to be a libcuda: others run their initialisers, and are
    /// refused where they lack its functions.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn load_from(path: impl AsRef<Path>) -> Result<Arc<Self>, Unavailable> {
        Driver::load(Some(path.as_ref())).map(Self::new)
    }

    fn new(driver: Arc<Driver>) -> Arc<Self> {
        let info = BackendInfo::new(NAME, driver.version(), Some(driver.file.clone()));
        Arc::new(Self { driver, info })
    }

    pub(crate) fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }
}

impl DeviceIpc for CudaBackend {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(self.driver.devices.iter().map(|device| device.info.clone()).collect())
    }

    fn visible_devices_variable(&self) -> &'static str {
        "CUDA_VISIBLE_DEVICES"
    }

    fn peer_access(&self, from: DeviceOrdinal, to: DeviceOrdinal) -> Result<bool> {
        self.driver.peer_access(from, to)
    }

    fn capabilities(&self, device: DeviceOrdinal) -> Result<Capabilities> {
        device::capabilities(&self.driver, device)
    }

    fn handle_kinds(&self) -> Vec<HandleKindInfo> {
        kinds::all()
    }

    fn extents_of(&self, range: DeviceRange, stated_base: Option<DeviceRange>) -> Result<Vec<Extent>> {
        Ok(vec![self.driver.extent_of(range, stated_base)?])
    }

    fn export(&self, extent: &Extent, kind: Option<HandleKind>) -> Result<Exported> {
        self.driver.export(extent, kind)
    }

    /// The driver counts no exports: a handle is good until the memory is freed.
    fn unexport(&self, exported: Exported) -> Result<()> {
        drop(exported);
        Ok(())
    }

    fn open(&self, handles: Vec<ReceivedHandle>, on: DeviceOrdinal, access: Access) -> Result<Opened> {
        self.driver.open(handles, on, access)
    }

    fn close(&self, opened: Opened) -> Result<()> {
        self.driver.close(opened)
    }

    fn create_event(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
        Ok(Box::new(CudaIpcEvent::create(&self.driver, device)?))
    }

    fn open_event(&self, handle: &[u8], on: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
        Ok(Box::new(CudaIpcEvent::open(&self.driver, handle, on)?))
    }

    fn synchronize_device(&self, device: DeviceOrdinal) -> Result<()> {
        let _current = self.driver.enter(device)?;
        // SAFETY: takes nothing; the device's primary context is current.
        self.driver.check("cuCtxSynchronize", unsafe { (self.driver.api.ctx_synchronize)() })
    }

    fn memory(&self) -> &dyn DeviceMemory {
        self
    }
}
