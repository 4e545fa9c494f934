//! What an exporter observes of its importers, stopped or not: leases in use, draining and idle; and what importers observe of
//! the exporter.

use std::time::{Duration, Instant};

use device_ipc_broker_tests::{ASCEND, Answer, CUDA, PINNING, REVOKING, agent, eventually};

/// Far less than the time limits of the calls below.
const AT_ONCE: Duration = Duration::from_secs(5);

/// The time for which memory is not freed whose importers have not closed it yet.
const CLOSING_TIME: Duration = Duration::from_millis(250);

#[test]
fn holder_is_in_use_draining_or_idle() {
    for machine in [PINNING, CUDA, ASCEND] {
        let (mut exporter, mut importer) = (agent!(machine), agent!(machine));
        let descriptor = exporter.share("x 4096");
        assert_eq!(exporter.ok("states x"), "");
        let of_importer = |state: &str| format!("{}:{state}", importer.id());
        let (in_use, idle, draining) = (of_importer("in use"), of_importer("idle"), of_importer("draining"));
        importer.ok(&format!("open a {descriptor}"));
        assert_eq!(exporter.ok("states x"), in_use);
        importer.ok(&format!("open b {descriptor}"));
        importer.ok("release a");
        assert_eq!(exporter.ok("states x"), in_use, "another mapping uses it");
        importer.ok("release b");
        eventually("the stream has reached the release", idle.clone(), || exporter.ok("states x"));
        assert_eq!((exporter.counter("leases"), exporter.counter("leases_idle")), (1, 1));
        assert_eq!(importer.counter("imports_idle"), 1);
        let sent = importer.counter("requests_total");
        importer.ok(&format!("open a {descriptor}"));
        assert_eq!(exporter.ok("states x"), in_use);
        importer.ok("drop a");
        assert_eq!(exporter.ok("states x"), draining, "work on a stream may not have finished");
        importer.ok(&format!("open a {descriptor}"));
        assert_eq!(exporter.ok("states x"), in_use);
        assert_eq!(importer.counter("requests_total"), sent, "none of this is a message");
        let text = exporter.fails("wait-released x 0", "StillHeld");
        assert!(text.contains("4096 bytes for") && text.ends_with(" s, in use"), "{text}");
    }
}

#[test]
fn recall_ends_idle_leases_only_and_does_not_wait() {
    let mut exporter = agent!(PINNING);
    let [mut idle, mut busy, mut stopped] = [agent!(PINNING), agent!(PINNING), agent!(PINNING)];
    let descriptor = exporter.share("x 4096");
    for importer in [&mut idle, &mut busy, &mut stopped] {
        importer.ok(&format!("open x {descriptor}"));
    }
    for importer in [&mut idle, &mut stopped] {
        importer.ok("release x");
    }
    eventually("idle leases", 2, || exporter.counter("leases_idle"));
    stopped.stop();
    exporter.ok("recall x");
    assert_eq!(exporter.ok("states x"), format!("{}:in use", busy.id()));
    assert_eq!((exporter.counter("leases"), exporter.counter("leases_reclaimed_total")), (1, 2));
    eventually("idle mappings", 0, || idle.counter("mapped_bytes"));
    // The export stays open, also for the importer whose lease has been taken back.
    stopped.resume();
    for importer in [&mut idle, &mut stopped] {
        importer.ok(&format!("open x {descriptor}"));
        importer.ok("touch x");
        importer.ok("release x");
    }
    busy.ok("touch x");
    busy.ok("release x");
    eventually("no idle lease is kept from now on", 0, || exporter.holders("x"));
}

#[test]
fn stopped_importer_with_an_idle_lease_blocks_nothing() {
    for machine in [PINNING, REVOKING, CUDA, ASCEND] {
        let (mut exporter, mut importer) = (agent!(machine), agent!(machine));
        let (waited, closed) = (exporter.share("waited 4096"), exporter.share("closed 4096"));
        for (name, descriptor) in [("waited", &waited), ("closed", &closed)] {
            importer.ok(&format!("open {name} {descriptor}"));
            importer.ok(&format!("release {name}"));
        }
        eventually("idle leases", 2, || exporter.counter("leases_idle"));
        importer.stop();
        let began = Instant::now();
        exporter.ok("wait-released waited 60000");
        let closing = Instant::now();
        exporter.ok("close closed 60000");
        assert!(closing.elapsed() >= CLOSING_TIME, "{machine}: {:?}", closing.elapsed());
        exporter.ok("close waited 60000");
        assert!(began.elapsed() < AT_ONCE, "{machine}: {:?}", began.elapsed());
        assert_eq!((exporter.counter("exports"), exporter.counter("leases")), (0, 0));
        assert_eq!(exporter.allocated(), 0);
        let next = exporter.share("next 4096");
        importer.resume();
        importer.fails(&format!("open x {closed}"), "ExportDropped");
        importer.ok(&format!("open x {next}"));
        importer.ok("touch x");
        importer.ok("release x");
        exporter.ok("close next 60000");
        eventually("mappings", 0, || importer.counter("mapped_bytes"));
    }
}

