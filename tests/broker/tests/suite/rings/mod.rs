//! Rings: either side is killed at every point of a ring's life, or a reader never reads. The other processes receive every
//! sequence, in order, with the bytes that were published, and keep no resource afterwards.
//!
//! `DEVICE_IPC_KILL_ROUNDS` is the number of rounds at each point.

mod deaths;
mod readiness;

use std::time::Duration;

use device_ipc_broker_tests::{Answer, CUDA, Child, DESCRIPTORS, PINNING, REVOKING, agent, eventually};

/// A machine whose hosts wait.
const NO_TIMELINES: &str = "devices=2;timelines=off";
/// A machine whose hosts wait, without events.
const NO_EVENTS: &str = "devices=2;timelines=off;events=off";

const MACHINES: [&str; 6] = [PINNING, REVOKING, DESCRIPTORS, CUDA, NO_TIMELINES, NO_EVENTS];

/// The documented loops of a reader.
const LOOPS: [&str; 3] = ["next", "ahead", "poll"];

/// Starts a process that has made each driver call once that could otherwise wait behind submitted work.
fn ready(machine: &str, dies_at: Option<&str>) -> Child {
    let mut child = match dies_at {
        Some(point) => agent!(machine, dies_at: Some(point)),
        None => agent!(machine),
    };
    child.ok("warm-up");
    child.ok("cache 0 0");
    child
}

#[test]
fn late_reader_begins_with_next_and_left_reader_blocks_nothing() {
    for machine in MACHINES {
        let mut writer = ready(machine, None);
        let mut readers = [ready(machine, None), ready(machine, None)];
        let descriptor = writer.ok("ring 2");
        // The ring has no reader to wait for.
        writer.ok("ring-publish 5");
        assert_eq!(readers[0].ok(&format!("ring-join {descriptor}")), "5", "{machine}");
        writer.ok("ring-publish 2");
        assert_eq!(readers[1].ok(&format!("ring-join {descriptor}")), "7", "{machine}");
        assert_eq!(readers[0].ok("ring-read 2 10000"), "7");
        writer.ok("ring-publish 1");
        assert_eq!(readers[0].ok("ring-read 1 10000"), "8");
        // It leaves with a publication that it has not taken.
        readers[1].ok("ring-leave");
        eventually("one has left", "1".to_owned(), || writer.ok("ring-count"));
        writer.ok("ring-publish 1");
        assert_eq!(readers[0].ok("ring-read 1 10000"), "9");
        writer.ok("ring-publish 1");
        assert_eq!(readers[0].ok("ring-read 1 10000"), "10");
        readers[0].ok("ring-leave");
        writer.ok("ring-close 10000");
    }
}

#[test]
fn idle_ring_reader_is_named_and_can_be_dismissed() {
    for machine in [PINNING, CUDA, NO_TIMELINES] {
        let mut writer = ready(machine, None);
        let [mut idle, mut busy] = [ready(machine, None), ready(machine, None)];
        let descriptor = writer.ok("ring 2 timeout=300");
        idle.ok(&format!("ring-join {descriptor}"));
        busy.ok(&format!("ring-join {descriptor}"));
        writer.ok("ring-publish 2");
        assert_eq!(busy.ok("ring-read 2 10000"), "2");
        eventually("it alone is behind", format!("{}:0", idle.id()), || writer.ok("ring-behind"));
        let text = writer.fails("ring-writable 100", "Timeout");
        assert!(text.contains(&format!("process {} (", idle.id())), "{text}");
        assert!(text.contains("sequence 0"), "{text}");
        if machine == NO_TIMELINES {
            let text = writer.fails("ring-write", "Timeout");
            assert!(text.contains(&idle.id().to_string()), "{text}");
        } else {
            writer.ok("ring-publish 1");
            writer.send("sync");
            writer.says_nothing_for(Duration::from_millis(50));
            // Releases behind a waiting stream do not block the process.
            idle.ok("ring-next-ahead");
            idle.ok("ring-release");
            assert_eq!(writer.receive(), Answer::Done(String::new()));
        }
        let held = idle.ok("ring-next-ahead");
        writer.send(&format!("ring-dismiss {}", idle.id()));
        match writer.receive() {
            Answer::Done(was_there) => assert_eq!(was_there, "true"),
            other => panic!("{other:?}"),
        }
        assert_eq!(writer.ok("ring-count"), "1");
        let text = idle.fails("ring-check", "DismissedFromRing");
        assert!(text.contains("open the ring again"), "{held}: {text}");
        idle.fails("ring-release", "DismissedFromRing");
        idle.fails("ring-next-ahead", "DismissedFromRing");
        idle.ok("ring-leave");
        let (next, published) = if machine == NO_TIMELINES { (2, 1) } else { (3, 1) };
        if next == 3 {
            assert_eq!(busy.ok("ring-read 1 10000"), "3");
        }
        assert_eq!(idle.ok(&format!("ring-join {descriptor}")), next.to_string());
        writer.ok(&format!("ring-publish {published}"));
        for reader in [&mut idle, &mut busy] {
            assert_eq!(reader.ok("ring-read 1 10000"), (next + 1).to_string());
            reader.ok("ring-leave");
        }
        writer.ok("ring-close 10000");
    }
}

