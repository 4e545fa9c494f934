//! The backend type, and the main trait.

use std::fmt;
use std::sync::Arc;

use device_ipc_core::backend::{
    BackendInfo, Capabilities, DeviceEvent, DeviceIpc, DeviceMemory, DeviceReservations, DeviceTimelines,
    Exported, Extent, HandleKind, HandleKindInfo, Opened, ReceivedHandle, TestKernels,
};
use device_ipc_core::{Access, DeviceInfo, DeviceOrdinal, DeviceRange, Result};

use crate::library::{NAME, VISIBLE_DEVICES, call};
use crate::memory::options::PidValidation;
use crate::memory::shareable::reserved::ReservationTable;
use crate::memory::state::MemoryState;
use crate::memory::wire::pid_bytes;
use crate::memory::{kind, open};
use crate::objects::driver::Driver;
use crate::objects::event::{AscendEvent, has_events};
use crate::objects::host_pages::HostPages;
use crate::objects::peers::Reach;
use crate::objects::timeline_trial::has_timelines;

/// The Huawei Ascend backend. See the [crate's documentation](crate).
///
/// Create it once per process and share it, as [`Backends`](device_ipc_core::backend::Backends) does.
pub struct AscendBackend {
    driver: Arc<Driver>,
    info: BackendInfo,
    validation: PidValidation,
    /// The kind that [`DeviceMemory::allocate`] allocates for.
    pub(super) default_kind: HandleKind,
    pub(super) memory: MemoryState,
    pub(super) reservations: ReservationTable,
    pub(super) host_pages: HostPages,
}

/// Without the table of open handles, whose bytes are not for logs.
impl fmt::Debug for AscendBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AscendBackend").field("info", &self.info).finish_non_exhaustive()
    }
}

impl AscendBackend {
    pub(super) fn new(driver: Arc<Driver>, validation: PidValidation, default_kind: HandleKind) -> Arc<Self> {
        let info = BackendInfo::new(NAME, driver.version(), Some(driver.file.clone()));
        Arc::new(Self {
            info,
            validation,
            default_kind,
            memory: MemoryState::new(&driver, validation),
            reservations: ReservationTable::new(&driver),
            host_pages: HostPages::default(),
            driver,
        })
    }

    pub(crate) fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// Returns whether the runtime has the functions of shareable handles.
    fn has_shareable(&self) -> bool {
        let acl = &self.driver.acl;
        acl.aclrtMemExportToShareableHandle.is_ok()
            && acl.aclrtMemImportFromShareableHandle.is_ok()
            && acl.aclrtMemSetPidToShareableHandle.is_ok()
            && acl.aclrtMallocPhysical.is_ok()
            && acl.aclrtMapMem.is_ok()
    }
}

impl DeviceIpc for AscendBackend {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(self.driver.devices.iter().map(|device| device.info.clone()).collect())
    }

    fn visible_devices_variable(&self) -> &'static str {
        VISIBLE_DEVICES
    }

    fn peer_access(&self, from: DeviceOrdinal, to: DeviceOrdinal) -> Result<bool> {
        Ok(self.driver.reach_of(from, to)? != Reach::None)
    }

    fn capabilities(&self, device: DeviceOrdinal) -> Result<Capabilities> {
        let ipc_events = has_events(&self.driver, device)?;
        let timelines = has_timelines(&self.driver, &self.host_pages, device)?;
        Ok(Capabilities::NONE.with_ipc_events(ipc_events).with_timelines(timelines))
    }

    fn handle_kinds(&self) -> Vec<HandleKindInfo> {
        kind::all(self.has_shareable(), self.validation == PidValidation::On, self.default_kind)
    }

    fn extents_of(&self, range: DeviceRange, stated_base: Option<DeviceRange>) -> Result<Vec<Extent>> {
        self.memory.extents_of(range, stated_base)
    }

    fn export(&self, extent: &Extent, kind: Option<HandleKind>) -> Result<Exported> {
        self.memory.export(extent, kind)
    }

    fn with_device_context(&self, device: DeviceOrdinal, body: &mut dyn FnMut()) {
        self.driver.run_in_context(device, body);
    }

    /// Ends an export. A key is then destroyed with the other keys of its block; a shareable handle is valid until the
    /// memory is freed.
    fn unexport(&self, exported: Exported) -> Result<()> {
        self.memory.unexport(&exported)
    }

    fn reach(&self, exported: &Exported) -> Option<DeviceRange> {
        self.memory.reach(exported)
    }

    fn authorize(&self, exported: &Exported, peer: &[u8]) -> Result<()> {
        self.memory.authorize(exported, peer)
    }

    /// Returns the result of `aclrtDeviceGetBareTgid`: the process id on the host, also in a container.
    fn local_peer_id(&self, on: DeviceOrdinal) -> Result<Vec<u8>> {
        self.driver.bare_tgid(on).map(pid_bytes)
    }

    fn open(&self, handles: Vec<ReceivedHandle>, on: DeviceOrdinal, access: Access) -> Result<Opened> {
        open::open(&self.driver, &handles, on, access)
    }

    fn close(&self, opened: Opened) -> Result<()> {
        open::close(&self.driver, &opened)
    }

    fn create_event(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
        Ok(Box::new(AscendEvent::create(&self.driver, device)?))
    }

    fn create_local_event(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
        Ok(Box::new(AscendEvent::create_local(&self.driver, device)?))
    }

    fn open_event(&self, handle: &[u8], on: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
        Ok(Box::new(AscendEvent::open(&self.driver, handle, on)?))
    }

    fn synchronize_device(&self, device: DeviceOrdinal) -> Result<()> {
        let _current = self.driver.enter(device)?;
        // SAFETY: takes no arguments; the device's default context is current.
        self.driver.check("aclrtSynchronizeDevice", unsafe { call!(self.driver, aclrtSynchronizeDevice()) })
    }

    fn memory(&self) -> &dyn DeviceMemory {
        self
    }

    fn reservations(&self) -> Option<&dyn DeviceReservations> {
        self.has_shareable().then_some(self as &dyn DeviceReservations)
    }

    fn timelines(&self) -> Option<&dyn DeviceTimelines> {
        self.driver.has_value_operations().then_some(self as &dyn DeviceTimelines)
    }

    fn test_kernels(&self) -> Option<&dyn TestKernels> {
        Some(self)
    }
}