#[test]
fn stopped_importer_in_use_is_named_and_the_export_comes_back() {
    let (mut exporter, mut importer) = (agent!(PINNING), agent!(PINNING));
    let descriptor = exporter.share("x 4096");
    importer.ok(&format!("open x {descriptor}"));
    importer.stop();
    let text = exporter.ok("close-keeping x 100");
    assert!(text.contains(&format!("process {} (broker-agent)", importer.id())), "{text}");
    assert!(text.ends_with(" s, in use"), "{text}");
    assert_eq!(exporter.ok("states x"), format!("{}:in use", importer.id()));
    importer.resume();
    importer.ok("touch x");
    importer.ok("release x");
    assert_eq!(exporter.ok("close-keeping x 60000"), "closed");
    assert_eq!(exporter.allocated(), 0);
}

#[test]
fn lease_that_becomes_idle_while_the_exporter_waits_ends() {
    let (mut exporter, mut importer) = (agent!(PINNING), agent!(PINNING));
    let descriptor = exporter.share("x 4096");
    importer.ok(&format!("open x {descriptor}"));
    exporter.send("wait-released x 60000");
    importer.ok("release x");
    eventually("the last mapping is released", true, || {
        importer.counter("imports_idle") == 1 || importer.counter("mapped_bytes") == 0
    });
    // Before or after it has read the recall, closed the memory or returned the lease.
    importer.stop();
    exporter.receive();
    assert_eq!(exporter.holders("x"), 0);
    importer.resume();
}

#[test]
fn reuse_that_races_with_the_close_reads_no_stale_bytes() {
    for machine in [PINNING, REVOKING, CUDA, ASCEND] {
        let (mut exporter, mut importer) = (agent!(machine), agent!(machine));
        for round in 0..30_u32 {
            let byte = round % 100 + 1;
            exporter.ok("allocate block 4096");
            exporter.ok(&format!("fill block {byte}"));
            exporter.ok("sync");
            let descriptor = exporter.share("x 4096 of=block");
            importer.send(&format!("reopen-until-dropped {descriptor} {byte}"));
            eventually("it is open", false, || exporter.ok("states x").is_empty());
            if round % 3 > 0 {
                exporter.ok("recall x");
            }
            // A stopped importer that uses the memory keeps the export from closing; any other one does not.
            let stopped = round % 3 == 2;
            if stopped {
                importer.stop();
            }
            if !stopped || exporter.ok("close-keeping x 300") != "closed" {
                importer.resume();
                exporter.ok("close x 60000");
            }
            // No importer uses the memory, so the exporter does.
            exporter.ok("fill block 255");
            exporter.ok("sync");
            importer.resume();
            let reopened = importer.receive();
            assert!(matches!(reopened, Answer::Done(_)), "{machine}, round {round}: {reopened:?}");
            exporter.ok("free block");
        }
        assert_eq!((exporter.counter("exports"), exporter.allocated()), (0, 0));
        eventually("mappings", 0, || importer.counter("mapped_bytes"));
    }
}

#[test]
fn lease_that_was_taken_back_is_not_used_again() {
    /// Exports that are recalled first: the importer has as many notifications to read before that of the last.
    const OTHERS: usize = 64;
    for machine in [PINNING, REVOKING, CUDA, ASCEND] {
        let (mut exporter, mut importer) = (agent!(machine), agent!(machine));
        exporter.ok("allocate block 4096");
        for round in 0..4 {
            let names: Vec<_> =
                (0..OTHERS).map(|other| format!("other{other}")).chain(["x".into()]).collect();
            let mut last = None;
            for name in &names {
                let descriptor = exporter.share(&format!("{name} 4096 of=block"));
                importer.ok(&format!("read-on-host {descriptor}"));
                last = Some(descriptor);
            }
            let last = last.expect("there is one at least");
            importer.stop();
            for name in &names {
                exporter.ok(&format!("recall {name}"));
            }
            importer.send(&format!("open x {last}"));
            importer.resume();
            importer.receive();
            let state = exporter.ok("states x");
            assert_eq!(state, format!("{}:in use", importer.id()), "{machine}, round {round}");
            importer.ok("release x");
            for name in &names {
                exporter.ok(&format!("close {name} 60000"));
            }
        }
    }
}