#[test]
fn next_with_all_slots_held_fails_and_dropped_slots_count() {
    for machine in [PINNING, CUDA, NO_TIMELINES] {
        let (mut writer, mut reader) = (ready(machine, None), ready(machine, None));
        let descriptor = writer.ok("ring 2");
        reader.ok(&format!("ring-join {descriptor}"));
        writer.ok("ring-publish 2");
        assert_eq!([reader.ok("ring-next-ahead"), reader.ok("ring-next-ahead")], ["0", "1"]);
        let text = reader.fails("ring-next-ahead", "RingSlotsHeld");
        assert!(text.contains("all 2 slots"), "{text}");
        reader.ok("ring-drop-slots");
        eventually("no reader is behind", String::new(), || writer.ok("ring-behind"));
        writer.ok("ring-publish 2");
        assert_eq!(reader.ok("ring-read 2 10000"), "4", "{machine}");
        reader.ok("ring-leave");
        writer.ok("ring-close 10000");
    }
}

#[test]
fn reader_loop_ends_with_the_last_publication() {
    for machine in MACHINES {
        for form in LOOPS {
            let (mut writer, mut reader) = (ready(machine, None), ready(machine, None));
            let descriptor = writer.ok("ring 2");
            reader.ok(&format!("ring-join {descriptor}"));
            reader.send(&format!("ring-consume {form}"));
            writer.ok("ring-publish 5");
            eventually("the reader waits for sequence 5", String::new(), || writer.ok("ring-behind"));
            reader.says_nothing_for(Duration::from_millis(50));
            writer.send("ring-close 15000");
            let consumed = reader.receive();
            assert_eq!(consumed, Answer::Done("5".into()), "{machine} {form}");
            reader.ok("ring-reader-check");
            reader.ok("ring-leave");
            assert_eq!(writer.receive(), Answer::Done(String::new()), "{machine} {form}");
        }
    }
}

/// Takes the slot of a sequence that is never published, and closes the ring while a stream waits for it.
fn slot_that_is_never_published(machine: &str, ends: fn(&mut Child)) -> (Child, Child) {
    let (mut writer, mut reader) = (ready(machine, None), ready(machine, None));
    let descriptor = writer.ok("ring 2");
    reader.ok(&format!("ring-join {descriptor}"));
    writer.ok("ring-publish 1");
    writer.ok("sync");
    reader.ok("ring-next-ahead");
    reader.ok("ring-release");
    assert_eq!(reader.ok("ring-next-ahead"), "1", "{machine}");
    // The reader does not know of the close yet.
    reader.ok("ring-view");
    reader.send("sync");
    reader.says_nothing_for(Duration::from_millis(50));
    ends(&mut writer);
    assert_eq!(reader.receive(), Answer::Done(String::new()), "{machine}");
    (writer, reader)
}

#[test]
fn access_and_release_of_a_slot_never_published_fail() {
    let ends: [(fn(&mut Child), _); 2] =
        [(|writer| writer.send("ring-close 15000"), "RingClosed"), (Child::kill, "ExporterGone")];
    for machine in [PINNING, CUDA] {
        for (ends, variant) in ends {
            let (_writer, mut reader) = slot_that_is_never_published(machine, ends);
            reader.fails("ring-view", variant);
            reader.fails("ring-check", variant);
            reader.fails("ring-release", variant);
            // The errors were reported: no result is left that could be taken for data.
            reader.fails("ring-next-ahead", variant);
            for call in ["ring-next 10000", "ring-try-next"] {
                if variant == "RingClosed" {
                    assert_eq!(reader.ok(call), "closed", "{machine}: {call}");
                } else {
                    reader.fails(call, variant);
                }
            }
            reader.ok("ring-leave");
        }
    }
}

