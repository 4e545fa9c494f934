//! Readers and writers that are killed at every point of the protocol.

use device_ipc_broker_tests::{
    Answer, CUDA, Census, Child, PINNING, REVOKING, eventually, hand_over_through_ring, kill_points,
    kill_rounds, no_more_than, settle,
};

use super::{LOOPS, NO_TIMELINES, ready};

/// Asserts that a survivor has no more resources than before.
fn leaves_nothing(survivor: &mut Child, before: &Census, when: &str) {
    no_more_than(before, when, survivor);
    let counts = ["leases", "exports", "mapped_bytes"].map(|name| survivor.counter(name));
    assert_eq!(counts, [0; 3], "{when}: leases, exports, bytes mapped");
}

fn readers_die(machine: &str) {
    let mut writer = ready(machine, None);
    let mut other = ready(machine, None);
    hand_over_through_ring(&mut writer, &mut other);
    drop(other);
    settle([&mut writer]);
    let before = writer.census();
    for point in kill_points("importer", "ring-") {
        for round in 0..kill_rounds(3) {
            let when = format!("{machine} {point} round {round}");
            println!("{when}");
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
            writer.send("ring-publish 12");
            if point.ends_with("left") {
                assert_eq!(dies.receive(), Answer::Done("4".into()), "{when}");
                dies.send("ring-leave");
            }
            dies.is_killed();
            let published = writer.receive();
            assert_eq!(published, Answer::Done(String::new()), "{when}");
            assert_eq!(lives.receive(), Answer::Done("12".into()), "{when}");
            eventually(&when, "1".to_owned(), || writer.ok("ring-count"));
            lives.ok("ring-leave");
            writer.ok("ring-close 10000");
            drop(lives);
            leaves_nothing(&mut writer, &before, &when);
        }
    }
}

fn writers_die(machine: &str) {
    let mut readers = [ready(machine, None), ready(machine, None)];
    for reader in &mut readers {
        let mut other = ready(machine, None);
        hand_over_through_ring(&mut other, reader);
        drop(other);
        settle([reader]);
    }
    let before: Vec<_> = readers.iter_mut().map(|reader| reader.census()).collect();
    // Where hosts do the waiting no stream signals.
    let signals = |point: &&str| machine != NO_TIMELINES || !point.ends_with("signalled");
    for point in kill_points("exporter", "ring-").into_iter().filter(signals) {
        for round in 0..kill_rounds(3) {
            let when = format!("{machine} {point} round {round}");
            println!("{when}");
            let once = point.ends_with("joined") || point.ends_with("closed");
            // It passes the other points once for each of its eight publications.
            let visit = if once { 1 } else { 1 + round % 8 };
            let mut writer = ready(machine, Some(&format!("{point}={visit}")));
            let descriptor = writer.ok("ring 2");
            for reader in &mut readers {
                reader.send(&format!("ring-join {descriptor}"));
                let joined = reader.receive();
                if !point.ends_with("joined") {
                    assert_eq!(joined, Answer::Done("0".into()), "{when}");
                }
            }
            if !point.ends_with("joined") {
                writer.ok("ring-readers 2 10000");
                // A stream of each waits for what is not published any more.
                readers.iter_mut().for_each(|reader| reader.send("ring-read 8 10000"));
                writer.send("ring-publish 8");
                if point.ends_with("closed") {
                    assert_eq!(writer.receive(), Answer::Done(String::new()), "{when}");
                    writer.send("ring-close 100");
                }
                check_reports_of_writer_end(&when, &mut readers, point);
            }
            writer.is_killed();
            for (reader, before) in readers.iter_mut().zip(&before) {
                reader.ok("ring-forget");
                leaves_nothing(reader, before, &when);
            }
        }
    }
}

/// Checks that each reader has read every publication, or reports the writer's death; a torn slot would be another error.
fn check_reports_of_writer_end(when: &str, readers: &mut [Child; 2], point: &str) {
    for reader in readers {
        match reader.receive() {
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
fn ring_writer_after_reader_deaths_has_no_leftovers() {
    [PINNING, NO_TIMELINES].into_iter().for_each(readers_die);
}

#[test]
fn cuda_ring_writer_after_reader_deaths_has_no_leftovers() {
    readers_die(CUDA);
}

#[test]
fn revoking_ring_writer_after_reader_deaths_has_no_leftovers() {
    readers_die(REVOKING);
}

#[test]
fn ring_reader_after_writer_deaths_has_no_leftovers() {
    [PINNING, NO_TIMELINES].into_iter().for_each(writers_die);
}

#[test]
fn cuda_ring_reader_after_writer_deaths_has_no_leftovers() {
    writers_die(CUDA);
}

#[test]
fn reader_loop_fails_when_the_writer_is_killed() {
    for machine in [PINNING, CUDA, NO_TIMELINES] {
        for form in LOOPS {
            let (mut writer, mut reader) = (ready(machine, None), ready(machine, None));
            let descriptor = writer.ok("ring 2");
            reader.ok(&format!("ring-join {descriptor}"));
            reader.send(&format!("ring-consume {form}"));
            writer.ok("ring-publish 3");
            eventually("the reader waits for sequence 3", String::new(), || writer.ok("ring-behind"));
            writer.kill();
            match reader.receive() {
                Answer::Failed(failure) => {
                    assert_eq!(failure.kind, "ExporterGone", "{machine} {form}: {failure:?}");
                }
                other => panic!("{machine} {form}: {other:?}"),
            }
            reader.ok("ring-leave");
        }
    }
}
