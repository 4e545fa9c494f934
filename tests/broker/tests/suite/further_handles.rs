//! Exporters whose driver refuses to make a further handle, or takes long: importers receive its errors, and those that need no handle
//! do not wait.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use device_ipc_broker_tests::{
    Connection, DEADLINE, Forged, FromExporter, Open, PINNING, Received, ToExporter, agent,
};
use device_ipc_core::backend::{
    BackendInfo, Capabilities, DeviceEvent, DeviceIpc, DeviceMemory, DeviceTimelines, Exported, Extent,
    HandleKind, HandleKindInfo, Opened, ReceivedHandle, TestKernels, VendorError, VendorStatus,
};
use device_ipc_core::{
    Access, DeviceInfo, DeviceOrdinal, DevicePtr, DeviceRange, Error, Export, Ipc, Result,
};
use device_ipc_mock::MockBackend;

/// The mock with handles that a process opens on one device only, so that the driver exports once more for a second device. Calls a
/// hook before each export.
struct HookedExport<H> {
    mock: Arc<dyn DeviceIpc>,
    hook: H,
}

impl<H: Fn() -> Result<()> + Send + Sync> DeviceIpc for HookedExport<H> {
    delegate!(info devices visible_devices_variable peer_access capabilities extents_of unexport open close);
    delegate!(create_event open_event synchronize_device memory timelines test_kernels);

    fn handle_kinds(&self) -> Vec<HandleKindInfo> {
        let mut kinds = self.mock.handle_kinds();
        kinds.iter_mut().for_each(|kind| kind.one_open_per_process = true);
        kinds
    }

    fn export(&self, extent: &Extent, kind: Option<HandleKind>) -> Result<Exported> {
        (self.hook)()?;
        self.mock.export(extent, kind)
    }
}

impl<H> fmt::Debug for HookedExport<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HookedExport").finish_non_exhaustive()
    }
}

/// Shares memory, for which the driver exports once, with a hook before that and each further export.
fn shared(hook: impl Fn() -> Result<()> + Send + Sync + 'static) -> Export {
    let mock = MockBackend::from_spec(PINNING).expect("a valid specification");
    let ipc = Ipc::with_backend(Arc::new(HookedExport { mock, hook }));
    ipc.share(ipc.allocate(0, 4096).expect("memory")).start().expect("it is shared")
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
    let next = Arc::new(Mutex::new(None));
    let hooked = Arc::clone(&next);
    let export = shared(move || hooked.lock().expect("no thread panics").take().map_or(Ok(()), Err));
    let mut importer = agent!(PINNING);
    // The handle of the importer's first device was made when the memory was shared.
    importer.ok(&format!("open x {}", export.descriptor()));
    let open = format!("open y {} place=device:1", export.descriptor());
    for error in errors() {
        let (kind, text) = (error.kind(), error.to_string());
        *next.lock().expect("no thread panics") = Some(error);
        let found = importer.fails(&open, &format!("Refused {kind:?}"));
        assert!(found.contains(&text), "{found}");
    }
    importer.ok(&open);
}

fn open_on(forged: &Forged, request: u64, device: u32) -> ToExporter {
    ToExporter::Open(Open { on: device, ..forged.open(request) })
}

/// The reply to a request, which must arrive before the deadline.
#[track_caller]
fn reply(connection: &Connection) -> FromExporter {
    match connection.receive(DEADLINE) {
        Received::Packet(bytes, _) => postcard::from_bytes(&bytes).expect("it reads well"),
        other => panic!("no reply: {other:?}"),
    }
}

#[test]
fn open_during_a_slow_export_is_answered_at_once() {
    let (begun, begins) = channel();
    let (permit, permits) = channel::<()>();
    let (exports, permits) = (AtomicUsize::new(0), Mutex::new(permits));
    let export = shared(move || {
        if exports.fetch_add(1, Ordering::Relaxed) > 0 {
            begun.send(()).expect("the test listens");
            // Continues also if the test has failed.
            let _ = permits.lock().expect("no thread panics").recv();
        }
        Ok(())
    });
    let forged = Forged::of(export.descriptor());

    // The handle of this importer's second device is made by the driver.
    let first = Connection::greeted(&forged);
    first.send(&open_on(&forged, 1, 0)).expect("it reads");
    assert!(matches!(reply(&first), FromExporter::Opened(_)));
    first.send(&open_on(&forged, 2, 1)).expect("it reads");
    begins.recv_timeout(DEADLINE).expect("the driver is asked for a further handle");

    // Meanwhile another importer opens on its first device.
    let second = Connection::greeted(&forged);
    second.send(&open_on(&forged, 1, 0)).expect("it reads");
    let FromExporter::Opened(grant) = reply(&second) else { panic!("no lease") };
    assert_eq!(grant.handles.len(), 1);

    permit.send(()).expect("the driver waits");
    assert!(matches!(reply(&first), FromExporter::Opened(_)), "the handle for the second device");
}
