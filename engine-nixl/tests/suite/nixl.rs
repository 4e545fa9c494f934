//! Processes of tests with the real NIXL.

use std::env;
use std::sync::Arc;

use device_ipc_core::backend::engine::TransferEngine;
use device_ipc_nixl::{LIBRARY_VARIABLE, NixlEngine};
use device_ipc_test_process::Process;

pub(crate) fn engine() -> Result<Arc<dyn TransferEngine>, String> {
    match NixlEngine::load() {
        Ok(engine) => Ok(Arc::new(engine)),
        Err(error) => Err(error.to_string()),
    }
}

/// Returns the settings of a process whose environment has no others: UCX on one network device, by TCP alone. NIXL logs the errors
/// that the tests provoke.
pub(crate) fn environment(device: &str) -> Vec<(&str, &str)> {
    let settings = [("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", device), ("NIXL_LOG_LEVEL", "FATAL")];
    settings.into_iter().filter(|(name, _)| env::var_os(name).is_none()).collect()
}

/// Loads the engine of a process, unless no NIXL is installed; prints the reason then.
pub(crate) fn loaded(mut process: Process, arguments: &str) -> Option<Process> {
    let loaded = process.ask(&format!("load {arguments}"));
    if loaded.starts_with("library not found") && env::var_os(LIBRARY_VARIABLE).is_none() {
        eprintln!("skipped: {loaded}; `.ci/nixl` downloads it");
        return None;
    }
    assert!(loaded.starts_with("loaded"), "{loaded}");
    Some(process)
}
