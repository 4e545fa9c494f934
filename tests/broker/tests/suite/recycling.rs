//! Hand-overs between two processes that live on leave nothing behind on either side: no descriptor, no mapping, no thread,
//! no memory.
//!
//! `DEVICE_IPC_RECYCLING_ROUNDS` says how many hand-overs there are.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use device_ipc_broker_tests::{
    Answer, CUDA, Census, Child, Directory, PINNING, agent, hand_over_through_ring, settle,
};

/// More than the slots of a page, so that slots that are not reused show.
const ROUNDS: u32 = 300;

fn rounds() -> u32 {
    let named = std::env::var("DEVICE_IPC_RECYCLING_ROUNDS").ok();
    named.map_or(ROUNDS, |rounds| rounds.parse().expect("a number of rounds"))
}

/// Rounds before the first look: what is made once has been made.
const WARM_UP: u32 = 40;

/// The bytes that a leak without a further allocation adds in each round at least.
const BYTES_OF_A_LEAK: u64 = 16;

/// How often the rounds are repeated at most.
const REPETITIONS: usize = 4;

/// The resources of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Possessions {
    census: Census,
    counter_pages: usize,
    own_pages: usize,
}

impl Possessions {
    fn of(child: &Child) -> Self {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", child.id())).expect("it lives");
        let [counter_pages, own_pages] =
            ["memfd:device-ipc-words", "memfd:device-ipc-own-words"].map(|name| maps.matches(name).count());
        Self { census: child.census(), counter_pages, own_pages }
    }
}

/// Both processes have the same after many rounds as after a few. Tables may grow with the load, but not with each repetition.
fn stays_flat(
    machine: &str,
    one: &mut Child,
    other: &mut Child,
    round: &mut dyn FnMut(&mut Child, &mut Child),
) {
    (0..WARM_UP).for_each(|_| round(one, other));
    settle([one, other]);
    let before = [Possessions::of(one), Possessions::of(other)];
    let mut heaps = vec![[one.heap(), other.heap()]];
    let is_flat = (0..REPETITIONS).any(|_| {
        (0..rounds()).for_each(|_| round(one, other));
        settle([one, other]);
        assert_eq!([Possessions::of(one), Possessions::of(other)], before, "{machine}");
        heaps.push([one.heap(), other.heap()]);
        let [.., last, now] = &heaps[..] else { unreachable!("there are two") };
        last.iter().zip(now).all(|(last, now)| {
            let rounds = u64::from(rounds());
            now.blocks < last.blocks + rounds / 10 && now.bytes < last.bytes + BYTES_OF_A_LEAK * rounds
        })
    });
    assert!(is_flat, "{machine}: the heaps grow with each {} rounds: {heaps:?}", rounds());
}

/// Two agents with a socket directory of their own: a process of another test that lists exports connects to every process in the common
/// namespace, and would be counted.
fn apart(machine: &str) -> (Directory, [Child; 2]) {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let sockets = Directory::new(&format!("apart-{}", NUMBER.fetch_add(1, Ordering::Relaxed)));
    let variable = format!("DEVICE_IPC_SOCKET_DIR={}", sockets.path().display());
    let through = ["env", &variable];
    let agents = [(); 2].map(|()| agent!(machine, through: &through));
    (sockets, agents)
}

fn warm_up(child: &mut Child) {
    child.ok("warm-up");
}

#[test]
fn timelines_signalled_by_streams_reuse_their_slots() {
    for machine in [PINNING, CUDA] {
        let (_sockets, [mut exporter, mut importer]) = apart(machine);
        [&mut exporter, &mut importer].into_iter().for_each(warm_up);
        let descriptor = exporter.share("x 4096");
        // Another timeline stays live, so that no page is forgotten by devices.
        let kept = exporter.share("kept 4096");
        importer.ok(&format!("open kept {kept}"));
        importer.ok("timeline kept");
        stays_flat(machine, &mut exporter, &mut importer, &mut |exporter, importer| {
            importer.ok(&format!("open x {descriptor}"));
            importer.ok("timeline x");
            exporter.ok("timelines x 1 10000");
            importer.ok("signal x 7");
            exporter.ok("wait x 7");
            exporter.ok("signal x 9");
            importer.ok("wait x 9");
            importer.ok("sync");
            importer.ok("drop x");
            exporter.ok("wait-released x 10000");
        });
    }
}

