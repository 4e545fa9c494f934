//! Grants that travel as bytes: a right to open an export once, which keeps the memory until it ends.

use data_encoding::HEXLOWER;
use device_ipc_broker_tests::{
    Answer, Child, Connection, Forged, FromExporter, PINNING, Refusal, ToExporter, agent, eventually,
};
use device_ipc_core::Descriptor;

const LONG: &str = "600000";

/// An exporter that has dropped its export, and the grant that keeps the memory.
fn dropped_with_grant(limit: &str) -> (Child, Descriptor, String) {
    let mut exporter = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    let grant = exporter.ok(&format!("grant x {limit}"));
    exporter.ok("drop x");
    (exporter, descriptor, grant)
}

fn open_by(name: &str, descriptor: &Descriptor, grant: &str) -> String {
    format!("open-by {name} {descriptor} {grant}")
}

#[test]
fn grant_opens_a_dropped_export_once() {
    let (mut exporter, descriptor, grant) = dropped_with_grant(LONG);
    assert!(grant.len() / 2 <= 100, "{} B", grant.len() / 2);
    let (mut importer, mut second) = (agent!(PINNING), agent!(PINNING));
    assert_eq!(exporter.counter("exports"), 1, "the grant keeps it");
    second.fails(&format!("open y {descriptor}"), "ExportDropped");
    importer.ok(&open_by("y", &descriptor, &grant));
    importer.ok("touch y");
    let text = second.fails(&open_by("y", &descriptor, &grant), "GrantEnded");
    assert!(text.contains("the grant has already been used"), "{text}");
    assert_eq!(exporter.counter("exports"), 1, "the lease keeps it");
    importer.ok("drop y");
    eventually("exports", 0, || exporter.counter("exports"));
    assert_eq!(exporter.allocated(), 0);
    // Nothing of it is left behind that could be used.
    importer.fails(&open_by("y", &descriptor, &grant), "GrantEnded");
}

#[test]
fn used_grant_opens_as_long_as_the_export_lives() {
    let mut exporter = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    let grant = exporter.ok(&format!("grant x {LONG}"));
    // Far more often than wrong tokens are tolerated.
    let mut importer = agent!(PINNING);
    for _ in 0..40 {
        importer.ok(&open_by("y", &descriptor, &grant));
        importer.ok("drop y");
        importer.ok("close-unused 5000");
    }
    let mut others: Vec<_> = (0..3).map(|_| agent!(PINNING)).collect();
    for other in &mut others {
        other.ok(&open_by("y", &descriptor, &grant));
        other.ok("touch y");
    }
    assert_eq!(exporter.holders("x"), 3, "leases and no grant");
    exporter.ok("drop x");
    importer.fails(&open_by("y", &descriptor, &grant), "GrantEnded");
    drop(others);
    eventually("exports", 0, || exporter.counter("exports"));
}

#[test]
fn grant_given_back_needs_no_message_of_its_own() {
    let mut exporter = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    let mut importer = agent!(PINNING);
    importer.ok(&format!("open y {descriptor}"));
    let messages =
        |importer: &mut Child| (importer.counter("requests_total"), importer.counter("releases_total"));
    let before = messages(&mut importer);
    let grants: Vec<_> = (0..63).map(|_| exporter.ok(&format!("grant x {LONG}"))).collect();
    for (round, grant) in grants.iter().enumerate() {
        // By a further open, or without one.
        if round % 2 == 0 {
            importer.ok(&open_by("z", &descriptor, grant));
            importer.ok("drop z");
        } else {
            importer.ok(&format!("give-back {grant}"));
        }
    }
    assert_eq!(messages(&mut importer), before);
    assert_eq!(exporter.holders("x"), 2, "the lease, and the grants as one");
    // The next one is the last that waits.
    let last = exporter.ok(&format!("grant x {LONG}"));
    importer.ok(&format!("give-back {last}"));
    eventually("holders", 1, || exporter.holders("x"));
    assert_eq!(messages(&mut importer).0, before.0);
    // With the end of the lease, too.
    let grant = exporter.ok(&format!("grant x {LONG}"));
    importer.ok(&format!("give-back {grant}"));
    exporter.ok("drop x");
    importer.ok("drop y");
    eventually("exports", 0, || exporter.counter("exports"));
}

#[test]
fn grant_is_given_back_at_once_to_an_exporter_that_waits() {
    let mut exporter = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    let mut importer = agent!(PINNING);
    importer.ok(&format!("open y {descriptor}"));
    let (before, after) = (exporter.ok(&format!("grant x {LONG}")), exporter.ok(&format!("grant x {LONG}")));
    importer.ok(&format!("give-back {before}"));
    exporter.ok("recall x");
    importer.ok(&format!("give-back {after}"));
    eventually("holders", 1, || exporter.holders("x"));
    importer.ok("drop y");
    exporter.ok("close x 10000");
}

#[test]
fn failed_driver_open_uses_its_grant_up() {
    let (mut exporter, descriptor, grant) = dropped_with_grant(LONG);
    let mut importer = agent!("devices=2;fault=open:1");
    importer.send(&open_by("y", &descriptor, &grant));
    assert!(matches!(importer.receive(), Answer::Failed(_)));
    eventually("exports", 0, || exporter.counter("exports"));
    assert_eq!(exporter.allocated(), 0);
}

