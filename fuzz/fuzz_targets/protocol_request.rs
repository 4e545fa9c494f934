//! Conversations of an exporter with an importer that sends arbitrary messages.
#![no_main]

use std::sync::{Arc, OnceLock};

use device_ipc_core::DeviceOrdinal;
use device_ipc_core::backend::DeviceIpc;
use device_ipc_core::fuzzing::Exporter;
use device_ipc_mock::MockBackend;

/// Two allocations whose handles travel with file descriptors.
fn exporter() -> Exporter {
    let backend: Arc<dyn DeviceIpc> =
        MockBackend::from_spec("handles=fds").expect("a machine without faults");
    let extents = [4096, 65536].map(|bytes| {
        let range = backend.memory().allocate(DeviceOrdinal::new(0), bytes).expect("it has memory");
        backend.extents_of(range, None).expect("it was just allocated").remove(0)
    });
    Exporter::new(&backend, &extents)
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    static EXPORTER: OnceLock<Exporter> = OnceLock::new();
    EXPORTER.get_or_init(exporter).serve(bytes);
});
