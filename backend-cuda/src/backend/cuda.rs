//! The backend: CUDA behind the traits of device-ipc.

use std::ffi::c_int;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use device_ipc_core::backend::{
    BackendInfo, Capabilities, DeviceEvent, DeviceIpc, DeviceMemory, DeviceReservations, DeviceTimelines,
    Exported, Extent, HandleKind, HandleKindInfo, Opened, Rank, ReceivedHandle, Registration, TestKernels,
    Unavailable,
};
use device_ipc_core::{Access, DeviceInfo, DeviceOrdinal, DeviceRange, Result};

use crate::bindings::api::DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED;
use crate::library::NAME;
use crate::memory::allocate::Allocator;
use crate::memory::fabric::support::FabricSupport;
use crate::memory::lookup_cache::LookupScope;
use crate::memory::open::OpenTable;
use crate::memory::pool::export::ExportedPools;
use crate::memory::virtual_memory::reserved::ReservationTable;
use crate::memory::{export, extents, kind};
use crate::objects::driver::Driver;
use crate::objects::event::CudaEvent;
use crate::objects::host_pages::HostPages;

/// The NVIDIA CUDA backend. See the [crate's documentation](crate).
///
/// Create it once per process and share it, as [`Backends`](device_ipc_core::backend::Backends) does: each backend has its own
/// table of open handles.
pub struct CudaBackend {
    driver: Arc<Driver>,
    info: BackendInfo,
    /// The kind that [`DeviceMemory::allocate`] allocates for.
    pub(super) default_kind: HandleKind,
    pub(super) allocator: Allocator,
    pub(super) host_pages: HostPages,
    exported_pools: ExportedPools,
    open: OpenTable,
    pub(super) reservations: ReservationTable,
}

/// `kDLCUDA` of `dlpack.h`.
const DLPACK_CUDA: i32 = 2;

/// The registration of this backend, for [`Backends::with`](device_ipc_core::backend::Backends::with).
pub const REGISTRATION: Registration = Registration::new(NAME, Rank(100), load)
    .with_dlpack_device_type(DLPACK_CUDA)
    .with_diagnosis(&super::diagnosis::CudaDiagnosis);

device_ipc_core::backend::register_backend!(REGISTRATION);

fn load() -> Result<Arc<dyn DeviceIpc>, Unavailable> {
    Ok(registered()?)
}

/// Returns the process-wide backend, which selection by name or by rank returns. Loads it on the first call; failures
/// are not cached.
pub(crate) fn registered() -> Result<Arc<CudaBackend>, Unavailable> {
    static REGISTERED: Mutex<Option<Arc<CudaBackend>>> = Mutex::new(None);
    let mut registered = REGISTERED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(backend) = &*registered {
        return Ok(Arc::clone(backend));
    }
    Ok(Arc::clone(registered.insert(CudaBackend::load()?)))
}

/// Without the table of open handles, whose bytes are not for logs.
impl fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaBackend").field("info", &self.info).finish_non_exhaustive()
    }
}

impl CudaBackend {
    /// Loads the library in [`LIBRARY_VARIABLE`](crate::LIBRARY_VARIABLE), or else the system's `libcuda.so.1`.
    ///
    /// # Errors
    ///
    /// Returns why CUDA is unavailable, with a remedy.
    pub fn load() -> Result<Arc<Self>, Unavailable> {
        Driver::load(None).map(Self::new)
    }

