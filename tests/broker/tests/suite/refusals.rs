//! Errors of an exporter, whose kind and text its importers receive.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use device_ipc_broker_tests::{PINNING, agent};
use device_ipc_core::backend::{
    BackendInfo, Capabilities, DeviceEvent, DeviceIpc, DeviceMemory, DeviceTimelines, Exported, Extent,
    HandleKind, HandleKindInfo, Opened, ReceivedHandle, TestKernels, VendorError, VendorStatus,
};
use device_ipc_core::{Access, DeviceInfo, DeviceOrdinal, DevicePtr, DeviceRange, Error, Ipc, Result};
use device_ipc_mock::MockBackend;

/// The mock with handles that a process opens on one device only, so that the driver exports once more for the second device.
struct FailingExport {
    mock: Arc<dyn DeviceIpc>,
    /// The error of the next export.
    error: Mutex<Option<Error>>,
}

impl DeviceIpc for FailingExport {
    delegate!(info devices visible_devices_variable peer_access capabilities extents_of unexport open close);
    delegate!(create_event open_event synchronize_device memory timelines test_kernels);

    fn handle_kinds(&self) -> Vec<HandleKindInfo> {
        let mut kinds = self.mock.handle_kinds();
        kinds.iter_mut().for_each(|kind| kind.one_open_per_process = true);
        kinds
    }

    fn export(&self, extent: &Extent, kind: Option<HandleKind>) -> Result<Exported> {
        match self.error.lock().expect("no thread panics").take() {
            Some(error) => Err(error),
            None => self.mock.export(extent, kind),
        }
    }
}

impl fmt::Debug for FailingExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FailingExport").finish_non_exhaustive()
    }
}

/// An error of each kind that a driver's export can have.
fn errors() -> Vec<Error> {
    let (backend, device, ptr) = ("mock", DeviceOrdinal::new(0), DevicePtr::new(4096));
    let text = String::from;
    vec![
        Error::OutOfMemory { device, bytes: 4096, detail: text("0 B are free") },
        Error::InvalidRegion(text("it exceeds its allocation")),
        Error::Unsupported { backend, what: text("export"), why: text("of the kind") },
        Error::NoSuchDevice { backend, ordinal: device, count: 0 },
        Error::from(VendorError::new(backend, "export", VendorStatus(7), "MOCK_BROKEN")),
        Error::QuotaExceeded(text("the driver has no further handles")),
        Error::StreamCapturing { what: "an export" },
        Error::InvalidInput { what: text("timeline value 1"), why: text("it is too small") },
        Error::AddressesInUse { range: DeviceRange::new(device, ptr, 4096), detail: text("by a copy") },
        Error::OverlapsInUse { detail: text("of another export") },
        Error::Timeout { what: text("the driver"), after: Duration::from_secs(1), detail: String::new() },
        Error::NotPermitted(text("the driver forbids it")),
    ]
}

#[test]
fn error_of_an_exporter_keeps_its_kind_and_its_text() {
    let mock = MockBackend::from_spec(PINNING).expect("a valid specification");
    let backend = Arc::new(FailingExport { mock, error: Mutex::default() });
    let ipc = Ipc::with_backend(Arc::clone(&backend) as _);
    let export = ipc.share(ipc.allocate(0, 4096).expect("memory")).start().expect("it is shared");
    let mut importer = agent!(PINNING);
    // The handle of the importer's first device was made when the memory was shared.
    importer.ok(&format!("open x {}", export.descriptor()));
    let open = format!("open y {} place=device:1", export.descriptor());
    for error in errors() {
        let (kind, text) = (error.kind(), error.to_string());
        *backend.error.lock().expect("no thread panics") = Some(error);
        let found = importer.fails(&open, &format!("Refused {kind:?}"));
        assert!(found.contains(&text), "{found}");
    }
    importer.ok(&open);
}
