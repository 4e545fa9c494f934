//! An exporter whose driver takes long to make a further handle: importers that need none do not wait.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use device_ipc_broker_tests::{Connection, Forged, FromExporter, Open, Received, ToExporter};
use device_ipc_core::backend::{
    BackendInfo, Capabilities, DeviceEvent, DeviceIpc, DeviceMemory, DeviceTimelines, Exported, Extent,
    HandleKind, HandleKindInfo, Opened, ReceivedHandle, TestKernels,
};
use device_ipc_core::{Access, DeviceInfo, DeviceOrdinal, DeviceRange, Ipc, Result};
use device_ipc_mock::MockBackend;

const DEADLINE: Duration = Duration::from_secs(5);

/// The mock with handles that a process opens on one device only. All exports but the first wait for a permit.
struct SlowExport {
    mock: Arc<dyn DeviceIpc>,
    exports: AtomicUsize,
    begun: Sender<()>,
    permits: Mutex<Receiver<()>>,
}

impl DeviceIpc for SlowExport {
    delegate!(info devices visible_devices_variable peer_access capabilities extents_of unexport open close);
    delegate!(create_event open_event synchronize_device memory timelines test_kernels);

    fn handle_kinds(&self) -> Vec<HandleKindInfo> {
        let mut kinds = self.mock.handle_kinds();
        kinds.iter_mut().for_each(|kind| kind.one_open_per_process = true);
        kinds
    }

    fn export(&self, extent: &Extent, kind: Option<HandleKind>) -> Result<Exported> {
        if self.exports.fetch_add(1, Ordering::Relaxed) > 0 {
            self.begun.send(()).expect("the test listens");
            // Continues also if the test has failed.
            let _ = self.permits.lock().expect("no thread panics").recv();
        }
        self.mock.export(extent, kind)
    }
}

impl fmt::Debug for SlowExport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SlowExport").finish_non_exhaustive()
    }
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
    let (permit, permits) = channel();
    let mock = MockBackend::from_spec("devices=2").expect("a valid specification");
    let (exports, permits) = (AtomicUsize::new(0), Mutex::new(permits));
    let ipc = Ipc::with_backend(Arc::new(SlowExport { mock, exports, begun, permits }));
    let export = ipc.share(ipc.allocate(0, 4096).expect("memory")).start().expect("it is shared");
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
