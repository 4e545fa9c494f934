//! The conformance suite, on the backend that is selected by its name.

use std::process::ExitCode;
use std::sync::Arc;

use device_ipc_conformance::Suite;
use device_ipc_core::Error;
use device_ipc_core::backend::{Backends, DeviceIpc, Unavailable};

fn main() -> ExitCode {
    Suite::new(acme::NAME).variant("default", load).expected_skips(include_str!("expected-skips.txt")).run()
}

/// Loads the backend by its registration, as programs do.
fn load() -> Result<Arc<dyn DeviceIpc>, Unavailable> {
    Backends::registered().named(acme::NAME).map_err(|error| match error {
        Error::BackendUnavailable { reason, .. } => reason,
        error => Unavailable::Failed { detail: error.to_string() },
    })
}
