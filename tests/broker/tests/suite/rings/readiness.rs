//! The descriptors of readers and writers: they become readable when there is something to return, also the end of the peer, and
//! no wait that ends early loses a publication.

use std::time::Duration;

use device_ipc_broker_tests::{Child, PINNING, eventually};

use super::{MACHINES, ready};

/// Creates a ring of two slots with one reader.
fn ring_with_reader(machine: &str) -> (Child, Child) {
    let (mut writer, mut reader) = (ready(machine, None), ready(machine, None));
    let descriptor = writer.ok("ring 2");
    reader.ok(&format!("ring-join {descriptor}"));
    (writer, reader)
}

#[test]
fn reader_descriptor_becomes_readable_when_the_writer_dies() {
    for machine in MACHINES {
        let (mut writer, mut reader) = ring_with_reader(machine);
        reader.ok("ring-poll 0");
        assert_eq!(reader.ok("ring-try-next"), "pending");
        reader.send("ring-poll 10000");
        reader.says_nothing_for(Duration::from_millis(50));
        writer.kill();
        reader.receive();
        reader.fails("ring-try-next", "ExporterGone");
        assert_eq!(reader.ok("ring-poll 0"), "true", "{machine}: the end stays to be reported");
    }
}

#[test]
fn reader_descriptor_becomes_readable_at_dismissal() {
    for machine in MACHINES {
        let (mut writer, mut reader) = ring_with_reader(machine);
        writer.ok("ring-publish 1");
        // The reader does not release the slot, so that the ring comes to a stop after the next publication.
        assert_eq!(reader.ok("ring-next 10000"), "0");
        writer.ok("ring-publish 1");
        assert_eq!(reader.ok("ring-next 10000"), "1");
        reader.fails("ring-try-next", "RingSlotsHeld");
        eventually("the reader is behind", format!("{}:0", reader.id()), || writer.ok("ring-behind"));
        reader.ok("ring-poll 0");
        writer.ok(&format!("ring-dismiss {}", reader.id()));
        assert_eq!(reader.ok("ring-poll 10000"), "true", "{machine}");
        reader.fails("ring-try-next", "DismissedFromRing");
    }
}

#[test]
fn writer_descriptor_becomes_readable_when_the_slot_is_free() {
    for machine in MACHINES {
        let (mut writer, mut reader) = ring_with_reader(machine);
        writer.ok("ring-readers 1 10000");
        assert_eq!(writer.ok("ring-try-write"), "0", "{machine}: the slot was never used");
        writer.ok("ring-publish 2");
        assert_eq!(writer.ok("ring-poll-writer 0"), "true", "{machine}: a new descriptor is readable");
        assert_eq!(writer.ok("ring-try-write"), "pending", "{machine}");
        assert_eq!(writer.ok("ring-poll-writer 50"), "false", "{machine}: the reader has released nothing");
        assert_eq!(reader.ok("ring-read 1 10000"), "1");
        assert_eq!(writer.ok("ring-poll-writer 10000"), "true", "{machine}");
        assert_eq!(writer.ok("ring-try-write"), "2", "{machine}");
        writer.ok("ring-publish 1");
        assert_eq!(writer.ok("ring-try-write"), "pending", "{machine}");
        writer.send("ring-poll-writer 10000");
        writer.says_nothing_for(Duration::from_millis(50));
        reader.kill();
        writer.receive();
        assert_eq!(writer.ok("ring-try-write"), "3", "{machine}: a reader that died blocks nothing");
        writer.ok("ring-close 10000");
    }
}

#[test]
fn descriptors_exist_only_where_they_were_requested() {
    let (mut writer, mut reader) = ring_with_reader(PINNING);
    writer.ok("ring-publish 1");
    assert_eq!(reader.ok("ring-read 1 10000"), "1");
    assert_eq!([reader.ok("ring-try-next"), writer.ok("ring-try-write")], ["pending", "1"]);
    let of = |child: &Child| child.census().of_kind("[eventfd]");
    let before = [of(&writer), of(&reader)];
    writer.ok("ring-poll-writer 0");
    reader.ok("ring-poll 0");
    assert_eq!([of(&writer), of(&reader)], before.map(|count| count + 1));
    reader.ok("ring-leave");
    writer.ok("ring-close 10000");
    assert_eq!(of(&writer), before[0]);
    eventually("the reader's descriptor is closed", before[1], || of(&reader));
}
