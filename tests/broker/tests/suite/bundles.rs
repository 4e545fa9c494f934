//! Bundles of many allocations: what they cost, and what is left where one of them cannot be opened.

use device_ipc_broker_tests::{Answer, DESCRIPTORS, PINNING, agent, eventually};
use device_ipc_core::Descriptor;

/// Each allocation has a handle with a file descriptor, and a region may lie in many of them.
const NEIGHBOURS: &str = "devices=2;handles=fds;neighbours=on";

#[test]
fn bundle_open_refused_by_driver_names_tensor_and_closes_all() {
    for machine in [PINNING, DESCRIPTORS] {
        let mut exporter = agent!(machine);
        let mut importer = agent!(&format!("{machine};fault=open:3"));
        let before = importer.census();
        let descriptor = exporter.ok("share-blocks x 5 4096");
        let Answer::Failed(failure) = importer.ask(&format!("open x {descriptor}")) else {
            panic!("{machine}: the third allocation was to be refused");
        };
        assert_eq!(failure.kind, "InBundle", "{}", failure.text);
        assert!(failure.text.contains("\"t2\"") && failure.text.contains("open"), "{}", failure.text);
        let counts = |importer: &mut device_ipc_broker_tests::Child| {
            ["driver_opens_total", "driver_closes_total", "mapped_bytes"].map(|name| importer.counter(name))
        };
        assert_eq!(counts(&mut importer), [2, 2, 0], "{machine}: what was opened is closed");
        assert_eq!(
            importer.census().of_kind("memfd:device-ipc-mock"),
            before.of_kind("memfd:device-ipc-mock")
        );
        eventually("leases of the exporter", 0, || exporter.counter("leases"));
        assert_eq!(importer.ok(&format!("open x {descriptor}")), "5", "{machine}: it is refused once");
        assert_eq!(counts(&mut importer)[..2], [7, 2]);
        importer.ok("drop x");
        exporter.ok("close x 10000");
        assert_eq!(exporter.allocated(), 0);
    }
}

#[test]
fn bundle_of_hundreds_of_allocations_takes_one_request() {
    for machine in [PINNING, DESCRIPTORS] {
        let (mut exporter, mut importer) = (agent!(machine), agent!(machine));
        let descriptor = exporter.ok("share-blocks x 600 4096");
        let before = importer.counter("requests_total");
        assert_eq!(importer.ok(&format!("open x {descriptor}")), "600");
        assert_eq!(importer.counter("requests_total") - before, 1, "{machine}");
        assert_eq!(importer.counter("driver_opens_total"), 600, "{machine}");
        importer.ok("tensor-fill x t599 7");
        let mut another = agent!(machine);
        another.ok(&format!("open x {descriptor}"));
        assert_eq!(another.ok("tensor-ends x t599"), "7 7");
        assert_eq!(another.ok("tensor-ends x t598"), "0 0");
        drop(another);
        importer.ok("drop x");
        exporter.ok("close x 10000");
        eventually("bytes mapped", 0, || importer.counter("mapped_bytes"));
        assert_eq!(exporter.allocated(), 0);
    }
}

#[test]
fn overlapping_bundle_memory_is_one_range() {
    let (mut exporter, mut importer) = (agent!(NEIGHBOURS), agent!(NEIGHBOURS));
    let text = exporter.ok("share-blocks x 300 4096 neighbours=1");
    let descriptor: Descriptor = text.parse().expect("it is a bundle");
    assert_eq!((descriptor.allocations(), descriptor.tensors().len()), (300, 2));
    importer.ok(&format!("open x {text}"));
    assert_eq!(importer.counter("driver_opens_total"), 1, "one call for all of them");
    // The tensors share the last half of the first and the first half of the second.
    importer.ok("tensor-fill x a 3");
    assert_eq!(importer.ok("tensor-ends x b"), "3 0");
    importer.ok("tensor-fill x b 4");
    assert_eq!(importer.ok("tensor-ends x a"), "3 4");
    importer.ok("drop x");
    exporter.ok("close x 10000");
    assert_eq!(exporter.allocated(), 0);
}

#[test]
fn bundle_with_too_many_adjacent_allocations_is_refused() {
    let mut exporter = agent!(NEIGHBOURS);
    let text = exporter.ok("share-blocks x 2046 4096 neighbours=1");
    let descriptor: Descriptor = text.parse().expect("it is a bundle");
    assert_eq!(descriptor.allocations(), 2046);
    exporter.ok("close x 10000");
    let Answer::Failed(failure) = exporter.ask("share-blocks x 2049 4096 neighbours=1") else {
        panic!("2049 adjacent allocations were shared");
    };
    assert_eq!(failure.kind, "InBundle", "{}", failure.text);
    assert!(failure.text.contains("2049 adjacent"), "{}", failure.text);
    assert_eq!(exporter.allocated(), 0);
}

#[test]
fn exporter_killed_while_a_bundle_is_open_leaves_nothing() {
    let (mut exporter, mut importer) = (agent!(DESCRIPTORS), agent!(DESCRIPTORS));
    let descriptor = exporter.ok("share-blocks x 20 4096");
    importer.ok(&format!("open x {descriptor}"));
    drop(exporter);
    eventually("the end is noticed", "ExporterGone".to_owned(), || {
        match importer.ask(&format!("open again {descriptor}")) {
            Answer::Failed(failure) => failure.kind,
            other => format!("{other:?}"),
        }
    });
    importer.ok("drop x");
    eventually("bytes mapped", 0, || importer.counter("mapped_bytes"));
    assert_eq!(importer.census().of_kind("memfd:device-ipc-mock"), 0);
}
