//! Who keeps what for how long: leases, mappings, owners, the cache of what is open, and waiting for the end of them.

use std::time::{Duration, Instant};

use device_ipc_broker_tests::{Answer, Child, DESCRIPTORS, PINNING, REVOKING, agent, eventually, within};

/// What is done without waiting for anybody takes no longer, also on a busy machine.
const SOON: Duration = Duration::from_secs(3);

#[test]
fn an_owner_whose_drop_blocks_holds_up_no_importer() {
    let mut exporter = agent!(PINNING);
    let mut importer = agent!(PINNING);
    let other = exporter.share("other 4096");
    exporter.share("stuck 4096 blocked=1");
    within(SOON, "dropping it", || exporter.ok("drop stuck"));
    // The worker is in the owner's drop now, and the poller is not.
    within(SOON, "an open", || importer.ok(&format!("open x {other}")));
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
fn a_close_behind_an_owner_whose_drop_blocks_ends_in_time_and_blames_no_holder() {
    let mut exporter = agent!(PINNING);
    exporter.share("other 4096");
    exporter.share("stuck 4096 blocked=1");
    exporter.ok("drop stuck");
    // Owners are dropped one after the other, so this one's turn does not come. Nobody holds it.
    let answer = within(SOON, "the close", || exporter.ask("close other 500"));
    match answer {
        Answer::Failed(failure) => {
            let blames_importers = failure.kind == "StillHeld" || failure.text.contains("opened");
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
fn two_processes_that_share_with_each_other_and_drop_at_once_do_not_deadlock() {
    for machine in [PINNING, REVOKING] {
        let mut pair = [agent!(machine), agent!(machine)];
        for round in 0..100 {
            let of_first = pair[0].share("own 4096");
            let of_second = pair[1].share("own 4096");
            pair[0].send(&format!("open theirs {of_second}"));
            pair[1].send(&format!("open theirs {of_first}"));
            let open: Vec<_> = pair.iter_mut().map(Child::receive).collect();
            assert!(open.iter().all(|answer| matches!(answer, Answer::Done(_))), "{round}: {open:?}");
            // Both wait for the other to let go, in turns with mappings that are in use and idle ones.
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
fn a_stream_that_waits_for_a_peer_does_not_stop_the_broker_when_its_owner_frees_memory() {
    let mut near = agent!(PINNING);
    let mut far = agent!(PINNING);
    near.share("first 4096");
    let second = near.share("second 4096");
    // The far side's bytes are ready in a while, and the near side's stream waits for that on the device.
    let late = far.share("late 4096 ready-in=1500");
    near.ok(&format!("open late {late} place=stream:0"));
    let since = Instant::now();
    // The driver's free waits for the device, so for the stream, so for the far side.
    near.send("close first 15000");
    // Which needs something of the near side first.
    within(SOON, "an open of the process that waits", || far.ok(&format!("open x {second}")));
    assert!(
        since.elapsed() < Duration::from_millis(1300),
        "the machine is too slow for this test to mean anything"
    );
    assert_eq!(near.receive(), Answer::Done(String::new()));
    assert!(since.elapsed() > Duration::from_millis(1000), "the free was to wait for the stream");
    near.ok("sync");
    near.ok("drop late");
    far.ok("drop x");
    far.ok("close late 10000");
    near.ok("close second 10000");
}

#[test]
fn sixty_four_importers_are_counted_one_by_one() {
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
    // A third lets go, a third is killed, a third keeps what it does not use.
    for (index, importer) in importers.iter_mut().enumerate() {
        match index % 3 {
            0 => drop((importer.ok("cache 0 0"), importer.ok("drop x"))),
            1 => importer.kill(),
            _ => drop(importer.ok("drop x")),
        }
    }
    eventually("leases", 21, || exporter.counter("leases"));
    exporter.ok("wait-released x 10000");
    assert_eq!((exporter.counter("leases"), exporter.counter("leases_total")), (0, 64));
    exporter.ok("close x 10000");
    assert_eq!(exporter.allocated(), 0);
}

#[test]
fn two_imports_of_one_descriptor_are_one_lease_and_one_driver_call() {
    for machine in [PINNING, DESCRIPTORS] {
        let mut exporter = agent!(machine);
        let mut importer = agent!(machine);
        let descriptor = exporter.share("x 4096");
        let first = importer.ok(&format!("open a {descriptor}"));
        let second = importer.ok(&format!("open b {descriptor}"));
        assert_eq!(first, second, "one address");
        assert_eq!((importer.calls("open"), importer.counter("requests_total")), (1, 1));
        assert_eq!((importer.counter("opens_total"), importer.counter("cache_hits_total")), (2, 1));
        assert_eq!(exporter.ok("holders x").split(' ').take(2).collect::<Vec<_>>(), ["1", "opened=1"]);
        importer.ok("drop a");
        assert_eq!(importer.ok("touch b"), "1");
        assert_eq!(exporter.holders("x"), 1);
        importer.ok("drop b");
        importer.ok("close-unused 5000");
        eventually("holders", 0, || exporter.holders("x"));
        assert_eq!(importer.calls("close"), 1);
    }
}

#[test]
fn eight_threads_that_open_and_let_go_leave_nothing() {
    for (machine, cache) in
        [(PINNING, "0 0"), (PINNING, "8 1000000"), (REVOKING, "0 0"), (DESCRIPTORS, "0 0")]
    {
        let mut exporter = agent!(machine);
        let mut importer = agent!(machine);
        let descriptor = exporter.share("x 4096");
        importer.ok(&format!("cache {cache}"));
        importer.ok(&format!("threads {descriptor} 8 50"));
        importer.ok("close-unused 10000");
        eventually("mapped", 0, || importer.counter("mapped_bytes"));
        eventually("holders", 0, || exporter.holders("x"));
        assert_eq!(importer.counter("opens_total"), 400, "{machine} {cache}");
        let (opened, closed) = (importer.calls("open"), importer.calls("close"));
        assert_eq!(opened, closed, "{machine} {cache}");
        assert_eq!(importer.census().mock_mappings, 0, "{machine} {cache}");
        exporter.ok("close x 10000");
        assert_eq!(exporter.allocated(), 0, "{machine} {cache}");
    }
}

#[test]
fn a_descriptor_that_nobody_opened_is_said_to_be_so_and_closes_at_once() {
    let mut exporter = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    let text = exporter.fails("wait-released x 50", "StillHeld");
    assert!(text.contains("no process has opened the export within 50 ms"), "{text}");
    within(SOON, "closing", || exporter.ok("close x 10000"));
    assert_eq!((exporter.counter("exports"), exporter.allocated()), (0, 0));
    agent!(PINNING).fails(&format!("open x {descriptor}"), "ExportDropped");
}

#[test]
fn to_open_again_costs_nothing_and_a_neighbour_one_message() {
    let mut exporter = agent!(PINNING);
    let mut importer = agent!(PINNING);
    exporter.ok("allocate block 16384");
    let first = exporter.share("first 4096 of=block");
    let neighbour = exporter.share("neighbour 4096 of=block offset=8192");
    let base = importer.ok(&format!("open a {first}"));
    importer.ok("drop a");
    eventually("the cache", (1, 1), || (importer.calls("open"), importer.counter("requests_total")));
    for _ in 0..10 {
        assert_eq!(importer.ok(&format!("open a {first}")), base);
        importer.ok("touch a");
        importer.ok("drop a");
    }
    assert_eq!((importer.calls("open"), importer.counter("requests_total")), (1, 1));
    assert_eq!(importer.calls("close"), 0);
    assert_eq!(exporter.ok("holders first").split(' ').nth(1), Some("opened=1"));
    importer.ok(&format!("open b {neighbour}"));
    assert_eq!((importer.calls("open"), importer.counter("requests_total")), (1, 2));
    assert_eq!(importer.counter("mapped_bytes"), 16384, "once");
    // The mapping goes with the last lease on it, whichever that is.
    importer.ok("close-unused 5000");
    assert_eq!(importer.calls("close"), 0);
    importer.ok("touch b");
    importer.ok("drop b");
    importer.ok("close-unused 5000");
    assert_eq!((importer.calls("close"), importer.counter("mapped_bytes")), (1, 0));
    exporter.ok("close first 10000");
    exporter.ok("close neighbour 10000");
    exporter.ok("free block");
    assert_eq!(exporter.allocated(), 0);
}

#[test]
fn what_has_been_dropped_is_refused_from_that_moment_on_also_to_those_who_have_it_open() {
    let mut exporter = agent!(PINNING);
    let mut importer = agent!(PINNING);
    for round in 0..100 {
        let descriptor = exporter.share("x 4096");
        importer.ok(&format!("open held {descriptor}"));
        if round % 2 == 0 {
            importer.ok("drop held");
        }
        exporter.ok("drop x");
        importer.fails(&format!("open y {descriptor}"), "ExportDropped");
        if round % 2 == 1 {
            importer.ok("drop held");
        }
    }
    eventually("exports", 0, || exporter.counter("exports"));
}

#[test]
fn the_drop_of_another_export_costs_one_question() {
    let mut exporter = agent!(PINNING);
    let mut importer = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    exporter.share("other 4096");
    importer.ok(&format!("open a {descriptor}"));
    exporter.ok("close other 10000");
    for _ in 0..3 {
        importer.ok(&format!("open b {descriptor}"));
        importer.ok("drop b");
    }
    assert_eq!((importer.counter("requests_total"), importer.calls("open")), (2, 1));
    assert_eq!(exporter.ok("holders x").split(' ').nth(1), Some("opened=1"));
}

#[test]
fn the_cache_keeps_so_many_and_closes_the_longest_unused_first() {
    let mut exporter = agent!(PINNING);
    let mut importer = agent!(PINNING);
    importer.ok("cache 2 1000000");
    let descriptors: Vec<_> = (0..4).map(|index| exporter.share(&format!("x{index} 4096"))).collect();
    importer.ok(&format!("open used {}", descriptors[0]));
    for (index, descriptor) in descriptors.iter().enumerate().skip(1) {
        importer.ok(&format!("open y{index} {descriptor}"));
        importer.ok(&format!("drop y{index}"));
        // The worker lets go in the order of the drops.
    }
    // All drops have been dealt with when a later one has.
    eventually("who is held", vec![1, 0, 1, 1], || {
        (0..4).map(|index| exporter.holders(&format!("x{index}"))).collect::<Vec<_>>()
    });
    assert_eq!((importer.calls("open"), importer.calls("close")), (4, 1));
    // One that is used again is not the longest unused any more.
    importer.ok(&format!("open y {}", descriptors[2]));
    importer.ok("drop y");
    importer.ok(&format!("open y {}", descriptors[1]));
    importer.ok("drop y");
    eventually("who is held", vec![1, 1, 1, 0], || {
        (0..4).map(|index| exporter.holders(&format!("x{index}"))).collect::<Vec<_>>()
    });
    importer.ok("touch used");
}

#[test]
fn the_cache_keeps_so_many_bytes_and_never_closes_what_is_used() {
    let mut exporter = agent!(PINNING);
    let mut importer = agent!(PINNING);
    importer.ok("cache 100 10000");
    let used = exporter.share("used 65536");
    let small = exporter.share("small 8192");
    let large = exporter.share("large 16384");
    importer.ok(&format!("open used {used}"));
    importer.ok(&format!("open small {small}"));
    importer.ok("drop small");
    importer.ok(&format!("open large {large}"));
    importer.ok("drop large");
    eventually("bytes that stay open", 65536, || importer.counter("mapped_bytes"));
    eventually("holders", (0, 0, 1), || {
        (exporter.holders("small"), exporter.holders("large"), exporter.holders("used"))
    });
    importer.ok("touch used");
    importer.ok("cache 0 0");
    importer.ok("touch used");
    assert_eq!(exporter.holders("used"), 1);
}

#[test]
fn waiting_for_the_release_takes_back_what_is_kept_unused_and_only_that() {
    let mut exporter = agent!(PINNING);
    let [mut idle, mut busy] = [agent!(PINNING), agent!(PINNING)];
    let descriptor = exporter.share("x 4096");
    for importer in [&mut idle, &mut busy] {
        importer.ok(&format!("open x {descriptor}"));
    }
    idle.ok("drop x");
    eventually("both hold it, one without using it", 2, || exporter.holders("x"));
    let text = exporter.fails("wait-released x 300", "StillHeld");
    assert!(text.contains(&format!("process {} (broker-agent)", busy.id())), "{text}");
    assert!(!text.contains(&format!("process {} ", idle.id())), "{text}");
    assert!(text.contains("4096 bytes"), "{text}");
    assert_eq!(exporter.holders("x"), 1);
    // It is still open to all, and who lets go from now on gives back at once.
    idle.ok(&format!("open x {descriptor}"));
    idle.ok("drop x");
    busy.ok("touch x");
    busy.ok("drop x");
    exporter.ok("wait-released x 10000");
    assert_eq!(exporter.holders("x"), 0);
}

#[test]
fn idle_lease_is_held_until_its_cache_returns_it() {
    let (mut exporter, mut importer) = (agent!(PINNING), agent!(PINNING));
    let descriptor = exporter.share("x 4096");
    importer.ok(&format!("open x {descriptor}"));
    importer.ok("drop x");
    let before = importer.counter("requests_total");
    importer.ok(&format!("open x {descriptor}"));
    assert_eq!(importer.counter("requests_total"), before, "the lease was kept");
    importer.ok("drop x");
    assert_eq!(exporter.holders("x"), 1, "an idle lease counts");
    importer.ok("close-unused 10000");
    eventually("the lease is returned", 0, || exporter.holders("x"));
}

#[test]
fn close_names_a_stopped_importer_whose_lease_may_be_idle() {
    let (mut exporter, mut importer) = (agent!(PINNING), agent!(PINNING));
    let descriptor = exporter.share("x 4096");
    importer.ok(&format!("open x {descriptor}"));
    importer.ok("drop x");
    importer.stop();
    let text = exporter.fails("close x 200", "StillHeld");
    assert!(text.contains(&format!("process {} (broker-agent)", importer.id())), "{text}");
    assert!(text.contains("also one that is idle") && text.contains("stopped"), "{text}");
    importer.resume();
    eventually("the idle lease is returned", 0, || exporter.counter("exports"));
    assert_eq!(exporter.allocated(), 0);
}

#[test]
fn dropping_an_export_takes_back_what_is_idle_and_leaves_what_is_used() {
    for machine in [PINNING, REVOKING] {
        let mut exporter = agent!(machine);
        let [mut idle, mut busy] = [agent!(machine), agent!(machine)];
        let descriptor = exporter.share("x 4096");
        for importer in [&mut idle, &mut busy] {
            importer.ok(&format!("open x {descriptor}"));
        }
        busy.ok("on-gone x");
        idle.ok("drop x");
        exporter.ok("drop x");
        eventually("leases", 1, || exporter.counter("leases"));
        eventually("idle mappings", 0, || idle.counter("mapped_bytes"));
        assert_eq!(exporter.allocated(), 4096, "somebody still uses it");
        busy.ok("touch x");
        for importer in [&mut idle, &mut busy] {
            importer.fails(&format!("open y {descriptor}"), "ExportDropped");
        }
        busy.ok("touch x");
        busy.ok("drop x");
        eventually("exports", 0, || exporter.counter("exports"));
        assert_eq!(exporter.allocated(), 0);
        assert_eq!(busy.take_events(), Vec::<String>::new(), "the exporter lives");
    }
}

#[test]
fn a_close_that_comes_too_early_names_the_holders_and_the_memory_goes_after_the_last() {
    let mut exporter = agent!(PINNING);
    let mut importer = agent!(PINNING);
    let descriptor = exporter.share("x 8192");
    importer.ok(&format!("open x {descriptor}"));
    let text = exporter.fails("close x 100", "StillHeld");
    assert!(
        text.contains(&format!("process {} (broker-agent) has held 8192 bytes", importer.id())),
        "{text}"
    );
    assert_eq!(exporter.allocated(), 8192);
    importer.ok("touch x");
    importer.ok("drop x");
    eventually("memory-in-use", 0, || exporter.allocated());
}

#[test]
fn an_exporters_death_is_told_once_to_each_that_asked() {
    let mut exporter = agent!(PINNING);
    let mut importer = agent!(PINNING);
    let [x, y] = [exporter.share("x 4096"), exporter.share("y 4096")];
    importer.ok(&format!("open x {x}"));
    importer.ok(&format!("open y {y}"));
    importer.ok(&format!("open gone-before {y}"));
    for name in ["x", "y", "gone-before"] {
        importer.ok(&format!("on-gone {name}"));
    }
    importer.ok("drop gone-before");
    exporter.kill();
    let mut told = [importer.event("gone "), importer.event("gone ")];
    told.sort();
    assert_eq!(told, ["gone x ExporterGone", "gone y ExporterGone"]);
    // Who asks later is told at once.
    importer.ok("on-gone x");
    importer.event("gone x ExporterGone");
    importer.ok("drop x");
    assert_eq!(importer.take_events(), Vec::<String>::new());
}

#[test]
fn closing_all_mappings_of_a_dead_exporter_brings_its_memory_back() {
    for machine in [PINNING, REVOKING, DESCRIPTORS] {
        let [mut exporter, mut other, mut importer] = [agent!(machine), agent!(machine), agent!(machine)];
        let [x, y, idle] = [exporter.share("x 4096"), exporter.share("y 8192"), exporter.share("idle 16384")];
        let kept = other.share("kept 4096");
        importer.ok(&format!("open kept {kept}"));
        for (name, descriptor) in [("x", &x), ("y", &y), ("again", &y), ("idle", &idle)] {
            importer.ok(&format!("open {name} {descriptor}"));
        }
        importer.ok("drop idle");
        exporter.kill();
        // What is idle goes by itself, what is used when it is told to.
        eventually("used bytes", 4096 + 4096 + 8192, || importer.counter("mapped_bytes"));
        assert_eq!(importer.ok(&format!("close-mappings-of {x}")), "2");
        assert_eq!(importer.counter("mapped_bytes"), 4096);
        assert_eq!(importer.calls("close"), 3);
        for name in ["x", "y", "again"] {
            importer.fails(&format!("touch {name}"), "ExporterGone");
        }
        importer.ok("touch kept");
        importer.ok("drop x y again");
        assert_eq!(importer.ok(&format!("close-mappings-of {x}")), "0");
        importer.ok("drop kept");
        importer.ok("close-unused 5000");
        eventually("mappings of memory files", 0, || importer.census().mock_mappings);
        eventually("pages of exporters", 1, || importer.census().broker_pages);
        assert_eq!(importer.calls("open"), importer.calls("close"));
    }
}

#[test]
fn what_was_closed_by_force_is_not_handed_out_again_and_opens_anew_once_it_is_let_go_of() {
    for machine in [PINNING, REVOKING, DESCRIPTORS] {
        let (mut exporter, mut importer) = (agent!(machine), agent!(machine));
        let x = exporter.share("x 4096");
        for name in ["first", "second"] {
            importer.ok(&format!("open {name} {x}"));
        }
        assert_eq!(importer.ok(&format!("close-mappings-of {x}")), "1", "one lease");
        assert_eq!((importer.calls("close"), importer.counter("mapped_bytes")), (1, 0));
        importer.fails("touch first", "ExporterGone");
        importer.fails(&format!("open third {x}"), "ExporterGone");
        importer.ok("drop first second");
        importer.ok("close-unused 5000");
        importer.ok(&format!("open again {x}"));
        importer.ok("touch again");
        assert_eq!((importer.calls("open"), importer.counter("mapped_bytes")), (2, 4096), "{machine}");
        importer.ok("drop again");
        assert_eq!(importer.ok(&format!("close-mappings-of {x}")), "0", "it is idle, and is closed as such");
        eventually("holders", 0, || exporter.holders("x"));
        assert_eq!(importer.calls("open"), importer.calls("close"));
    }
}

#[test]
fn a_shutdown_takes_back_and_gives_back_everything() {
    let mut pair = [agent!(PINNING), agent!(PINNING)];
    let of_first = pair[0].share("own 4096");
    let of_second = pair[1].share("own 4096");
    pair[0].ok(&format!("open theirs {of_second}"));
    pair[1].ok(&format!("open theirs {of_first}"));
    pair[0].ok("drop theirs");
    let second = pair[1].id();
    let text = pair[0].fails("shutdown 300", "StillHeld");
    assert!(text.contains(&format!("process {second} (broker-agent) has held 4096 bytes")), "{text}");
    assert_eq!(pair[0].counter("mapped_bytes"), 0, "what it does not use has been given back");
    eventually("leases", 0, || pair[1].counter("leases"));
    pair[1].ok("drop theirs");
    within(SOON, "the shutdown", || pair[0].ok("shutdown 10000"));
    pair[1].ok("shutdown 10000");
    for one in &mut pair {
        // Guards that outlive the shutdown do no harm.
        one.ok("drop own");
        assert_eq!((one.counter("exports"), one.allocated(), one.census().mock_mappings), (0, 0, 0));
    }
    agent!(PINNING).ok("shutdown 1000");
}

#[test]
fn memory_that_revokes_can_be_freed_under_its_holders() {
    let mut exporter = agent!(REVOKING);
    let mut importer = agent!(REVOKING);
    let descriptor = exporter.share("x 4096");
    importer.ok(&format!("open x {descriptor}"));
    importer.ok("touch x");
    let text = exporter.fails("close x 100 free-anyway=1", "StillHeld");
    assert!(text.contains(&importer.id().to_string()), "{text}");
    eventually("memory-in-use", 0, || exporter.allocated());
    assert_eq!((exporter.counter("leases"), exporter.counter("exports")), (0, 0));
    let text = importer.fails("touch x", "Vendor");
    assert!(text.contains("Revoked") || text.contains("Cancelled"), "{text}");
    importer.ok("drop x");
    importer.ok("close-unused 5000");
    // The late release of a lease that was taken away is no offence.
    let other = exporter.share("y 4096");
    importer.ok(&format!("open y {other}"));
    importer.ok("touch y");
    assert_eq!(importer.counter("requests_total"), 2);
    assert_eq!(exporter.counter("leases"), 1);
}

#[test]
fn memory_that_is_pinned_cannot_be_freed_under_its_holders() {
    for machine in [PINNING, DESCRIPTORS] {
        let mut exporter = agent!(machine);
        let mut importer = agent!(machine);
        let descriptor = exporter.share("x 4096");
        importer.ok(&format!("open x {descriptor}"));
        let text =
            within(SOON, "the refusal", || exporter.fails("close x 20000 free-anyway=1", "Unsupported"));
        assert!(text.contains("pin"), "{text}");
        importer.ok("touch x");
        assert_eq!(exporter.allocated(), 4096);
        importer.ok("drop x");
    }
}

#[test]
fn an_export_of_memory_in_ones_own_process_gives_the_original_address() {
    let mut process = agent!(PINNING);
    let descriptor = process.share("x 4096");
    let first = process.ok(&format!("open a {descriptor}"));
    assert_eq!(process.ok(&format!("open b {descriptor}")), first);
    assert_eq!(process.ok("touch a"), "1");
    assert_eq!(process.ok("touch b"), "2");
    assert_eq!((process.calls("open"), process.counter("leases")), (0, 2));
    process.fails("close x 50", "StillHeld");
    process.ok("drop a b");
    eventually("memory-in-use", 0, || process.allocated());
}

#[test]
fn memory_that_is_shared_again_at_once_is_not_taken_from_its_new_importers() {
    let mut exporter = agent!(REVOKING);
    let mut importer = agent!(REVOKING);
    importer.ok("cache 0 0");
    exporter.ok("allocate block 4096");
    exporter.share("x 4096 of=block");
    // The handle of the first export is taken back on another thread; any moment of that will do.
    for round in 0..3000 {
        let text = exporter.ok(&format!("share x 4096 of=block after-drop={}", round % 60));
        match importer.ask(&format!("open x {text}")) {
            Answer::Done(_) => {}
            other => panic!("round {round}: {other:?}"),
        }
        if round % 10 == 0 {
            match importer.ask("touch x") {
                Answer::Done(_) => {}
                other => panic!("round {round}: {other:?}"),
            }
        }
        importer.ok("drop x");
        exporter.ok("wait-released x 10000");
    }
}

/// 208 is `CUDA_ERROR_ALREADY_MAPPED`, here by injected faults.
#[test]
fn an_outdated_mapping_that_overlaps_is_closed_if_unused_and_else_a_named_error() {
    let mut exporter = agent!(PINNING);
    let (old, new) = (exporter.share("old 4096"), exporter.share("new 4096"));
    let mut importer = agent!("devices=2;fault=open:2:208");
    importer.ok(&format!("open old {old}"));
    importer.ok("drop old");
    importer.ok(&format!("open new {new}"));
    importer.ok("touch new");
    assert_eq!(importer.counter("driver_closes_total"), 1, "the unused mapping was given up");

    let mut importer = agent!("devices=2;fault=open:2:208,open:3:208");
    importer.ok(&format!("open old {old}"));
    importer.fails(&format!("open new {new}"), "OverlapsInUse");
    importer.ok("touch old");
    importer.ok(&format!("open new {new}"));
}