#[test]
fn unused_grant_ends_at_its_time_limit() {
    let mut exporter = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    let long = exporter.ok(&format!("grant x {LONG}"));
    let short = exporter.ok("grant x 50");
    assert_eq!(exporter.ok("states x"), "0:in a message");
    eventually("the short one has ended", true, || {
        exporter.ok("close-keeping x 0").contains("grants that no process has used: 1")
    });
    let mut importer = agent!(PINNING);
    importer.fails(&open_by("y", &descriptor, &short), "GrantEnded");
    importer.ok(&open_by("y", &descriptor, &long));
    importer.ok("drop y");
    eventually("exports", 0, || exporter.counter("exports"));
    // Without any importer.
    exporter.share("z 4096");
    for _ in 0..100 {
        exporter.ok("grant z 20");
    }
    exporter.ok("drop z");
    eventually("exports", 0, || exporter.counter("exports"));
    assert_eq!(exporter.allocated(), 0);
}

#[test]
fn killed_receiver_leaves_a_lease_that_ends_and_a_grant_that_expires() {
    let mut exporter = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    let (used, unused) = (exporter.ok(&format!("grant x {LONG}")), exporter.ok("grant x 300"));
    exporter.ok("drop x");
    let mut importer = agent!(PINNING);
    importer.ok(&open_by("y", &descriptor, &used));
    importer.kill();
    assert!(!unused.is_empty());
    eventually("exports", 0, || exporter.counter("exports"));
    assert_eq!(exporter.allocated(), 0);
}

#[test]
fn damaged_and_foreign_grants_are_refused() {
    let (mut exporter, descriptor, grant) = dropped_with_grant(LONG);
    let other = exporter.share("other 4096");
    let mut importer = agent!(PINNING);
    let damaged = format!("{}00", &grant[..grant.len() - 2]);
    for bytes in [damaged.as_str(), &grant[..40], "00", "64697063"] {
        let text = importer.fails(&open_by("y", &descriptor, bytes), "Descriptor");
        assert!(text.contains("not a device-ipc grant"), "{text}");
    }
    let text = importer.fails(&open_by("y", &other, &grant), "Descriptor");
    assert!(text.contains("belongs to another descriptor"), "{text}");
    // A guess with a right checksum opens no dropped export, and is ignored for another one.
    let mut bytes = HEXLOWER.decode(grant.as_bytes()).expect("it is hex");
    let covered = bytes.len() - 4;
    bytes[covered - 16..covered].fill(9);
    let checksum = crc32(&bytes[..covered]).to_le_bytes();
    bytes[covered..].copy_from_slice(&checksum);
    let guessed = HEXLOWER.encode(&bytes);
    for _ in 0..40 {
        importer.fails(&open_by("y", &descriptor, &guessed), "GrantEnded");
    }
    // Neither has it ended the right one.
    importer.ok(&format!("give-back {guessed}"));
    importer.ok(&open_by("y", &descriptor, &grant));
    importer.ok("touch y");
}

#[test]
fn exporter_opens_by_its_own_grant() {
    let mut exporter = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    let (first, second) = (exporter.ok(&format!("grant x {LONG}")), exporter.ok(&format!("grant x {LONG}")));
    exporter.ok("drop x");
    exporter.ok(&open_by("y", &descriptor, &first));
    exporter.ok("drop y");
    assert_eq!(exporter.counter("exports"), 1);
    exporter.ok(&format!("give-back {second}"));
    eventually("exports", 0, || exporter.counter("exports"));
}

#[test]
fn importer_that_sends_memory_on_asks_for_a_grant() {
    let mut exporter = agent!(PINNING);
    let descriptor = exporter.ok("share-blocks x 2 4096 2");
    let descriptor: Descriptor = descriptor.parse().expect("a descriptor");
    let (mut first, mut second) = (agent!(PINNING), agent!(PINNING));
    first.ok(&format!("open y {descriptor}"));
    let grant = first.ok(&format!("grant-of y {LONG}"));
    first.kill();
    exporter.ok("drop x");
    second.ok(&open_by("y", &descriptor, &grant));
    second.fails(&format!("grant-of y {LONG}"), "ExportDropped");
    second.ok("drop y");
    eventually("exports", 0, || exporter.counter("exports"));
}

#[test]
fn importer_grants_only_exports_of_its_leases() {
    let mut exporter = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    let mut importer = agent!(PINNING);
    importer.ok(&format!("open y {descriptor}"));
    let forged = Forged::of(&descriptor);
    let connection = Connection::greeted(&forged);
    // Leases of the importer, and of no process.
    for lease in 0..5 {
        connection.send(&ToExporter::Grant { request: lease + 1, lease, limit_ms: 1000 }).expect("it reads");
        let expected = FromExporter::Refused { request: lease + 1, refusal: Refusal::Dropped };
        assert_eq!(connection.receive_message(), expected);
    }
    assert_eq!(exporter.holders("x"), 1);
    // A connection without a lease.
    assert!(!connection.is_closed());
}

#[test]
fn grant_of_an_exporter_that_has_exited_is_refused() {
    let (exporter, descriptor, grant) = dropped_with_grant(LONG);
    drop(exporter);
    agent!(PINNING).fails(&open_by("y", &descriptor, &grant), "ExporterGone");
}

#[test]
fn bundle_of_two_devices_opens_by_one_grant() {
    let mut exporter = agent!(PINNING);
    let bundle = exporter.ok("share-blocks x 2 4096 2");
    let descriptor: Descriptor = bundle.parse().expect("a descriptor");
    let grant = exporter.ok(&format!("grant x {LONG}"));
    exporter.ok("drop x");
    let mut importer = agent!(PINNING);
    importer.ok(&open_by("y", &descriptor, &grant));
    importer.ok("drop y");
    eventually("exports", 0, || exporter.counter("exports"));
}

/// CRC-32, as of Ethernet and gzip.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg()))
    })
}
