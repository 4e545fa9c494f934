//! A process that forks after it used the library: the child's guards do nothing, its calls refuse, its copies of our
//! sockets are closed, and its parent's death is noticed although the child lives on.

use device_ipc_broker_tests::{
    Census, Child, DESCRIPTORS, PINNING, REVOKING, agent, eventually, no_more_than, settle,
};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

/// A forked child that stays; killed, and reaped once its parent has gone. Declare it before its parent, so that it is
/// dropped after it.
#[derive(Default)]
pub(crate) struct Stray(Option<Pid>);

impl Stray {
    /// Has the agent fork; what its child says.
    pub(crate) fn forked_by(&mut self, agent: &mut Child) -> Vec<String> {
        // Its parent dies first; then it is ours to reap.
        let own = rustix::process::getpid();
        rustix::process::set_child_subreaper(Some(own)).expect("we can be a reaper");
        let pid = agent.ok("fork").parse().ok().and_then(Pid::from_raw);
        self.0 = Some(pid.expect("the answer is its process id"));
        agent.take_events()
    }

    fn census(&self) -> Census {
        Census::of(self.0.expect("it was forked").as_raw_nonzero().get() as u32)
    }

    fn lives(&self) -> bool {
        rustix::process::test_kill_process(self.0.expect("it was forked")).is_ok()
    }
}

impl Drop for Stray {
    fn drop(&mut self) {
        if let Some(pid) = self.0 {
            let _ = kill_process(pid, Signal::KILL);
            let _ = waitpid(Some(pid), WaitOptions::empty());
        }
    }
}

/// The reports of an exporter's child.
const OF_EXPORTER: &[&str] = &[
    "child open Forked",
    "child allocate Forked",
    "child shutdown Forked",
    "child close-unused Forked",
    "child cache Forked",
    "child holders Forked",
    "child wait-released Forked",
    "child close Forked",
    "child done",
];

/// The reports of an importer's child.
const OF_IMPORTER: &[&str] = &[
    "child open Forked",
    "child allocate Forked",
    "child shutdown Forked",
    "child close-unused Forked",
    "child cache Forked",
    "child view Forked",
    "child suspend Forked",
    "child replace Forked",
    "child release Forked",
    "child done",
];

fn has_no_connections(census: &Census) {
    let kinds = ["socket", "[eventpoll]"].map(|kind| census.of_kind(kind));
    assert_eq!(kinds, [0, 0], "{census:?}");
    // The one that is always readable, for guards of the parent; not the poller's.
    assert!(census.of_kind("[eventfd]") <= 1, "{census:?}");
}

#[test]
fn forked_exporter_child_is_inert_and_parent_death_is_noticed() {
    for machine in [PINNING, REVOKING, DESCRIPTORS] {
        let mut stray = Stray::default();
        let mut exporter = agent!(machine);
        let mut importer = agent!(machine);
        let descriptor = exporter.share("x 4096");
        importer.ok(&format!("open x {descriptor}"));
        importer.ok("on-gone x");
        importer.ok("touch x");
        settle([&mut exporter, &mut importer]);
        let before = exporter.census();
        assert_eq!(stray.forked_by(&mut exporter), OF_EXPORTER, "{machine}");
        has_no_connections(&stray.census());
        // The parent is not affected.
        assert_eq!(exporter.holders("x"), 1);
        no_more_than(&before, "after the fork", &mut exporter);
        importer.ok("touch x");
        agent!(machine).ok(&format!("open y {descriptor}"));
        eventually("the other importer has gone", 1, || exporter.holders("x"));
        assert_eq!(importer.take_events(), Vec::<String>::new());
        exporter.kill();
        importer.event("gone x ExporterGone");
        importer.fails(&format!("open y {descriptor}"), "ExporterGone");
        assert!(stray.lives());
        importer.ok("drop x");
        eventually("mappings", 0, || importer.counter("mapped_bytes"));
    }
}

