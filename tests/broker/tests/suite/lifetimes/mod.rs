//! Lifetimes of leases, mappings and owners, the import cache, and waits for releases.

mod cache;
mod forced;

use device_ipc_broker_tests::{
    Answer, Child, PINNING, REVOKING, agent, eventually, second_copy_stays_loaded,
};

#[test]
fn owner_whose_drop_blocks_delays_no_importer() {
    let mut exporter = agent!(PINNING);
    let mut importer = agent!(PINNING);
    let other = exporter.share("other 4096");
    exporter.share("stuck 4096 blocked=1");
    exporter.ok("drop stuck");
    // The worker is in the owner's drop now, and the poller is not.
    importer.ok(&format!("open x {other}"));
    importer.ok("touch x");
    importer.ok("drop x");
    importer.ok("close-unused 5000");
    eventually("holders", 0, || exporter.holders("other"));
    assert_eq!(exporter.counter("exports"), 2, "the stuck one is not forgotten");
    exporter.ok("unblock stuck");
    exporter.ok("close other 10000");
    assert_eq!(exporter.counter("exports"), 0);
    assert_eq!(exporter.allocated(), 0);
}

#[test]
fn close_behind_a_blocked_owner_times_out_and_names_no_holder() {
    let mut exporter = agent!(PINNING);
    exporter.share("other 4096");
    exporter.share("stuck 4096 blocked=1");
    exporter.ok("drop stuck");
    // Owners are dropped one after the other, so this owner is not dropped. No process holds the export.
    let answer = exporter.ask("close other 500");
    match answer {
        Answer::Failed(failure) => {
            let blames_importers =
                matches!(failure.kind.as_str(), "StillHeld" | "NotOpened") || failure.text.contains("opened");
            assert!(!blames_importers, "nobody holds it, and it says: {} {}", failure.kind, failure.text);
            assert_eq!(failure.kind, "Timeout", "{}", failure.text);
        }
        other => panic!("{other:?}"),
    }
    exporter.ok("unblock stuck");
    exporter.ok("shutdown 10000");
    assert_eq!(exporter.allocated(), 0);
}

#[test]
fn mutual_exports_dropped_at_once_do_not_deadlock() {
    for machine in [PINNING, REVOKING] {
        let mut pair = [agent!(machine), agent!(machine)];
        for round in 0..100 {
            let of_first = pair[0].share("own 4096");
            let of_second = pair[1].share("own 4096");
            pair[0].send(&format!("open theirs {of_second}"));
            pair[1].send(&format!("open theirs {of_first}"));
            let open: Vec<_> = pair.iter_mut().map(Child::receive).collect();
            assert!(open.iter().all(|answer| matches!(answer, Answer::Done(_))), "{round}: {open:?}");
            // Each waits for the other's release, in turns with used mappings and idle ones.
            let last = if round % 2 == 0 { "drop theirs own" } else { "drop own theirs" };
            pair.iter_mut().for_each(|one| one.send(last));
            pair.iter_mut().for_each(|one| one.send("shutdown 10000"));
            for answer in pair.iter_mut().flat_map(|one| [one.receive(), one.receive()]) {
                assert_eq!(answer, Answer::Done(String::new()), "{machine} round {round}");
            }
        }
        for one in &mut pair {
            assert_eq!((one.counter("leases"), one.counter("mapped_bytes"), one.allocated()), (0, 0, 0));
        }
    }
}

#[test]
fn free_behind_a_waiting_stream_does_not_stop_the_broker() {
    let mut near = agent!(PINNING);
    let mut far = agent!(PINNING);
    near.share("first 4096");
    let second = near.share("second 4096");
    // The far side's bytes are not ready, and the near side's stream waits for that on the device.
    let late = far.share("late 4096 gate=closed");
    near.ok(&format!("open late {late} place=stream:0"));
    // The driver's free waits for the device, so for the stream, so for the far side.
    near.send("close first 15000");
    // Which needs something of the near side first.
    far.ok(&format!("open x {second}"));
    assert!(near.has_not_answered(), "the free did not wait for the stream");
    assert_eq!(far.ok("open-gates"), "true", "the open waited for the stream");
    assert_eq!(near.receive(), Answer::Done(String::new()));
    near.ok("sync");
    near.ok("drop late");
    far.ok("drop x");
    far.ok("close late 10000");
    near.ok("close second 10000");
}

#[test]
fn sixty_four_importers_are_counted() {
    let mut exporter = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    let mut importers: Vec<_> = (0..64).map(|_| agent!(PINNING)).collect();
    importers.iter_mut().for_each(|importer| importer.send(&format!("open x {descriptor}")));
    for importer in &mut importers {
        assert!(matches!(importer.receive(), Answer::Done(_)));
    }
    let holders = exporter.ok("holders x");
    assert!(holders.starts_with("64 opened=64 "), "{holders}");
    for importer in &importers {
        assert!(holders.contains(&format!(" {}:4096:broker-agent", importer.id())), "{holders}");
    }
    assert_eq!(exporter.counter("leases"), 64);
    // A third of the importers release, a third are killed, a third keep idle leases.
    for (index, importer) in importers.iter_mut().enumerate() {
        match index % 3 {
            0 => drop((importer.ok("cache 0 0"), importer.ok("drop x"))),
            1 => importer.kill(),
            _ if index == 2 => drop(importer.ok("release x")),
            _ => drop(importer.ok("drop x")),
        }
    }
    eventually("leases", 21, || exporter.counter("leases"));
    // The death of an importer whose lease is idle is a release.
    eventually("idle leases", 1, || exporter.counter("leases_idle"));
    importers[2].kill();
    eventually("leases", 20, || exporter.counter("leases"));
    let died = exporter.fails("wait-released x 10000", "HolderDied");
    assert_eq!(died.matches("broker-agent").count(), 21, "{died}");
    assert_eq!((exporter.counter("leases"), exporter.counter("leases_total")), (0, 64));
    assert_eq!(exporter.counter("leases_lost_total"), 21);
    exporter.ok("close x 10000");
    assert_eq!(exporter.allocated(), 0);
}

#[test]
fn library_with_registered_handlers_stays_loaded() {
    assert!(second_copy_stays_loaded(), "dlclose unloads it, and its handler for fork with it");
}
