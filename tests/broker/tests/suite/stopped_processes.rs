//! Stopped processes: they cost their importers the time limit, and no other process anything.

use std::time::{Duration, Instant};

use device_ipc_broker_tests::{DESCRIPTORS, PINNING, agent, eventually, no_more_than, settle, within};

/// The most that a call may take that waits for no stopped process: less than the time limit of one that does.
const HONEST: Duration = Duration::from_secs(10);

#[test]
fn stopped_importer_delays_no_other_importer() {
    let mut exporter = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    let mut honest = agent!(PINNING);
    honest.ok(&format!("open x {descriptor}"));
    let mut stopped = agent!(PINNING);
    let second = exporter.share("second 4096");
    stopped.ok(&format!("open x {}", descriptor));
    stopped.ok(&format!("open second {second}"));
    stopped.stop();
    let mut other = agent!(PINNING);
    other.ok("cache 0 0");
    for _ in 0..50 {
        within(HONEST, "an open beside one that stands still", || {
            other.ok(&format!("open y {}", descriptor));
        });
        other.ok("drop y");
    }
    // An export that it holds is dropped, which notifies it and waits for no process.
    within(HONEST, "dropping what it holds", || exporter.ok("drop second"));
    eventually("holders", 2, || exporter.holders("x"));
    stopped.resume();
    stopped.ok("drop x second");
    stopped.kill();
    drop(other);
    eventually("holders", 1, || exporter.holders("x"));
    eventually("exports", 1, || exporter.counter("exports"));
}

#[test]
fn stopped_exporter_times_out_and_gets_its_late_lease_back() {
    let mut exporter = agent!(DESCRIPTORS);
    let mut other = agent!(DESCRIPTORS);
    let mut importer = agent!(DESCRIPTORS);
    importer.ok("cache 0 0");
    let first = exporter.share("first 4096");
    let second = exporter.share("second 4096");
    let elsewhere = other.share("x 4096");
    importer.ok(&format!("open first {first}"));
    importer.ok(&format!("open warm {elsewhere}"));
    importer.ok("touch first");
    importer.ok("drop warm");
    settle([&mut other, &mut importer]);
    assert_eq!(other.holders("x"), 0, "the warm one");
    let before = importer.census();
    exporter.stop();
    let since = Instant::now();
    let text = importer.fails(&format!("open second {second} timeout=500"), "Timeout");
    let took = since.elapsed();
    assert!((Duration::from_millis(500)..HONEST).contains(&took), "{took:?}");
    assert!(text.contains(&exporter.id().to_string()), "{text}");
    for _ in 0..10 {
        within(HONEST, "an open of another exporter's", || importer.ok(&format!("open x {elsewhere}")));
        importer.ok("drop x");
    }
    exporter.resume();
    // Its reply arrives after the request has timed out.
    eventually("the late grant", "0 opened=1".to_owned(), || exporter.ok("holders second"));
    assert_eq!(exporter.holders("first"), 1);
    no_more_than(&before, "the importer", &mut importer);
    importer.ok(&format!("open second {second}"));
    importer.ok("drop first second");
    exporter.ok("close first 10000");
    exporter.ok("close second 10000");
}

#[test]
fn opens_of_a_stopped_exporter_each_keep_their_deadline() {
    let mut exporter = agent!(PINNING);
    let mut importer = agent!(PINNING);
    let held = exporter.share("held 4096");
    let first = exporter.share("first 4096");
    let second = exporter.share("second 4096");
    importer.ok(&format!("open held {held}"));
    exporter.stop();
    let text = importer.ok(&format!("two-opens {first} 6000 {second} 500"));
    exporter.resume();
    let words: Vec<_> = text.split_whitespace().collect();
    assert_eq!((words[0], words[2]), ("Timeout", "Timeout"), "{text}");
    let second: u64 = words[3].parse().expect("milliseconds");
    assert!(
        second < 2500,
        "the second was to take 500 ms and took {second}, as the first was waiting: {text}"
    );
}

#[test]
fn exporter_stopped_before_hello_times_out() {
    let mut exporter = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    exporter.stop();
    let mut importer = agent!(PINNING);
    let open = format!("open x {descriptor} timeout=500");
    for _ in 0..3 {
        within(HONEST, "the open", || importer.fails(&open, "Timeout"));
    }
    exporter.resume();
    importer.ok(&format!("open x {descriptor}"));
    assert_eq!(exporter.holders("x"), 1);
    eventually("sockets", 2, || exporter.census().of_kind("socket"));
}