#[test]
fn exports_with_ready_events_reuse_their_slots() {
    for machine in [PINNING, CUDA] {
        let (_sockets, [mut exporter, mut importer]) = apart(machine);
        [&mut exporter, &mut importer].into_iter().for_each(warm_up);
        importer.ok("cache 0 0");
        stays_flat(machine, &mut exporter, &mut importer, &mut |exporter, importer| {
            let late = exporter.share("late 4096 gate=closed");
            importer.ok(&format!("open late {late} place=stream:0"));
            importer.ok("release late");
            assert_eq!(exporter.ok("open-gates"), "true", "the host has waited");
            exporter.ok("close late 10000");
        });
    }
}

#[test]
fn rings_reuse_their_slots() {
    for machine in [PINNING, CUDA] {
        let (_sockets, [mut writer, mut reader]) = apart(machine);
        [&mut writer, &mut reader].into_iter().for_each(warm_up);
        reader.ok("cache 0 0");
        let kept = writer.share("kept 4096");
        reader.ok(&format!("open kept {kept}"));
        reader.ok("timeline kept");
        stays_flat(machine, &mut writer, &mut reader, &mut hand_over_through_ring);
    }
}

#[test]
fn channels_leave_nothing_behind() {
    let under = format!("recycling-{}", std::process::id());
    let (_sockets, [mut one, mut other]) = apart(PINNING);
    [&mut one, &mut other].into_iter().for_each(warm_up);
    one.ok(&format!("listen {under}"));
    stays_flat(PINNING, &mut one, &mut other, &mut |one, other| {
        other.send(&format!("connect {under} c 20000"));
        one.ok(&format!("accept {under} c 20000"));
        assert!(matches!(other.receive(), Answer::Done(_)));
        for _ in 0..2 {
            one.ok("send c 5 20000 ready-on=0");
            assert_eq!(other.ok("receive c m 20000"), "5 0");
            other.ok("discard m");
        }
        // A channel lives until its streams' work has arrived, and the sender may be faster than its stream.
        one.ok("sync");
        one.ok("drop-channel c");
        other.ok("drop-channel c");
    });
}

#[test]
fn keepers_leave_nothing_behind() {
    let (_sockets, [mut keeper, mut reader]) = apart(PINNING);
    keeper.share("kept 4096");
    let name = format!("recycling-{}", std::process::id());
    keeper.ok(&format!("keep-under kept {name}"));
    stays_flat(PINNING, &mut keeper, &mut reader, &mut |_, reader| {
        reader.ok(&format!("open-kept {name} 4 8"));
    });
}

#[test]
fn slot_with_a_late_signal_is_reused_by_a_later_lease() {
    let (_sockets, [mut exporter, mut importer]) = apart(PINNING);
    let descriptor = exporter.share("x 4096");
    let mut rounds = 0;
    stays_flat(PINNING, &mut exporter, &mut importer, &mut |exporter, importer| {
        importer.ok(&format!("open x {descriptor}"));
        importer.ok("timeline x");
        exporter.ok("timelines x 1 10000");
        // When the lease ends, neither has the stream reached the signal nor the exporter's stream its wait.
        exporter.ok("close-gate 0 closed");
        exporter.ok("signal x 3");
        exporter.ok("wait x 5");
        importer.ok("drop x");
        exporter.ok("wait-released x 10000");
        exporter.ok("open-gates");
        rounds += 1;
        if rounds % 10 == 0 {
            exporter.ok("sync");
        }
    });
    exporter.ok("sync");
}

#[test]
fn every_timeline_of_an_exporter_ends_with_it() {
    let (_sockets, [mut exporter, mut importer]) = apart(PINNING);
    // More than a page of them; the stream waits for the first and for the last.
    let last = 300;
    for index in 0..=last {
        let descriptor = exporter.share(&format!("x{index} 4096"));
        importer.ok(&format!("open x{index} {descriptor}"));
        importer.ok(&format!("timeline x{index}"));
    }
    for index in [0, 1, last] {
        importer.ok(&format!("wait x{index} 1"));
    }
    importer.send("sync");
    importer.says_nothing_for(Duration::from_millis(50));
    exporter.kill();
    assert_eq!(importer.receive(), Answer::Done(String::new()));
    for index in [0, 1, last] {
        importer.fails(&format!("check x{index}"), "ExporterGone");
    }
}
