//! Regions over many allocations: their handles and file descriptors do not fit one packet.

use std::str::FromStr;
use std::time::{Duration, Instant};

use device_ipc_broker_tests::{Answer, Census, Child, Connection, Forged, agent, eventually, open_request};
use device_ipc_core::Descriptor;

/// Each allocation has a handle with a file descriptor, and a region may lie in many of them.
const MANY: &str = "devices=2;handles=fds;neighbours=on";

/// The same, without descriptors.
const MANY_BYTES: &str = "devices=2;neighbours=on";

fn share_many(exporter: &mut Child, command: &str) -> Descriptor {
    let text = exporter.ok(&format!("share-many {command}"));
    Descriptor::from_str(&text).expect("it is a descriptor")
}

#[test]
fn region_with_more_descriptors_than_a_packet_is_one_range() {
    for (machine, count) in [(MANY, 254), (MANY, 253), (MANY, 600), (MANY_BYTES, 600), (MANY_BYTES, 1500)] {
        let (mut exporter, mut importer) = (agent!(machine), agent!(machine));
        let before = importer.census();
        let descriptor = share_many(&mut exporter, &format!("x {count} 4096 from=64"));
        let opened = importer.ok(&format!("open x {descriptor}"));
        assert!(opened.ends_with(&format!(" {}", count * 4096 - 64)), "{machine} {count}: {opened}");
        importer.ok("touch x");
        // A write of one importer is visible to the next, in all allocations.
        let mut another = agent!(machine);
        another.ok(&format!("open x {descriptor}"));
        assert_eq!(another.ok("touch x"), "2");
        assert_eq!(
            another.ok("float last=1 name=x"),
            "2",
            "the end of the region lies in the last allocation"
        );
        importer.ok("drop x");
        importer.ok("close-unused 10000");
        eventually("descriptors are closed", descriptors(&before, &importer.census()), || {
            descriptors(&before, &importer.census())
        });
        assert_eq!(importer.census().of_kind("memfd:device-ipc-mock"), 0);
        another.ok("drop x");
        exporter.ok("close x 10000");
        assert_eq!(exporter.allocated(), 0);
    }
}

fn descriptors(before: &Census, now: &Census) -> bool {
    now.of_kind("memfd:device-ipc-mock") == before.of_kind("memfd:device-ipc-mock")
}

#[test]
fn open_without_free_descriptors_fails_and_process_continues() {
    let (mut exporter, mut importer) = (agent!(MANY), agent!(MANY));
    let small = exporter.share("small 4096");
    importer.ok(&format!("open small {small}"));
    let descriptor = share_many(&mut exporter, "x 600 4096");
    importer.ok("limit-descriptors 64");
    let failed = match importer.ask(&format!("open x {descriptor}")) {
        Answer::Failed(failure) => failure,
        other => panic!("{other:?}"),
    };
    assert!(failed.text.contains("descriptors"), "{failed:?}");
    eventually("the lease is given back", 0, || exporter.holders("x"));
    importer.ok("touch small");
    importer.ok("drop small");
    exporter.ok("close x 10000");
}

/// Waits until more descriptors than this are on their way to these connections. Returns false if they are not within five seconds.
fn are_in_transit(connections: &[Connection], limit: usize) -> bool {
    let until = Instant::now() + Duration::from_secs(5);
    loop {
        let number: Option<usize> = connections.iter().map(Connection::descriptors_in_transit).sum();
        if number.is_none_or(|number| number > limit) {
            return true;
        }
        if Instant::now() > until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The kernel bounds the number of descriptors of a user in transit (`ETOOMANYREFS`, unix(7)): importers that do not read use
/// them up, and a later request is served when descriptors are available again.
#[test]
fn descriptors_that_the_kernel_rejects_now_are_sent_later() {
    const COUNT: usize = 300;
    let (mut exporter, mut importer) = (agent!(MANY), agent!(MANY));
    exporter.ok("drop-capabilities");
    let descriptor = share_many(&mut exporter, &format!("x {COUNT} 4096"));
    let used = exporter.census().all_descriptors();
    let limit = used + 3 * COUNT;
    exporter.ok(&format!("limit-descriptors {limit}"));
    let target = Forged::of(&descriptor);
    // So many that more are on their way than the exporter may have.
    let count = limit / COUNT + 1;
    let silent: Vec<_> = (0..count).map(|_| Connection::greeted(&target)).collect();
    for connection in &silent {
        connection.send(&open_request(&target, 1)).expect("the exporter reads");
    }
    let open = format!("open x {descriptor}");
    if are_in_transit(&silent, limit) {
        importer.send(&open);
        importer.says_nothing_for(Duration::from_millis(200));
        drop(silent);
    } else {
        // The kernel counts those of all processes of a user: another run of this test has used them up, and may end at any time.
        println!("skipped: that the importer waits, because other processes have descriptors in transit");
        drop(silent);
        importer.send(&open);
    }
    assert!(matches!(importer.receive(), Answer::Done(_)));
    importer.ok("touch x");
    importer.ok("drop x");
    exporter.ok("close x 10000");
}
