//! The backend as the rest of device-ipc sees it.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use device_ipc_core::backend::TestKernels;
use device_ipc_core::{
    Access, BackendInfo, Capabilities, DeviceEvent, DeviceInfo, DeviceIpc, DeviceMemory, DeviceOrdinal,
    DeviceRange, DeviceTimelines, Exported, Extent, HandleKind, HandleKindInfo, Opened, Rank, ReceivedHandle,
    Registration, Result, Unavailable,
};

use crate::allocate::Allocated;
use crate::driver::Driver;
use crate::event::CudaIpcEvent;
use crate::export::{self, pool::ExportedPools};
use crate::open::{OpenTable, pool::ImportedPools};
use crate::pools::MadePools;
use crate::{NAME, device, fabric, kinds};

/// NVIDIA CUDA by its driver library. See the [crate's documentation](crate).
///
/// Make it once for a process and share it: [`Backends`](device_ipc_core::Backends) does. Two of them are two tables of
/// opened handles for whoever keeps such a table.
#[derive(Debug)]
pub struct CudaBackend {
    driver: Arc<Driver>,
    info: BackendInfo,
    /// What memory is allocated for where nobody says.
    pub(crate) allocates: HandleKind,
    pub(crate) allocated: Allocated,
    pub(crate) made_pools: MadePools,
    pub(crate) exported_pools: ExportedPools,
    pub(crate) imported_pools: ImportedPools,
    pub(crate) open: OpenTable,
    pub(crate) fabric: fabric::Probed,
}

/// This backend, for [`Backends::with`](device_ipc_core::Backends::with).
pub const REGISTRATION: Registration = Registration::new(NAME, Rank::CUDA, load);

device_ipc_core::register_backend!(REGISTRATION);

fn load() -> Result<Arc<dyn DeviceIpc>, Unavailable> {
    Ok(registered()?)
}

/// The backend that everybody gets who asks for it by name, or takes the first there is. A failure is not remembered.
pub(crate) fn registered() -> Result<Arc<CudaBackend>, Unavailable> {
    static REGISTERED: Mutex<Option<Arc<CudaBackend>>> = Mutex::new(None);
    let mut registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(backend) = &*registered {
        return Ok(Arc::clone(backend));
    }
    Ok(Arc::clone(registered.insert(CudaBackend::load()?)))
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

    /// As [`load`](Self::load), and [`DeviceMemory::allocate`] allocates for handles of this kind. A kind that a device
    /// cannot have is an error then.
    ///
    /// Without it, that is [`LEGACY`](crate::LEGACY); and in a pid namespace of its own, where a peer may have the same
    /// process id, [`VIRTUAL_MEMORY`](crate::VIRTUAL_MEMORY) if all devices have it.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn load_allocating(kind: HandleKind) -> Result<Arc<Self>, Unavailable> {
        Driver::load(None).map(|driver| Self::allocating(driver, kind))
    }

    fn new(driver: Arc<Driver>) -> Arc<Self> {
        let kind = kinds::preferred(&driver);
        Self::allocating(driver, kind)
    }

    fn allocating(driver: Arc<Driver>, allocates: HandleKind) -> Arc<Self> {
        let info = BackendInfo::new(NAME, driver.version(), Some(driver.file.clone()));
        Arc::new(Self {
            info,
            allocates,
            allocated: Allocated::default(),
            made_pools: MadePools::default(),
            exported_pools: ExportedPools::default(),
            imported_pools: ImportedPools::default(),
            open: OpenTable::default(),
            fabric: fabric::Probed::new(&driver),
            driver,
        })
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
        kinds::all(&self.driver, self.allocates)
    }

    fn extents_of(&self, range: DeviceRange, stated_base: Option<DeviceRange>) -> Result<Vec<Extent>> {
        self.driver.extents_of(range, stated_base)
    }

    fn export(&self, extent: &Extent, kind: Option<HandleKind>) -> Result<Exported> {
        self.export_extent(extent, kind)
    }

    fn with_device_context(&self, device: DeviceOrdinal, body: &mut dyn FnMut()) {
        self.run_in_context(device, body);
    }

    /// The driver counts no exports: a handle is good until the memory is freed.
    fn unexport(&self, exported: Exported) -> Result<()> {
        self.unexport_handle(&exported);
        Ok(())
    }

    fn reach(&self, exported: &Exported) -> Option<DeviceRange> {
        export::reach(exported)
    }

    fn open(&self, handles: Vec<ReceivedHandle>, on: DeviceOrdinal, access: Access) -> Result<Opened> {
        self.open_handles(&handles, on, access)
    }

    fn close(&self, opened: Opened) -> Result<()> {
        self.close_opened(&opened)
    }

    fn create_event(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
        Ok(Box::new(CudaIpcEvent::create(&self.driver, device)?))
    }

    fn open_event(&self, handle: &[u8], on: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
        Ok(Box::new(CudaIpcEvent::open(&self.driver, handle, on)?))
    }

    /// While streams are being captured into graphs this holds up other threads' calls of the driver. A capture that nobody
    /// here has seen, on a stream that does not wait for the legacy default stream, is broken: CUDA has no way to ask.
    fn synchronize_device(&self, device: DeviceOrdinal) -> Result<()> {
        let _current = self.driver.enter(device)?;
        self.driver.wait_for_all()
    }

    fn memory(&self) -> &dyn DeviceMemory {
        self
    }

    fn timelines(&self) -> Option<&dyn DeviceTimelines> {
        Some(self)
    }

    fn test_kernels(&self) -> Option<&dyn TestKernels> {
        Some(self)
    }
}
