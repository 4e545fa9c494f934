//! Rings: either side is killed at every point of a ring's life, a reader never reads, and the others get every sequence, in
//! order, with the bytes that were published; afterwards everybody has what it had before.
//!
//! `DEVICE_IPC_KILL_ROUNDS` says how many rounds there are at each point.

use std::time::Duration;

use device_ipc_broker_tests::{
    Answer, CUDA, Census, Child, DESCRIPTORS, PINNING, REVOKING, agent, eventually, kill_points, kill_rounds,
    no_more_than, within,
};

/// Hosts do the waiting.
const NO_TIMELINES: &str = "devices=2;timelines=off";
/// And there are no events either.
const NO_EVENTS: &str = "devices=2;timelines=off;events=off";

const MACHINES: [&str; 6] = [PINNING, REVOKING, DESCRIPTORS, CUDA, NO_TIMELINES, NO_EVENTS];

/// What waits for somebody who has gone goes on in this time.
const SOON: Duration = Duration::from_secs(5);

/// A process that has done once what a driver may do behind work that waits.
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
fn two_readers_get_every_sequence_with_its_bytes() {
    for machine in MACHINES {
        let mut writer = ready(machine, None);
        let mut readers = [ready(machine, None), ready(machine, None)];
        for slots in [1, 2, 3] {
            let descriptor = writer.ok(&format!("ring {slots}"));
            for reader in &mut readers {
                assert_eq!(reader.ok(&format!("ring-join {descriptor}")), "0", "{machine}");
            }
            writer.ok("ring-readers 2 10000");
            readers.iter_mut().for_each(|reader| reader.send("ring-read 30 15000"));
            writer.ok("ring-publish 30 pause=100");
            for reader in &mut readers {
                assert_eq!(reader.receive(), Answer::Done("30".into()), "{machine}, {slots} slots");
                reader.ok("ring-leave");
            }
            writer.ok("ring-close 10000");
        }
    }
}

