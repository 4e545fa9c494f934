//! The import cache: the leases it keeps idle, its limits, and the recall of idle leases.

use device_ipc_broker_tests::{PINNING, REVOKING, agent, eventually};

#[test]
fn reopen_costs_nothing_and_a_neighbour_one_message() {
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
fn open_with_a_timeout_of_zero_makes_no_request() {
    let mut exporter = agent!(PINNING);
    let mut importer = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    let other = exporter.share("other 4096");
    importer.ok(&format!("open other {other}"));
    let both = format!("two-opens {descriptor} 0 {descriptor} 0");
    let refused = importer.ok(&both);
    assert_eq!(refused.matches("Timeout").count(), 2, "{refused}");
    assert_eq!((importer.counter("requests_total"), exporter.holders("x")), (1, 0));
    importer.ok(&format!("open a {descriptor}"));
    importer.ok("drop a");
    let opened = importer.ok(&both);
    assert_eq!(opened.matches("Opened").count(), 2, "{opened}");
    assert_eq!(importer.counter("requests_total"), 2);
}

#[test]
fn drop_of_another_export_costs_one_request() {
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
fn cache_over_its_byte_limit_closes_idle_entries_only() {
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
fn wait_released_recalls_idle_leases_only() {
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
    // It is still open everywhere, and a release from now on returns the lease at once.
    idle.ok(&format!("open x {descriptor}"));
    idle.ok("drop x");
    busy.ok("touch x");
    busy.ok("drop x");
    exporter.ok("wait-released x 10000");
    assert_eq!(exporter.holders("x"), 0);
}

#[test]
fn drop_of_export_recalls_idle_leases_only() {
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
