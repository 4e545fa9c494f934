//! Copies of named tensors through host memory, with importers that request any bytes and processes that die during a copy.

use device_ipc_broker_tests::{
    ASCEND, CUDA, Child, Connection, DEADLINE, Forged, FromExporter, PINNING, REVOKING, Refusal, ToExporter,
    agent, eventually, kill_points,
};
use device_ipc_core::Descriptor;

use super::{CHUNK, built, copies_after_a_timeout, copy_of};

/// The length of each tensor: four chunks, the last of them short.
const LEN: u64 = 3 * CHUNK + 5;
/// The number of tensors, on two devices in turn. Each lies in an allocation of its own.
const COUNT: u64 = 4;

/// An exporter with short chunks and an export of the tensors `t0` to `t3`, each filled with another byte.
fn exporter(machine: &str, dies_at: Option<&str>) -> (Child, Descriptor) {
    let mut exporter = agent!(machine, dies_at: dies_at);
    exporter.ok(&format!("staging-limits {CHUNK} 1000000000"));
    let descriptor = exporter.ok(&format!("share-blocks x {COUNT} {LEN} devices=2"));
    exporter.ok(&format!("open own {descriptor}"));
    for index in 0..COUNT {
        exporter.ok(&format!("tensor-fill own t{index} {}", 10 + index));
    }
    exporter.ok("drop own");
    (exporter, descriptor.parse().expect("a descriptor"))
}

#[track_caller]
fn has_all_bytes(importer: &mut Child, machine: &str) {
    for index in 0..COUNT {
        let byte = 10 + index;
        assert_eq!(importer.ok(&format!("tensor-ends y t{index}")), format!("{byte} {byte}"), "{machine}");
    }
}

#[test]
fn copy_of_tensors_on_two_devices_leaves_nothing() {
    for machine in built([PINNING, REVOKING, CUDA, ASCEND]) {
        let (mut exporter, descriptor) = exporter(machine, None);
        let mut importer = agent!(machine);
        let before = importer.allocated();
        for _ in 0..3 {
            assert_eq!(importer.ok(&copy_of(&descriptor)), COUNT.to_string(), "{machine}");
            eventually(machine, 0, || exporter.holders("x"));
            has_all_bytes(&mut importer, machine);
            importer.ok("drop y");
        }
        assert_eq!(exporter.counter("stagings_total"), 3 * 2, "{machine}: one copy for each home device");
        eventually(machine, 0, || exporter.counter("staging_bytes"));
        eventually(machine, before, || importer.allocated());
        exporter.ok("drop x");
        eventually(machine, 0, || exporter.counter("exports"));
    }
}

#[test]
fn exporter_death_during_a_copy_of_tensors_fails_it_completely() {
    for machine in built([PINNING, CUDA, ASCEND]) {
        let mut importer = agent!(machine);
        let before = importer.allocated();
        // In the first copy of seven chunks, and in the second: what was copied before is freed. Not at the last chunk, whose reply
        // may be sent before the exporter dies.
        for visit in [1, 3, 10, 12] {
            let point = format!("exporter:staging-chunk={visit}");
            let (mut dying, descriptor) = exporter(machine, Some(&point));
            importer.fails(&(copy_of(&descriptor) + " timeout=60000"), "ExporterGone");
            dying.is_killed();
            eventually(&format!("{machine} {point}"), before, || importer.allocated());
        }
        let (_living, descriptor) = exporter(machine, None);
        importer.ok(&copy_of(&descriptor));
        has_all_bytes(&mut importer, machine);
    }
}

#[test]
fn importer_death_during_a_copy_of_tensors_ends_its_leases() {
    for machine in built([PINNING, CUDA, ASCEND]) {
        let (mut exporter, descriptor) = exporter(machine, None);
        for point in kill_points("importer", "staging-") {
            for visit in if point.ends_with("chunk") { vec![1, 12] } else { vec![1, 2] } {
                let mut importer = agent!(machine, dies_at: Some(&format!("{point}={visit}")));
                importer.send(&copy_of(&descriptor));
                importer.is_killed();
                let when = format!("{machine} {point}={visit}");
                eventually(&when, (0, 0), || (exporter.holders("x"), exporter.counter("staging_bytes")));
            }
        }
        let mut living = agent!(machine);
        living.ok(&copy_of(&descriptor));
        has_all_bytes(&mut living, machine);
    }
}

#[test]
fn stopped_exporter_times_out_a_copy_of_tensors() {
    let (exporter, descriptor) = exporter(PINNING, None);
    let mut importer = copies_after_a_timeout(exporter, &descriptor);
    has_all_bytes(&mut importer, PINNING);
}

/// Sends a request for these spans of the first device's memory, and returns the reply.
fn stage(descriptor: &Descriptor, spans: &[(u32, u64, u64)]) -> (Connection, FromExporter) {
    let forged = Forged::of(descriptor);
    let connection = Connection::greeted(&forged);
    connection.send(&ToExporter::Stage(forged.stage(1, spans))).expect("it reads");
    let reply = connection.receive_message();
    (connection, reply)
}

#[test]
fn spans_outside_the_export_are_refused() {
    let (mut exporter, descriptor) = exporter(PINNING, None);
    // Two of the tensors are on the first device.
    for (spans, why) in [
        (&[(2, 0, 1)][..], "does not exist: the export has 2 regions"),
        (&[(u32::MAX, 0, 1)], "does not exist"),
        (&[(0, 0, 1 << 40)], "exceeds the region"),
        (&[(1, 1 << 40, 1)], "exceeds the region"),
        (&[(0, u64::MAX, u64::MAX)], "exceeds the region"),
        (&[(0, 0, 0)], "has no bytes"),
        (&[(0, 0, 100), (0, 99, 1)], "begins before the end"),
        (&[(0, 0, 100), (0, 0, 100)], "begins before the end"),
        (&[(1, 0, 1), (0, 0, 1)], "begins before the end"),
    ] {
        let (_connection, reply) = stage(&descriptor, spans);
        let FromExporter::Refused { request: 1, refusal: Refusal::Failed { detail, .. } } = reply else {
            panic!("{spans:?}: {reply:?}")
        };
        assert!(detail.contains(why), "{spans:?}: {detail}");
        let refused = format!("{spans:?}");
        eventually(&refused, (0, 0), || (exporter.holders("x"), exporter.counter("staging_bytes")));
    }
    let mut importer = agent!(PINNING);
    importer.ok(&copy_of(&descriptor));
    has_all_bytes(&mut importer, PINNING);
}

#[test]
fn too_many_spans_close_the_connection() {
    let (mut exporter, descriptor) = exporter(PINNING, None);
    let most: Vec<_> = (0..4096).map(|index| (0, 2 * index, 1)).collect();
    let (connection, reply) = stage(&descriptor, &most);
    let FromExporter::Staging { lease, bytes: 4096, .. } = reply else { panic!("{reply:?}") };
    connection.send(&ToExporter::StageNext { request: 2, lease, chunk: 0 }).expect("it reads");
    let staged = FromExporter::Staged { request: 2, chunk: 0, bytes: 4096 };
    assert_eq!(connection.receive_message(), staged, "a chunk of thousands of spans");
    let more: Vec<_> = (0..4097).map(|index| (0, 2 * index, 1)).collect();
    connection.send(&ToExporter::Stage(Forged::of(&descriptor).stage(3, &more))).expect("it reads");
    connection.is_closed_within(DEADLINE);
    eventually("holders", 0, || exporter.holders("x"));
    eventually("host memory", 0, || exporter.counter("staging_bytes"));
}
