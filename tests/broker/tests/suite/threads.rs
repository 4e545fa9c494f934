//! The library's threads: systems that start none, and calls that wait, made on the thread that runs callbacks.

use device_ipc_broker_tests::{Child, PINNING, agent, eventually, is_root};

/// Every call that waits, where it is made in a callback.
const REFUSED: &[&str] = &[
    "wait_opened",
    "timelines",
    "wait_released",
    "bundle.wait_released",
    "bundle.close",
    "wait_readers",
    "ring.next",
    "ring.close",
    "wait_now",
    "accept",
    "receive",
    "channel.close",
    "export.close",
    "close_unused",
    "shutdown",
];

/// An agent whose user has no other process, with memory and a stream, which need threads of their own. `None` where this
/// process may not become another user.
fn of_a_user_of_its_own() -> Option<Child> {
    // The limit of threads counts all of a user.
    if !is_root() {
        return None;
    }
    let mut agent = agent!(PINNING);
    let user = 1_000_000 + agent.id();
    agent.ok(&format!("become {user} {user}"));
    agent.ok("allocate memory 4096");
    agent.ok("sync");
    Some(agent)
}

#[test]
fn share_where_no_thread_starts_fails_and_leaves_nothing() {
    let Some(mut agent) = of_a_user_of_its_own() else { return };
    // The first starts neither thread, the second the worker alone.
    for more in 0..2 {
        agent.ok(&format!("limit-threads {more}"));
        let text = agent.fails("share x 4096 of=memory", "Io");
        let thread = ["device-ipc-work", "device-ipc-poll"][more];
        assert!(
            text.contains(&format!("starting the thread {thread}")) && text.contains("ulimit -u"),
            "{text}"
        );
        assert_eq!(agent.counter("exports"), 0);
    }
    agent.ok("limit-threads any");
    agent.ok("share x 4096 of=memory");
    agent.ok("close x 10000");
    agent.ok("free memory");
    assert_eq!(agent.allocated(), 0);
}

#[test]
fn open_where_no_thread_starts_fails() {
    let Some(mut importer) = of_a_user_of_its_own() else { return };
    let mut exporter = agent!(PINNING);
    let descriptor = exporter.share("x 4096");
    importer.ok("limit-threads 0");
    let text = importer.fails(&format!("open x {descriptor}"), "Io");
    assert!(text.contains("starting the thread device-ipc-work"), "{text}");
    assert_eq!(exporter.holders("x"), 0);
}

#[test]
fn drop_where_no_thread_starts_any_longer_frees_memory() {
    let Some(mut agent) = of_a_user_of_its_own() else { return };
    agent.ok("share x 4096");
    agent.ok("limit-threads 0");
    agent.ok("drop x");
    eventually("exports", 0, || agent.counter("exports"));
    agent.ok("shutdown 10000");
}

fn check_all_refused(agent: &mut Child) {
    for call in REFUSED {
        assert_eq!(agent.event("waited"), format!("waited {call} OnWorkerThread"));
    }
    assert_eq!(agent.event("waited"), "waited look StillHeld");
    assert_eq!(agent.event("all-waited"), "all-waited true", "none of the calls waited");
}

#[test]
fn calls_that_wait_are_refused_in_on_change() {
    let (mut exporter, mut importer) = (agent!(PINNING), agent!(PINNING));
    let descriptor = exporter.share("x 4096");
    exporter.ok("wait-in x 60000");
    importer.ok(&format!("open y {descriptor}"));
    check_all_refused(&mut exporter);
    // The worker continues.
    importer.ok("drop y");
    importer.ok("close-unused 10000");
    exporter.ok("close x 10000");
}

#[test]
fn calls_that_wait_are_refused_in_on_gone() {
    let (mut exporter, mut importer) = (agent!(PINNING), agent!(PINNING));
    let descriptor = exporter.share("x 4096");
    importer.ok(&format!("open y {descriptor}"));
    importer.ok("wait-in y 60000");
    exporter.kill();
    check_all_refused(&mut importer);
    importer.ok("drop y");
    importer.ok("shutdown 10000");
}