#[test]
fn slot_released_before_it_is_found_unpublished_is_reported() {
    for machine in [PINNING, CUDA] {
        for killed in [false, true] {
            let (mut writer, mut reader) = (ready(machine, None), ready(machine, None));
            let descriptor = writer.ok("ring 2");
            reader.ok(&format!("ring-join {descriptor}"));
            writer.ok("ring-publish 2");
            for sequence in 0..4 {
                assert_eq!(reader.ok("ring-next-ahead"), sequence.to_string());
                reader.ok("ring-view");
                reader.ok("ring-release");
            }
            writer.ok("ring-publish 1");
            writer.ok("sync");
            // Sequence 2 has been published meanwhile, and sequence 3 may still be.
            reader.ok("ring-reader-check");
            reader.send("sync");
            reader.says_nothing_for(Duration::from_millis(50));
            if killed {
                writer.kill();
            } else {
                writer.send("ring-close 15000");
            }
            reader.receive();
            for call in ["ring-reader-check", "ring-next-ahead", "ring-next 10000", "ring-try-next"] {
                let text = reader.fails(call, "RingUnpublished");
                assert!(text.contains("before sequence 3 was"), "{machine}: {text}");
            }
            reader.ok("ring-leave");
        }
    }
}

#[test]
fn slot_dropped_unread_at_the_end_is_an_orderly_end() {
    for machine in [PINNING, CUDA] {
        let (mut writer, mut reader) = (ready(machine, None), ready(machine, None));
        let descriptor = writer.ok("ring 2");
        reader.ok(&format!("ring-join {descriptor}"));
        reader.ok("ring-next-ahead");
        reader.ok("ring-drop-slots");
        writer.send("ring-close 15000");
        reader.send("sync");
        reader.receive();
        reader.fails("ring-next-ahead", "RingClosed");
        assert_eq!(reader.ok("ring-next 10000"), "closed", "{machine}: no result was lost");
        reader.ok("ring-leave");
    }
}

/// The writer's stream pauses after half of the slot's bytes, and the writer is killed or continues.
#[test]
fn half_written_slot_is_not_taken() {
    for machine in MACHINES {
        for killed in [false, true] {
            let (mut writer, mut reader) = (ready(machine, None), ready(machine, None));
            let descriptor = writer.ok("ring 2");
            reader.ok(&format!("ring-join {descriptor}"));
            writer.ok("ring-publish 1");
            assert_eq!(reader.ok("ring-next 10000"), "0", "{machine}");
            // A gate is between the halves of sequence 1. Where hosts wait, the writer's does so until the gate opens.
            let host_waits = [NO_TIMELINES, NO_EVENTS].contains(&machine);
            let opens = if host_waits && !killed { "soon" } else { "closed" };
            writer.send(&format!("ring-publish 1 gate={opens}"));
            if opens == "closed" {
                reader.fails("ring-next 100", "Timeout");
                assert_eq!(reader.ok("ring-try-next"), "pending", "{machine}");
            }
            if killed {
                writer.kill();
                for call in ["ring-next 10000", "ring-try-next", "ring-next-ahead"] {
                    let failed = reader.fails(call, "ExporterGone");
                    assert!(failed.contains(&writer.id().to_string()), "{machine}: {failed}");
                }
                reader.fails("ring-consume", "ExporterGone");
            } else {
                // The reader checks the bytes.
                reader.ok("ring-release");
                reader.send("ring-consume");
                assert_eq!(writer.receive(), Answer::Done(String::new()));
                assert_eq!(writer.ok("open-gates"), "true", "{machine}: the host has waited");
                writer.send("ring-close 15000");
                assert_eq!(reader.receive(), Answer::Done("1".into()), "{machine}");
                reader.ok("ring-leave");
                assert_eq!(writer.receive(), Answer::Done(String::new()), "{machine}");
            }
        }
    }
}
