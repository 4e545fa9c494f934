//! The loaded library: its functions, and the errors of its statuses. Knows no agent.

pub(crate) mod search;
pub(crate) mod status;

use std::fmt;
use std::path::Path;

use device_ipc_core::Result;
use device_ipc_core::backend::{Unavailable, VendorError, VendorStatus};

use crate::bindings::{Api, Status};
use status::SUCCESS;

/// The name of the engine, in errors and as the name of its metadata format.
pub const NAME: &str = "nixl";

/// NIXL's C API, loaded. Never unloaded: NIXL and UCX run threads and have handlers that run at exit.
pub(crate) struct NixlLibrary {
    pub(crate) api: Api,
    pub(crate) file: String,
}

impl fmt::Debug for NixlLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NixlLibrary").field("file", &self.file).finish_non_exhaustive()
    }
}

impl NixlLibrary {
    /// Loads the library at `path`, or from where it is installed.
    pub(crate) fn load(path: Option<&Path>) -> Result<Self, Unavailable> {
        search::load(path)
    }

    /// Returns the error of `call`, unless its status is a success.
    pub(crate) fn check(call: &'static str, status: Status) -> Result<(), VendorError> {
        if status == SUCCESS { Ok(()) } else { Err(Self::error(call, status)) }
    }

    /// Returns the error of `call`.
    pub(crate) fn error(call: &'static str, status: Status) -> VendorError {
        VendorError::new(NAME, call, VendorStatus(status.0), status::name(status))
            .with_hint(status::hint(call, status))
    }
}
