//! Loads the backend, with options.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use device_ipc_core::Result;
use device_ipc_core::backend::{DeviceIpc, HandleKind, Rank, Registration, Unavailable};

use super::ascend::AscendBackend;
use crate::library::NAME;
use crate::memory::kind::{KEY, SHAREABLE};
use crate::memory::options::{PidValidation, allocation_from_environment};
use crate::objects::driver::Driver;

/// A builder for [`AscendBackend`].
///
/// ```no_run
/// # fn main() -> Result<(), device_ipc_core::backend::Unavailable> {
/// use device_ipc_ascend::{LoadOptions, PidValidation};
///
/// let backend = LoadOptions::new().pid_validation(PidValidation::Off).load()?;
/// # drop(backend);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "LoadOptions::load loads the backend"]
pub struct LoadOptions {
    library: Option<PathBuf>,
    validation: Option<PidValidation>,
    default_kind: Option<HandleKind>,
}

impl LoadOptions {
    /// Returns options for the system's library, with the settings of the environment.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the path or the name of the library. It must be an ACL: the initialisers of any library run, and one
    /// without the functions of ACL is refused.
    pub fn library(mut self, path: impl Into<PathBuf>) -> Self {
        self.library = Some(path.into());
        self
    }

    /// Sets whether the driver validates the process that opens a handle. Overrides
    /// [`VALIDATION_VARIABLE`](crate::VALIDATION_VARIABLE).
    pub fn pid_validation(mut self, validation: PidValidation) -> Self {
        self.validation = Some(validation);
        self
    }

    /// Sets the default kind of allocations: [`KEY`] or [`SHAREABLE`]. Overrides
    /// [`ALLOCATION_VARIABLE`](crate::ALLOCATION_VARIABLE).
    pub fn allocates(mut self, kind: HandleKind) -> Self {
        self.default_kind = Some(kind);
        self
    }

    /// Loads the backend.
    ///
    /// # Errors
    ///
    /// Returns why Ascend is unavailable, with a remedy.
    pub fn load(self) -> Result<Arc<AscendBackend>, Unavailable> {
        let validation = match self.validation {
            Some(validation) => validation,
            None => PidValidation::from_environment()?,
        };
        let default_kind = match self.default_kind {
            Some(kind @ (KEY | SHAREABLE)) => kind,
            Some(other) => {
                let detail = format!(
                    "cannot allocate for handles of kind {}: this version supports kinds 1 (key) and 2 (shareable \
                     handle)",
                    other.0
                );
                return Err(Unavailable::Failed { detail });
            }
            None => allocation_from_environment()?,
        };
        let driver = Driver::load(self.library.as_deref())?;
        Ok(AscendBackend::new(driver, validation, default_kind))
    }
}

impl AscendBackend {
    /// Loads the library in [`LIBRARY_VARIABLE`](crate::LIBRARY_VARIABLE), or else `libascendcl.so`, or else
    /// `libacl_rt.so`.
    ///
    /// # Errors
    ///
    /// Returns why Ascend is unavailable, with a remedy.
    pub fn load() -> Result<Arc<Self>, Unavailable> {
        LoadOptions::new().load()
    }

    /// Loads the library with this path or name.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn load_from(path: impl AsRef<Path>) -> Result<Arc<Self>, Unavailable> {
        LoadOptions::new().library(path.as_ref()).load()
    }
}

/// `kDLExtDev` of `dlpack.h`, which torch_npu uses.
const DLPACK_EXTENSION: i32 = 12;

/// The registration of this backend, for [`Backends::with`](device_ipc_core::backend::Backends::with).
pub const REGISTRATION: Registration = Registration::new(NAME, Rank(200), load)
    .with_device_kind("npu")
    .with_dlpack_device_type(DLPACK_EXTENSION)
    .with_diagnosis(&super::diagnosis::AscendDiagnosis);

device_ipc_core::backend::register_backend!(REGISTRATION);

fn load() -> Result<Arc<dyn DeviceIpc>, Unavailable> {
    Ok(AscendBackend::load()?)
}
