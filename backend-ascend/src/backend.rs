//! The backend as the rest of device-ipc sees it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use device_ipc_core::backend::TestKernels;
use device_ipc_core::{
    Access, BackendInfo, Capabilities, DeviceEvent, DeviceInfo, DeviceIpc, DeviceMemory, DeviceOrdinal,
    DeviceRange, DeviceTimelines, Exported, Extent, HandleKind, HandleKindInfo, Opened, Rank, ReceivedHandle,
    Registration, Result, Unavailable,
};

use crate::driver::{Driver, VISIBLE_DEVICES, call};
use crate::event::AscendEvent;
use crate::options::PidValidation;
use crate::peers::Reach;
use crate::wire::pid_bytes;
use crate::{NAME, device, kinds, options, timelines};

/// Huawei Ascend by its runtime library. See the [crate's documentation](crate).
///
/// Make it once for a process and share it: [`Backends`](device_ipc_core::Backends) does.
#[derive(Debug)]
pub struct AscendBackend {
    driver: Arc<Driver>,
    info: BackendInfo,
}

/// This backend, for [`Backends::with`](device_ipc_core::Backends::with).
pub const REGISTRATION: Registration = Registration::new(NAME, Rank::ASCEND, load);

device_ipc_core::register_backend!(REGISTRATION);

fn load() -> Result<Arc<dyn DeviceIpc>, Unavailable> {
    Ok(AscendBackend::load()?)
}

/// What to load, and how it is to share.
///
/// ```no_run
/// # fn main() -> Result<(), device_ipc_core::Unavailable> {
/// use device_ipc_ascend::{LoadOptions, PidValidation};
///
/// let backend = LoadOptions::new().pid_validation(PidValidation::Off).load()?;
/// # drop(backend);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "nothing is loaded before LoadOptions::load"]
pub struct LoadOptions {
    library: Option<PathBuf>,
    validation: Option<PidValidation>,
    allocates: Option<HandleKind>,
}

impl LoadOptions {
    /// The system's library, and what the environment says.
    pub fn new() -> Self {
        Self::default()
    }

    /// Loads the library at this path, or of this name. It has to be an ACL: others run their initialisers, and are
    /// refused where they lack its functions.
    pub fn library(mut self, path: impl Into<PathBuf>) -> Self {
        self.library = Some(path.into());
        self
    }

    /// States whether the driver checks who opens a key, whatever [`VALIDATION_VARIABLE`](crate::VALIDATION_VARIABLE)
    /// says.
    pub fn pid_validation(mut self, validation: PidValidation) -> Self {
        self.validation = Some(validation);
        self
    }

    /// States what memory is allocated as where nobody asks for a kind, whatever
    /// [`ALLOCATION_VARIABLE`](crate::ALLOCATION_VARIABLE) says: for [`KEY`](crate::KEY) or for
    /// [`SHAREABLE`](crate::SHAREABLE) handles.
    pub fn allocates(mut self, kind: HandleKind) -> Self {
        self.allocates = Some(kind);
        self
    }

    /// Loads it.
    ///
    /// # Errors
    ///
    /// Why Ascend cannot be used here, and what to do about it.
    pub fn load(self) -> Result<Arc<AscendBackend>, Unavailable> {
        let validation = match self.validation {
            Some(validation) => validation,
            None => PidValidation::from_environment()?,
        };
        let allocates = match self.allocates {
            Some(kind @ (kinds::KEY | kinds::SHAREABLE)) => kind,
            Some(other) => {
                let detail = format!("there is no memory for handles of kind {}: kinds are 1 and 2", other.0);
                return Err(Unavailable::Failed { detail });
            }
            None => options::allocation_from_environment()?,
        };
        Driver::load(self.library.as_deref(), validation, allocates).map(AscendBackend::new)
    }
}