#[test]
fn mapping_dropped_without_device_work_blocks_nothing() {
    for machine in [PINNING, REVOKING, CUDA, ASCEND] {
        let (mut exporter, mut importer) = (agent!(machine), agent!(machine));
        let descriptor = exporter.share("x 4096");
        importer.ok(&format!("read-on-host {descriptor}"));
        assert_eq!(exporter.ok("states x"), format!("{}:idle", importer.id()), "{machine}");
        importer.stop();
        let began = Instant::now();
        exporter.ok("close x 60000");
        assert!(began.elapsed() < AT_ONCE, "{machine}: {:?}", began.elapsed());
        importer.resume();
        importer.fails(&format!("read-on-host {descriptor}"), "ExportDropped");
    }
}

#[test]
fn mapping_dropped_after_device_work_is_named_while_its_process_is_stopped() {
    let (mut exporter, mut importer) = (agent!(PINNING), agent!(PINNING));
    let descriptor = exporter.share("x 4096");
    importer.ok(&format!("open x {descriptor}"));
    importer.ok("touch x");
    importer.ok("drop x");
    importer.stop();
    let text = exporter.ok("close-keeping x 100");
    assert!(text.ends_with(" s, draining"), "{text}");
    importer.resume();
    assert_eq!(exporter.ok("close-keeping x 60000"), "closed");
}

#[test]
fn change_callback_reports_a_release_and_a_reuse() {
    let (mut exporter, mut importer) = (agent!(PINNING), agent!(PINNING));
    let descriptor = exporter.share("x 4096");
    exporter.ok("report-changes x");
    importer.ok(&format!("open x {descriptor}"));
    exporter.event("changed x");
    importer.ok("release x");
    exporter.event("changed x");
    eventually("the state", format!("{}:idle", importer.id()), || exporter.ok("states x"));
    exporter.take_events();
    importer.ok(&format!("open x {descriptor}"));
    exporter.event("changed x");
    assert_eq!(exporter.ok("states x"), format!("{}:in use", importer.id()));
    importer.kill();
    exporter.event("changed x");
}

#[test]
fn drop_of_the_export_and_death_of_the_exporter_are_different_notifications() {
    let (mut exporter, mut importer) = (agent!(PINNING), agent!(PINNING));
    let (first, second) = (exporter.share("first 4096"), exporter.share("second 4096"));
    for (name, descriptor) in [("first", &first), ("second", &second)] {
        importer.ok(&format!("open {name} {descriptor}"));
        importer.ok(&format!("on-dropped {name}"));
        importer.ok(&format!("on-gone {name}"));
    }
    exporter.ok("drop first");
    importer.event("dropped first");
    importer.ok("on-dropped first");
    importer.event("dropped first");
    importer.ok("touch first");
    exporter.kill();
    let mut events = [importer.event("gone"), importer.event("gone")];
    events.sort_unstable();
    assert_eq!(events, ["gone first ExporterGone", "gone second ExporterGone"]);
    assert_eq!(importer.take_events(), Vec::<String>::new(), "no export was dropped");
}

#[test]
fn drop_by_an_exporter_that_exits_at_once_is_reported() {
    for machine in [PINNING, REVOKING, CUDA, ASCEND] {
        let mut importer = agent!(machine);
        for round in 0..5 {
            let mut exporter = agent!(machine);
            let descriptors = [exporter.share("dropped 4096"), exporter.share("lost 4096")];
            for (name, descriptor) in ["dropped", "lost"].iter().zip(&descriptors) {
                importer.ok(&format!("open {name} {descriptor}"));
                importer.ok(&format!("on-dropped {name}"));
            }
            importer.ok("on-gone lost");
            exporter.send("drop-and-exit dropped");
            let events = [importer.event(""), importer.event("")];
            assert_eq!(events, ["dropped dropped", "gone lost ExporterGone"], "{machine}, round {round}");
            importer.ok("drop dropped");
            importer.ok("drop lost");
            assert_eq!(importer.take_events(), Vec::<String>::new(), "the other export was not dropped");
        }
    }
}
