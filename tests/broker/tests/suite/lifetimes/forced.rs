//! Leases that end without a release: by the death of the exporter, a shutdown, or memory that is freed or shared again.

use device_ipc_broker_tests::{Answer, DESCRIPTORS, PINNING, REVOKING, agent, eventually};

#[test]
fn close_mappings_of_a_dead_exporter_frees_its_memory() {
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
        // Idle mappings are closed without a command, used mappings by the command.
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
fn mapping_closed_by_force_reopens_once_it_is_released() {
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
fn shutdown_recalls_and_returns_every_lease() {
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
    pair[0].ok("shutdown 10000");
    pair[1].ok("shutdown 10000");
    for one in &mut pair {
        // Guards that outlive the shutdown do no harm.
        one.ok("drop own");
        assert_eq!((one.counter("exports"), one.allocated(), one.census().mock_mappings), (0, 0, 0));
    }
    agent!(PINNING).ok("shutdown 1000");
}

#[test]
fn revocable_memory_can_be_freed_while_held() {
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
fn memory_shared_again_at_once_stays_with_its_new_importers() {
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
fn overlapping_stale_mapping_is_closed_if_idle_else_named() {
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