#[test]
fn forked_importer_child_is_inert_and_parent_death_ends_leases() {
    for machine in [PINNING, REVOKING, DESCRIPTORS] {
        let mut stray = Stray::default();
        let mut exporter = agent!(machine);
        let mut importer = agent!(machine);
        let descriptor = exporter.share("x 4096");
        importer.ok(&format!("open x {descriptor} reserved=1"));
        importer.ok("touch x");
        settle([&mut exporter, &mut importer]);
        let before = importer.census();
        assert_eq!(stray.forked_by(&mut importer), OF_IMPORTER, "{machine}");
        has_no_connections(&stray.census());
        assert_eq!(exporter.holders("x"), 1);
        no_more_than(&before, "after the fork", &mut importer);
        assert_eq!(importer.ok("touch x"), "2");
        let other = exporter.share("y 4096");
        importer.ok(&format!("open y {other}"));
        importer.kill();
        eventually("leases", 0, || exporter.counter("leases"));
        assert!(stray.lives());
        exporter.ok("close x 10000");
        exporter.ok("close y 10000");
        assert_eq!(exporter.allocated(), 0);
    }
}

#[test]
fn fork_in_both_roles_leaves_both_working() {
    let mut stray = Stray::default();
    let mut both = agent!(PINNING);
    let mut peer = agent!(PINNING);
    let of_both = both.share("own 4096");
    let of_peer = peer.share("own 4096");
    both.ok(&format!("open theirs {of_peer}"));
    peer.ok(&format!("open theirs {of_both}"));
    stray.forked_by(&mut both);
    has_no_connections(&stray.census());
    both.ok("touch theirs");
    peer.ok("touch theirs");
    both.ok("drop theirs");
    peer.ok("wait-released own 10000");
    peer.ok("drop theirs");
    both.ok("wait-released own 10000");
    both.ok("shutdown 10000");
    peer.ok("shutdown 10000");
}

#[test]
fn fork_at_any_time_passes_no_socket_to_the_child() {
    let mut strays: Vec<Stray> = Vec::new();
    let mut importer = agent!(PINNING);
    // Exporters come and go, and so do the connections to them.
    for round in 0..5 {
        let mut exporter = agent!(PINNING);
        let descriptor = exporter.share("x 4096");
        importer.ok(&format!("open x {descriptor}"));
        let mut stray = Stray::default();
        assert!(!stray.forked_by(&mut importer).is_empty());
        let census = stray.census();
        assert_eq!(census.of_kind("socket"), 0, "round {round}: {census:?}");
        strays.push(stray);
        importer.ok("touch x");
        exporter.kill();
        importer.ok("drop x");
        eventually("sockets", 0, || importer.census().of_kind("socket"));
    }
    drop(importer);
    drop(strays);
}

/// The reports of the child of a ring's writer.
const OF_WRITER: &[&str] = &[
    "child ring-write Forked",
    "child ring-try-write Forked",
    "child ring-writable Forked",
    "child ring-readers Forked",
    "child ring-close Forked",
];

/// The reports of the child of a reader that has taken a slot.
const OF_READER: &[&str] = &[
    "child ring-next Forked",
    "child ring-try-next Forked",
    "child ring-next-ahead Forked",
    "child ring-check Forked",
    "child ring-release-now Forked",
];

#[test]
fn forked_children_of_a_ring_are_inert_and_the_ring_continues() {
    let mut strays = [Stray::default(), Stray::default()];
    let (mut writer, mut reader) = (agent!(PINNING), agent!(PINNING));
    let descriptor = writer.ok("ring 2");
    reader.ok(&format!("ring-join {descriptor}"));
    writer.ok("ring-readers 1 10000");
    writer.ok("ring-publish 1");
    assert_eq!(reader.ok("ring-next-ahead"), "0");
    let of_ring = |said: Vec<String>| -> Vec<String> {
        said.into_iter().filter(|line| line.starts_with("child ring-")).collect()
    };
    assert_eq!(of_ring(strays[0].forked_by(&mut writer)), OF_WRITER);
    assert_eq!(of_ring(strays[1].forked_by(&mut reader)), OF_READER);
    assert_eq!(writer.ok("ring-count"), "1", "the child has not left for its parent");
    assert_eq!(writer.ok("ring-writable 50"), "", "one slot is free");
    writer.ok("ring-publish 1");
    let held = writer.fails("ring-writable 50", "Timeout");
    assert!(held.contains("sequence 0"), "the child has released nothing: {held}");
    reader.ok("ring-release");
    assert_eq!(reader.ok("ring-read 1 10000"), "2");
    reader.ok("ring-leave");
    writer.ok("ring-close 10000");
}