impl AscendBackend {
    /// Loads the library that [`LIBRARY_VARIABLE`](crate::LIBRARY_VARIABLE) names, else `libascendcl.so`, else
    /// `libacl_rt.so`.
    ///
    /// # Errors
    ///
    /// Why Ascend cannot be used here, and what to do about it.
    pub fn load() -> Result<Arc<Self>, Unavailable> {
        LoadOptions::new().load()
    }

    /// Loads the library at `path`, or of that name.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn load_from(path: impl AsRef<Path>) -> Result<Arc<Self>, Unavailable> {
        LoadOptions::new().library(path.as_ref()).load()
    }

    fn new(driver: Arc<Driver>) -> Arc<Self> {
        let info = BackendInfo::new(NAME, driver.version(), Some(driver.file.clone()));
        Arc::new(Self { driver, info })
    }

    pub(crate) fn driver(&self) -> &Arc<Driver> {
        &self.driver
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
        Ok(self.driver.reach_of(from, to)? != Reach::Nothing)
    }

    fn capabilities(&self, device: DeviceOrdinal) -> Result<Capabilities> {
        device::capabilities(&self.driver, device)
    }

    fn handle_kinds(&self) -> Vec<HandleKindInfo> {
        let acl = &self.driver.acl;
        let shareable = acl.aclrtMemExportToShareableHandle.is_ok()
            && acl.aclrtMemImportFromShareableHandle.is_ok()
            && acl.aclrtMemSetPidToShareableHandle.is_ok()
            && acl.aclrtMallocPhysical.is_ok()
            && acl.aclrtMapMem.is_ok();
        kinds::all(shareable, self.driver.validation, self.driver.allocates)
    }

    fn extents_of(&self, range: DeviceRange, stated_base: Option<DeviceRange>) -> Result<Vec<Extent>> {
        self.driver.extents_of(range, stated_base)
    }

    fn export(&self, extent: &Extent, kind: Option<HandleKind>) -> Result<Exported> {
        self.driver.export(extent, kind)
    }

    fn with_device_context(&self, device: DeviceOrdinal, body: &mut dyn FnMut()) {
        self.driver.run_in_context(device, body);
    }

    /// Ends a key. A shareable handle ends with its memory.
    fn unexport(&self, exported: Exported) -> Result<()> {
        self.driver.unexport(&exported)
    }

    fn reach(&self, exported: &Exported) -> Option<DeviceRange> {
        self.driver.reach(exported)
    }

    fn authorize(&self, exported: &Exported, peer: &[u8]) -> Result<()> {
        self.driver.authorize(exported, peer)
    }

    /// What `aclrtDeviceGetBareTgid` says: the process id on the host, also in a container.
    fn local_peer_id(&self, on: DeviceOrdinal) -> Result<Vec<u8>> {
        self.driver.bare_tgid(on).map(pid_bytes)
    }

    fn open(&self, handles: Vec<ReceivedHandle>, on: DeviceOrdinal, access: Access) -> Result<Opened> {
        self.driver.open(&handles, on, access)
    }

    fn close(&self, opened: Opened) -> Result<()> {
        self.driver.close(&opened)
    }

    fn create_event(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
        Ok(Box::new(AscendEvent::create(&self.driver, device)?))
    }

    fn open_event(&self, handle: &[u8], on: DeviceOrdinal) -> Result<Box<dyn DeviceEvent>> {
        Ok(Box::new(AscendEvent::open(&self.driver, handle, on)?))
    }

    fn synchronize_device(&self, device: DeviceOrdinal) -> Result<()> {
        let _current = self.driver.enter(device)?;
        // SAFETY: takes nothing; the device's default context is current.
        self.driver.check("aclrtSynchronizeDevice", unsafe { call!(self.driver, aclrtSynchronizeDevice()) })
    }

    fn memory(&self) -> &dyn DeviceMemory {
        self
    }

    fn timelines(&self) -> Option<&dyn DeviceTimelines> {
        timelines::exist(&self.driver).then_some(self as &dyn DeviceTimelines)
    }

    fn test_kernels(&self) -> Option<&dyn TestKernels> {
        Some(self)
    }
}