#[test]
fn a_reader_that_joins_late_begins_with_what_comes_next_and_one_that_leaves_holds_up_nobody() {
    for machine in MACHINES {
        let mut writer = ready(machine, None);
        let mut readers = [ready(machine, None), ready(machine, None)];
        let descriptor = writer.ok("ring 2");
        // Nobody is there to be waited for.
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
fn a_closed_ring_gives_what_was_published_and_then_says_so() {
    for machine in MACHINES {
        let (mut writer, mut reader) = (ready(machine, None), ready(machine, None));
        let descriptor = writer.ok("ring 2");
        reader.ok(&format!("ring-join {descriptor}"));
        writer.ok("ring-publish 2 pause=20000");
        writer.send("ring-close 15000");
        assert_eq!(reader.ok("ring-read 2 10000"), "2", "{machine}");
        let text = reader.fails("ring-read 1 10000", "RingClosed");
        assert!(text.contains(&writer.id().to_string()), "{text}");
        reader.ok("ring-leave");
        assert_eq!(writer.receive(), Answer::Done(String::new()), "{machine}");
        reader.fails(&format!("ring-join {descriptor}"), "ExportDropped");
    }
}

#[test]
fn a_stream_that_waits_for_a_publication_goes_on_when_the_ring_is_closed() {
    for machine in [PINNING, CUDA] {
        let (mut writer, mut reader) = (ready(machine, None), ready(machine, None));
        let descriptor = writer.ok("ring 2");
        reader.ok(&format!("ring-join {descriptor}"));
        reader.ok("ring-next");
        reader.send("sync");
        reader.says_nothing_for(Duration::from_millis(50));
        writer.send("ring-close 15000");
        assert_eq!(within(SOON, "the stream", || reader.receive()), Answer::Done(String::new()), "{machine}");
        reader.fails("ring-check", "RingClosed");
        reader.ok("ring-leave");
        assert_eq!(writer.receive(), Answer::Done(String::new()), "{machine}");
    }
}

#[test]
fn a_reader_that_never_reads_is_named_and_can_be_dismissed() {
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
            // What is submitted behind a stream that waits can be let go, as the process is not held.
            idle.ok("ring-next");
            idle.ok("ring-release");
            assert_eq!(within(SOON, "the stream", || writer.receive()), Answer::Done(String::new()));
        }
        let held = idle.ok("ring-next");
        writer.send(&format!("ring-dismiss {}", idle.id()));
        match writer.receive() {
            Answer::Done(was_there) => assert_eq!(was_there, "true"),
            other => panic!("{other:?}"),
        }
        assert_eq!(writer.ok("ring-count"), "1");
        let text = idle.fails("ring-check", "DismissedFromRing");
        assert!(text.contains("join again"), "{held}: {text}");
        idle.fails("ring-release", "DismissedFromRing");
        idle.fails("ring-next", "DismissedFromRing");
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
fn slots_that_are_all_held_are_an_error_and_dropped_ones_count_as_released() {
    for machine in [PINNING, CUDA, NO_TIMELINES] {
        let (mut writer, mut reader) = (ready(machine, None), ready(machine, None));
        let descriptor = writer.ok("ring 2");
        reader.ok(&format!("ring-join {descriptor}"));
        writer.ok("ring-publish 2");
        assert_eq!([reader.ok("ring-next"), reader.ok("ring-next")], ["0", "1"]);
        let text = reader.fails("ring-next", "RingSlotsHeld");
        assert!(text.contains("all 2 slots"), "{text}");
        reader.ok("ring-drop-slots");
        eventually("nobody is behind", String::new(), || writer.ok("ring-behind"));
        writer.ok("ring-publish 2");
        assert_eq!(reader.ok("ring-read 2 10000"), "4", "{machine}");
        reader.ok("ring-leave");
        writer.ok("ring-close 10000");
    }
}

/// A survivor, and what it had.
fn leaves_nothing(survivor: &mut Child, before: &Census, when: &str) {
    eventually(&format!("{when}: leases"), 0, || survivor.counter("leases"));
    eventually(&format!("{when}: exports"), 0, || survivor.counter("exports"));
    eventually(&format!("{when}: bytes mapped"), 0, || survivor.counter("mapped_bytes"));
    no_more_than(before, when, || survivor.census());
}

/// What is made once has been made then.
fn hand_over_once(writer: &mut Child, reader: &mut Child) {
    let descriptor = writer.ok("ring 2");
    reader.ok(&format!("ring-join {descriptor}"));
    writer.ok("ring-publish 1");
    reader.ok("ring-read 1 10000");
    reader.ok("ring-leave");
    writer.ok("ring-close 10000");
}

fn readers_die(machine: &str) {
    let mut writer = ready(machine, None);
    let mut other = ready(machine, None);
    hand_over_once(&mut writer, &mut other);
    let connected = writer.census().of_kind("socket");
    drop(other);
    eventually("the first reader is forgotten", connected - 1, || writer.census().of_kind("socket"));
    eventually("its words are gone", 0, || writer.census().of_kind("device-ipc-words"));
    let before = writer.census();
    for point in kill_points("importer", "ring-") {
        for round in 0..kill_rounds(3) {
            let when = format!("{machine} {point} round {round}");
            // At the first visit of the point, or later.
            let visit = if point.ends_with("joined") || point.ends_with("left") { 1 } else { 1 + round % 3 };
            let mut dies = ready(machine, Some(&format!("{point}={visit}")));
            let mut lives = ready(machine, None);
            let descriptor = writer.ok("ring 2");
            assert_eq!(lives.ok(&format!("ring-join {descriptor}")), "0");
            dies.send(&format!("ring-join {descriptor}"));
            if !point.ends_with("joined") {
                assert_eq!(dies.receive(), Answer::Done("0".into()), "{when}");
                writer.ok("ring-readers 2 10000");
                dies.send("ring-read 4 10000");
            }
            lives.send("ring-read 12 15000");
            writer.send("ring-publish 12 pause=100");
            if point.ends_with("left") {
                assert_eq!(dies.receive(), Answer::Done("4".into()), "{when}");
                dies.send("ring-leave");
            }
            dies.is_killed();
            let published = within(SOON, &when, || writer.receive());
            assert_eq!(published, Answer::Done(String::new()), "{when}");
            assert_eq!(within(SOON, &when, || lives.receive()), Answer::Done("12".into()), "{when}");
            eventually(&when, "1".to_owned(), || writer.ok("ring-count"));
            lives.ok("ring-leave");
            within(SOON, &when, || writer.ok("ring-close 10000"));
            drop(lives);
            leaves_nothing(&mut writer, &before, &when);
        }
    }
}

fn writers_die(machine: &str) {
    let mut readers = [ready(machine, None), ready(machine, None)];
    for reader in &mut readers {
        let mut other = ready(machine, None);
        hand_over_once(&mut other, reader);
        let connected = reader.census().of_kind("socket");
        drop(other);
        eventually("the first writer is forgotten", connected - 1, || reader.census().of_kind("socket"));
    }
    for reader in &readers {
        eventually("its words are gone", 0, || reader.census().of_kind("device-ipc-words"));
    }
    let before: Vec<_> = readers.iter_mut().map(|reader| reader.census()).collect();
    // Where hosts do the waiting no stream signals.
    let signals = |point: &&str| machine != NO_TIMELINES || !point.ends_with("signalled");
    for point in kill_points("exporter", "ring-").into_iter().filter(signals) {
        for round in 0..kill_rounds(3) {
            let when = format!("{machine} {point} round {round}");
            let once = point.ends_with("joined") || point.ends_with("closed");
            let visit = if once { 1 } else { 1 + round };
            let mut writer = ready(machine, Some(&format!("{point}={visit}")));
            let descriptor = writer.ok("ring 2");
            for reader in &mut readers {
                reader.send(&format!("ring-join {descriptor}"));
                let joined = within(SOON, &when, || reader.receive());
                if !point.ends_with("joined") {
                    assert_eq!(joined, Answer::Done("0".into()), "{when}");
                }
            }
            if !point.ends_with("joined") {
                writer.ok("ring-readers 2 10000");
                // A stream of each waits for what is not published any more.
                readers.iter_mut().for_each(|reader| reader.send("ring-read 8 10000"));
                writer.send("ring-publish 8 pause=100");
                if point.ends_with("closed") {
                    assert_eq!(writer.receive(), Answer::Done(String::new()), "{when}");
                    writer.send("ring-close 100");
                }
                told_of_the_writers_end(&when, &mut readers, point);
            }
            writer.is_killed();
            for (reader, before) in readers.iter_mut().zip(&before) {
                reader.ok("ring-forget");
                leaves_nothing(reader, before, &when);
            }
        }
    }
}

/// Each reader has read all that it could, and says why no more; nothing of it was torn.
fn told_of_the_writers_end(when: &str, readers: &mut [Child; 2], point: &str) {
    for reader in readers {
        match within(SOON, when, || reader.receive()) {
            Answer::Done(all) => assert!(point.ends_with("closed") && all == "8", "{when}: {all}"),
            Answer::Failed(failure) => {
                let gone = failure.kind == "ExporterGone";
                // Memory that has been taken away says so itself.
                let revoked = when.starts_with(REVOKING) && failure.text.contains("Revoked");
                assert!(gone || revoked, "{when}: {failure:?}");
            }
            ended @ Answer::Ended(_) => panic!("{when}: {ended:?}"),
        }
    }
}

#[test]
fn readers_that_die_anywhere_leave_nothing_and_hold_up_nobody() {
    [PINNING, NO_TIMELINES].into_iter().for_each(readers_die);
}

#[test]
fn readers_that_die_anywhere_leave_nothing_and_hold_up_nobody_on_cuda() {
    readers_die(CUDA);
}

#[test]
fn readers_that_die_anywhere_leave_nothing_in_a_writer_that_revokes() {
    readers_die(REVOKING);
}

#[test]
fn writers_that_die_anywhere_leave_nothing_in_their_readers() {
    [PINNING, NO_TIMELINES].into_iter().for_each(writers_die);
}

#[test]
fn writers_that_die_anywhere_leave_nothing_in_their_readers_on_cuda() {
    writers_die(CUDA);
}

#[test]
fn a_stream_that_waits_for_a_writer_that_is_killed_goes_on_and_its_slot_says_so() {
    for machine in [PINNING, CUDA] {
        let (mut writer, mut reader) = (ready(machine, None), ready(machine, None));
        let descriptor = writer.ok("ring 2");
        reader.ok(&format!("ring-join {descriptor}"));
        writer.ok("ring-publish 1");
        writer.ok("sync");
        assert_eq!([reader.ok("ring-next"), reader.ok("ring-next")], ["0", "1"]);
        reader.send("sync");
        reader.says_nothing_for(Duration::from_millis(50));
        writer.kill();
        assert_eq!(within(SOON, "the stream", || reader.receive()), Answer::Done(String::new()), "{machine}");
        // The first had been published.
        reader.ok("ring-check");
        reader.ok("ring-release");
        reader.fails("ring-check", "ExporterGone");
        reader.fails("ring-next", "ExporterGone");
        reader.ok("ring-leave");
    }
}

#[test]
fn reader_loop_ends_with_the_last_publication() {
    for machine in MACHINES {
        let (mut writer, mut reader) = (ready(machine, None), ready(machine, None));
        let descriptor = writer.ok("ring 2");
        reader.ok(&format!("ring-join {descriptor}"));
        reader.send("ring-consume");
        writer.ok("ring-publish 5");
        eventually("the reader waits for sequence 5", String::new(), || writer.ok("ring-behind"));
        reader.says_nothing_for(Duration::from_millis(50));
        writer.send("ring-close 15000");
        let consumed = within(SOON, "the reader's loop", || reader.receive());
        assert_eq!(consumed, Answer::Done("5".into()), "{machine}");
        reader.ok("ring-reader-check");
        reader.ok("ring-leave");
        assert_eq!(writer.receive(), Answer::Done(String::new()), "{machine}");
    }
}

#[test]
fn reader_loop_fails_when_the_writer_is_killed() {
    for machine in [PINNING, CUDA, NO_TIMELINES] {
        let (mut writer, mut reader) = (ready(machine, None), ready(machine, None));
        let descriptor = writer.ok("ring 2");
        reader.ok(&format!("ring-join {descriptor}"));
        reader.send("ring-consume");
        writer.ok("ring-publish 3");
        eventually("the reader waits for sequence 3", String::new(), || writer.ok("ring-behind"));
        writer.kill();
        match within(SOON, "the reader's loop", || reader.receive()) {
            Answer::Failed(failure) => assert_eq!(failure.kind, "ExporterGone", "{machine}: {failure:?}"),
            other => panic!("{machine}: {other:?}"),
        }
        reader.ok("ring-leave");
    }
}

/// Takes the slot of a sequence that is never published, and ends the ring while a stream waits for it.
fn slot_that_is_never_published(machine: &str, ends: fn(&mut Child)) -> (Child, Child) {
    let (mut writer, mut reader) = (ready(machine, None), ready(machine, None));
    let descriptor = writer.ok("ring 2");
    reader.ok(&format!("ring-join {descriptor}"));
    writer.ok("ring-publish 1");
    writer.ok("sync");
    reader.ok("ring-next");
    reader.ok("ring-release");
    assert_eq!(reader.ok("ring-next"), "1", "{machine}");
    // Nothing is known of its end yet.
    reader.ok("ring-view");
    reader.send("sync");
    reader.says_nothing_for(Duration::from_millis(50));
    ends(&mut writer);
    assert_eq!(within(SOON, "the stream", || reader.receive()), Answer::Done(String::new()), "{machine}");
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
            reader.fails("ring-next", variant);
            reader.fails("ring-release", variant);
            // The errors were reported: no result is left that could be taken for data.
            reader.fails("ring-next", variant);
            reader.ok("ring-leave");
        }
    }
}

#[test]
fn slot_released_before_it_is_known_to_be_unpublished_is_reported() {
    for machine in [PINNING, CUDA] {
        for killed in [false, true] {
            let (mut writer, mut reader) = (ready(machine, None), ready(machine, None));
            let descriptor = writer.ok("ring 2");
            reader.ok(&format!("ring-join {descriptor}"));
            writer.ok("ring-publish 2");
            for sequence in 0..4 {
                assert_eq!(reader.ok("ring-next"), sequence.to_string());
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
            within(SOON, "the stream", || reader.receive());
            for call in ["ring-reader-check", "ring-next"] {
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
        reader.ok("ring-next");
        reader.ok("ring-drop-slots");
        writer.send("ring-close 15000");
        reader.send("sync");
        within(SOON, "the stream", || reader.receive());
        reader.fails("ring-next", "RingClosed");
        reader.ok("ring-leave");
    }
}
