//! System calls of an open, counted by tracing a process.

use std::io::{BufRead as _, Write as _};
use std::sync::Arc;
use std::time::Duration;

use super::system_calls;
use crate::roles::{argument, start};
use device_ipc::mock::MockBackend;
use device_ipc::{Descriptor, Ipc, Message};
use device_ipc_test_process::alone;

use super::patterns::{channel, hand_over_by_hosts, ring_of};
use super::{EXPORTS, HERE, PATIENCE, exporter};

#[test]
fn system_calls_of_open() {
    alone!();
    let (process, exports) = exporter();
    let text: Vec<String> = exports.iter().map(Descriptor::to_string).collect();
    let mut traced = start(HERE, "traced", &[("DESCRIPTORS", &text.join(","))]);
    let pid: i32 = traced.line(|line| line.strip_prefix("pid ")?.parse().ok());
    if traced.line(|line| line.strip_prefix("traced ").map(|yes| yes == "false")) {
        println!("skipped: this system does not permit ptrace");
        return;
    }
    traced.send("");
    let found = system_calls::trace(pid);
    drop(traced);
    let [share, first, second, again, ring, there_and_back, send, receive, wait] = found.as_slice() else {
        panic!("{found:?}")
    };
    let nothing: [u64; 0] = [];
    assert_eq!(but_for_memory(ring), nothing, "hosts hand over through a ring without the kernel");
    assert_eq!(but_for_memory(again), nothing, "opening what is open asks the kernel nothing");
    assert_eq!(of_ours(share), nothing, "the kernel gives tokens for many exports at a time");
    let round_trip = [libc::SYS_epoll_ctl, libc::SYS_sendmsg, libc::SYS_recvmsg, libc::SYS_epoll_ctl];
    assert_eq!(
        with_looks_as_one(of_ours(second)),
        round_trip.map(number),
        "one round trip, with the poller kept away meanwhile"
    );
    assert_eq!(
        but_for_memory(there_and_back),
        nothing,
        "a message and its answer, while both ends are awake"
    );
    assert_eq!(
        but_for_memory(send),
        [libc::SYS_sendmsg].map(number),
        "a message behind one that was not received yet"
    );
    assert_eq!(but_for_memory(receive), [libc::SYS_recvmsg].map(number), "a message that is there");
    let waiting = of_ours(wait);
    let asleep = waiting.iter().all(|call| *call == number(libc::SYS_ppoll)) && !waiting.is_empty();
    assert!(asleep, "a wait for a message that does not come: {waiting:?}");
    let first = with_looks_as_one(of_ours(first));
    assert_eq!(first[..4], round_trip.map(number), "before the driver's calls");
    drop(process);
}

/// While answers come quickly, the importer looks for one as often as it likes before it sleeps in the last look.
fn with_looks_as_one(mut calls: Vec<u64>) -> Vec<u64> {
    calls.dedup_by(|next, call| *next == number(libc::SYS_recvmsg) && next == call);
    calls
}

const fn number(call: i64) -> u64 {
    call as u64
}

/// Without what the allocator and the mock ask for: memory, and which process it is.
fn of_ours(calls: &[u64]) -> Vec<u64> {
    let mut calls = but_for_memory(calls);
    calls.retain(|call| *call != number(libc::SYS_getpid));
    calls
}

/// Without what the allocator asks for.
fn but_for_memory(calls: &[u64]) -> Vec<u64> {
    let theirs = [libc::SYS_brk, libc::SYS_mmap, libc::SYS_munmap, libc::SYS_mprotect, libc::SYS_madvise];
    calls.iter().copied().filter(|call| !theirs.map(number).contains(call)).collect()
}

/// Does the same operations, between marks.
pub(super) fn run_traced() {
    let ipc = Ipc::with_backend(MockBackend::from_spec("devices=1").expect("a machine"));
    let block = Arc::new(ipc.allocate(0, 4096).expect("memory"));
    let texts = argument("DESCRIPTORS");
    let exports: Vec<Descriptor> = texts.split(',').map(|text| text.parse().expect("a descriptor")).collect();
    let shared = ipc.share(block.clone()).start().expect("shared");
    let link = ipc.open(&exports[EXPORTS - 1]).at_home().expect("opened");
    let stream = ipc.create_stream(0).expect("a stream");
    let mut ring = ring_of(&ipc);
    let mut reader = ipc.open_ring(ring.descriptor()).on(&stream).expect("joined");
    for _ in 0..4 {
        hand_over_by_hosts(&mut ring, &mut reader, &stream);
    }
    // SAFETY: asks for a number.
    println!("\npid {}", unsafe { libc::gettid() });
    println!("\ntraced {}", system_calls::be_traced());
    std::io::stdout().flush().expect("the test reads");
    std::io::stdin().lock().lines().next();
    system_calls::stop();
    let mut kept = Vec::with_capacity(4);
    system_calls::mark();
    let another = ipc.share(block).start().expect("shared");
    system_calls::mark();
    for export in [0, 1, 0] {
        system_calls::mark();
        kept.push(ipc.open(&exports[export]).at_home().expect("opened"));
        system_calls::mark();
    }
    system_calls::mark();
    hand_over_by_hosts(&mut ring, &mut reader, &stream);
    system_calls::mark();
    let (near, far) = channel(&ipc);
    let message = || Message::new().bytes(b"layer").export(&shared);
    let round_trip = || {
        // An export of this process is sent with a grant, an export of the other process is open already.
        near.send(message().descriptor(&exports[0]), PATIENCE).expect("sent");
        let received = far.receive(PATIENCE).expect("received");
        drop(received.exports()[1].open().at_home().expect("opened"));
        received.reply(Message::new(), PATIENCE).expect("answered");
        drop(near.receive(PATIENCE).expect("received"));
    };
    // Tables and buffers are as large as they have to be.
    (0..20).for_each(|_| round_trip());
    system_calls::mark();
    round_trip();
    system_calls::mark();
    near.send(message(), PATIENCE).expect("sent");
    system_calls::mark();
    near.send(message(), PATIENCE).expect("sent");
    system_calls::mark();
    drop(far.receive(PATIENCE).expect("received"));
    system_calls::mark();
    let received = far.receive(PATIENCE).expect("received");
    system_calls::mark();
    system_calls::mark();
    let nothing = far.receive(Duration::from_millis(1));
    system_calls::mark();
    assert!(nothing.is_err(), "nothing was sent");
    drop((kept, link, another, shared, received, near, far));
}