    /// Loads the library with this path or name. It must be a libcuda: the initialisers of any library run, and one
    /// without the functions of libcuda is refused.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn load_from(path: impl AsRef<Path>) -> Result<Arc<Self>, Unavailable> {
        Driver::load(Some(path.as_ref())).map(Self::new)
    }

    /// Loads the library like [`load`](Self::load), and makes [`DeviceMemory::allocate`] allocate for handles of this
    /// kind. An allocation fails on a device that does not support the kind.
    ///
    /// The default is [`LEGACY`](crate::LEGACY); in a private pid namespace, where a peer may have the same process id,
    /// it is [`VIRTUAL_MEMORY`](crate::VIRTUAL_MEMORY) if all devices support it.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn load_allocating(kind: HandleKind) -> Result<Arc<Self>, Unavailable> {
        Driver::load(None).map(|driver| Self::allocating(driver, kind))
    }

    fn new(driver: Arc<Driver>) -> Arc<Self> {
        let kind = kind::default(&driver);
        Self::allocating(driver, kind)
    }

    fn allocating(driver: Arc<Driver>, default_kind: HandleKind) -> Arc<Self> {
        let info = BackendInfo::new(NAME, driver.version(), Some(driver.file.clone()));
        Arc::new(Self {
            info,
            default_kind,
            allocator: Allocator::new(&driver),
            exported_pools: ExportedPools::default(),
            open: OpenTable::default(),
            reservations: ReservationTable::new(&driver),
            host_pages: HostPages::default(),
            driver,
        })
    }

    pub(crate) fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// Returns whether this device supports fabric handles ([`FABRIC`](crate::FABRIC)). The first call tries to create
    /// the smallest block, which creates the device's context; the answer is cached.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`](device_ipc_core::Error::NoSuchDevice), or a driver error that implies nothing about
    /// fabric handles, as for a device without free memory.
    pub fn fabric(&self, device: impl Into<DeviceOrdinal>) -> Result<FabricSupport> {
        self.allocator.fabric.get(&self.driver, device.into())
    }

    /// Returns whether the device supports IPC events. Older drivers have no attribute for it: then creates one, which
    /// creates the device's context.
    fn has_ipc_events(&self, ordinal: DeviceOrdinal) -> Result<bool> {
        let device = self.driver.device(ordinal)?;
        if let Some(known) = device.ipc_events.get() {
            return Ok(*known);
        }
        let attribute: Option<c_int> =
            self.driver.device_attribute(ordinal, DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED);
        let supported = match attribute {
            Some(value) => value != 0,
            None => CudaEvent::create(&self.driver, ordinal).is_ok(),
        };
        Ok(*device.ipc_events.get_or_init(|| supported))
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
        let ipc_events = self.has_ipc_events(device)?;
        let timelines = self.driver.has_timelines(device)?;
        // A driver that does not report MPS may use it.
        let fault_isolation = self.driver.is_mps_client(device)? == Some(false);
        Ok(Capabilities::NONE
            .with_ipc_events(ipc_events)
            .with_timelines(timelines)
            .with_generations(true)
            .with_fault_isolation(fault_isolation))
    }

    fn handle_kinds(&self) -> Vec<HandleKindInfo> {
        kind::all(&self.driver, self.default_kind)
    }

    fn extents_of(&self, range: DeviceRange, stated_base: Option<DeviceRange>) -> Result<Vec<Extent>> {
        extents::extents_of(&self.driver, range, stated_base)
    }

    fn export(&self, extent: &Extent, kind: Option<HandleKind>) -> Result<Exported> {
        export::export(&self.driver, &self.exported_pools, extent, kind)
    }

    fn with_device_context(&self, device: DeviceOrdinal, body: &mut dyn FnMut()) {
        // Also restores the context if the body leaves another one current, or pops ours.
        let _caller = self.driver.keep_caller_context();
        let current = self.driver.enter_for_foreign_code(device);
        if let Err(error) = &current {
            // Calls of the backend report the error themselves; an owner is dropped regardless.
            tracing::debug!(target: crate::LOG, %error, %device, "cannot enter the primary context");
        }
        let _lookups = LookupScope::begin();
        body();
    }

    /// Ends an export. The driver counts no exports: a handle is valid until the memory is freed.
    fn unexport(&self, exported: Exported) -> Result<()> {
        export::unexport(&self.exported_pools, &exported);
        Ok(())
    }

    fn reach(&self, exported: &Exported) -> Option<DeviceRange> {
        export::reach(exported)
    }

    fn open(&self, handles: Vec<ReceivedHandle>, on: DeviceOrdinal, access: Access) -> Result<Opened> {
        self.open.open(&self.driver, &handles, on, access)
    }

    fn close(&self, opened: Opened) -> Result<()> {
        self.open.close(&self.driver, &opened)
    }

    fn create_event(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
        Ok(Box::new(CudaEvent::create(&self.driver, device)?))
    }

    fn create_local_event(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
        Ok(Box::new(CudaEvent::create_local(&self.driver, device)?))
    }

    fn open_event(&self, handle: &[u8], on: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
        Ok(Box::new(CudaEvent::open(&self.driver, handle, on)?))
    }

    /// Waits on the host for all work of a device.
    ///
    /// While this process captures streams into graphs, blocks driver calls of other threads. Breaks a capture on a
    /// stream that this crate has never seen and that does not wait for the legacy default stream: CUDA has no query
    /// for it.
    fn synchronize_device(&self, device: DeviceOrdinal) -> Result<()> {
        let _current = self.driver.enter(device)?;
        self.driver.synchronize_context()
    }

    fn memory(&self) -> &dyn DeviceMemory {
        self
    }

    fn reservations(&self) -> Option<&dyn DeviceReservations> {
        self.driver.api.virtual_memory.as_ref().map(|_| self as &dyn DeviceReservations)
    }

    fn timelines(&self) -> Option<&dyn DeviceTimelines> {
        Some(self)
    }

    fn test_kernels(&self) -> Option<&dyn TestKernels> {
        Some(self)
    }
}
