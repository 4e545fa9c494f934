//! Copies between hosts by an engine of sockets.

use device_ipc_core::{CopyPolicy, Ipc, Remote};
use device_ipc_mock::MockBackend;
use device_ipc_remote_tests::{
    RingShape, cases, missing_settings_are_named, other_engine_is_refused, socket_engine,
};
use device_ipc_test_process::Process;

/// The smallest region, a tensor, a page, and one of many packets.
const LENGTHS: [usize; 4] = [1, 64, 4096, 64 << 20];

/// A ring of few slots, one of a single slot, and one whose slots take a while.
const RINGS: [RingShape; 3] = [(3, 8192, 300), (1, 256, 200), (2, 3 << 20, 20)];

device_ipc_remote_tests::processes! {
    exporter: exporter, || socket_engine("sockets");
    importer: importer, || socket_engine("sockets");
    other_importer: importer, || socket_engine("other");
}

fn start(role: &str, arguments: &str) -> Option<Process> {
    let mut process = Process::of_test(&format!("{}::{role}", module_path!()), &[]);
    let loaded = process.ask(&format!("load {arguments}"));
    assert!(loaded.starts_with("loaded"), "{loaded}");
    Some(process)
}

cases!(all: start; &LENGTHS, &RINGS, pulls: 500, publications: 2_000);

#[test]
fn ring_of_the_same_process_is_opened_and_not_copied() {
    let backend = MockBackend::from_spec("devices=1").unwrap();
    let ipc = Ipc::builder().remote(Remote::new(socket_engine("sockets").unwrap())).with_backend(backend);
    let ring = ipc.ring(ipc.allocate(0, 512).unwrap()).start().unwrap();
    let readers = [CopyPolicy::IfNeeded, CopyPolicy::PulledIfNeeded].map(|policy| {
        let reader = ipc.open_ring(ring.descriptor()).copy(policy).at_home().unwrap();
        assert!(!reader.is_copy(), "{policy:?}");
        reader
    });
    let refused = |policy| ipc.open_ring(ring.descriptor()).copy(policy).at_home().unwrap_err().to_string();
    for policy in [CopyPolicy::Always, CopyPolicy::Pulled] {
        assert!(refused(policy).contains("without CopyPolicy::Pulled"), "{policy:?}: {}", refused(policy));
    }
    for policy in [CopyPolicy::StagedIfNeeded, CopyPolicy::Staged] {
        assert!(
            refused(policy).contains("copy a ring through host memory"),
            "{policy:?}: {}",
            refused(policy)
        );
    }
    assert_eq!(ring.readers(), readers.len());
}

#[test]
fn ring_has_readers_of_several_hosts() {
    device_ipc_remote_tests::ring_has_readers_of_several_hosts(start);
}

#[test]
fn settings_of_both_sides_are_needed() {
    missing_settings_are_named(start);
}

#[test]
fn engines_of_both_sides_are_equal() {
    let pair = device_ipc_remote_tests::Pair::start(start).expect("the engine needs nothing");
    other_engine_is_refused(pair, start("other_importer", "").expect("as above"));
}

#[test]
fn shared_bytes_alone_are_registered_until_the_export_ends() {
    let start = |role| start(role, "").expect("the engine needs nothing");
    let (mut exporter, mut importer) = (start("exporter"), start("importer"));
    let descriptor = exporter.ask("share x 5000 1");
    assert_eq!(exporter.ask("registered"), "0", "nothing has been opened");
    for _ in 0..2 {
        let answer = importer.ask(&format!("open pulled 1 60000 {descriptor}"));
        assert_eq!(answer, "5000 B right, copied");
        assert_eq!(exporter.ask("registered"), "5000", "once, and not the memory beside it");
    }
    assert_eq!(exporter.ask("close x 60000"), "closed");
    assert_eq!(exporter.ask("registered"), "0");
}
