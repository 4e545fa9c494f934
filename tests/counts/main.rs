//! What each operation costs, in things that can be counted: calls of the driver, requests to the exporter, system calls
//! and heap allocations of the caller's thread. A change that makes one of them dearer has to say so here.

mod allocations;
#[path = "../support/mod.rs"]
mod support;
mod system_calls;

use std::io::{BufRead as _, Write as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use device_ipc::mock::MockBackend;
use device_ipc::mock::engine::Operation;
use device_ipc::{
    Buffer, BundleDescriptor, BundleExport, Channel, Descriptor, Dtype, Ipc, Message, Region, Ring,
    RingReader, Stream, TensorLayout, counters,
};

use support::{Process, argument, role as role_name};

const PATIENCE: Duration = Duration::from_secs(60);

/// Exports of the second process, and the place of one more, whose bytes are ready behind a stream.
const EXPORTS: usize = 8;
const BEHIND_A_STREAM: usize = EXPORTS;

/// Allocations of a bundle.
const BLOCKS: u64 = 100;

/// What an operation has cost.
#[derive(Debug, PartialEq, Eq)]
struct Cost {
    /// Calls of the driver, by name.
    driver: Vec<(&'static str, u64)>,
    requests: u64,
    /// Of the calling thread.
    allocations: u64,
}

/// A process that has one machine, and counts.
struct Counted {
    ipc: Ipc,
    mock: Arc<MockBackend>,
    /// Counters are the whole process's.
    _alone: MutexGuard<'static, ()>,
}

impl Counted {
    fn new() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let mock = MockBackend::from_spec("devices=1").expect("a machine");
        Self { ipc: Ipc::with_backend(mock.clone()), mock, _alone: alone }
    }

    /// What it costs, with what its end leaves behind for the worker.
    fn cost<T>(&self, operation: impl FnOnce() -> T) -> (Cost, T) {
        settle();
        let (driver, requests) = (self.mock.machine().counters(), counters().requests_total);
        let allocations = allocations::of_this_thread();
        let result = operation();
        let allocations = allocations::of_this_thread() - allocations;
        let requests = counters().requests_total - requests;
        // What runs on a stream's own thread is not a call.
        let driver = self.mock.machine().counters().since(&driver);
        let called = driver.iter().filter(|(operation, count)| *operation != Operation::Run && *count > 0);
        let driver = called.map(|(operation, count)| (operation.name(), count)).collect();
        (Cost { driver, requests, allocations }, result)
    }
}

/// The worker has nothing left to do.
fn settle() {
    device_ipc::close_unused(PATIENCE).expect("nothing hangs");
}

fn cost(driver: &[(&'static str, u64)], requests: u64, allocations: u64) -> Cost {
    Cost { driver: driver.to_vec(), requests, allocations }
}

/// Allocations of a call that hands the worker so many jobs: its queue grows by a block now and then.
#[track_caller]
fn with_jobs(jobs: u64, allocations: u64, expected: u64) {
    assert!((expected..=expected + jobs).contains(&allocations), "{allocations} allocations, not {expected}");
}

/// A second process with its exports: two of each of its allocations.
fn exporter() -> (Process, Vec<Descriptor>) {
    let process = Process::role("exporter", &[]);
    let descriptors = (0..=EXPORTS).map(|_| process.line(|line| line.parse().ok())).collect();
    (process, descriptors)
}

#[test]
fn what_an_export_costs() {
    let counted = Counted::new();
    let ipc = &counted.ipc;
    let block = Arc::new(ipc.allocate(0, 4096).expect("memory"));
    // The poller, the socket and the tables.
    drop(ipc.share(Arc::new(ipc.allocate(0, 4096).expect("memory"))).start().expect("shared"));
    let (first, share) = counted.cost(|| ipc.share(block.clone()).start().expect("shared"));
    assert_eq!(first, cost(&[("range_of", 1), ("export", 1)], 0, 14), "the first of an allocation");
    let (second, another) = counted.cost(|| ipc.share(block.clone()).start().expect("shared"));
    assert_eq!(second, cost(&[], 0, 9), "another of an allocation that an export keeps");
    let (ended, ()) = counted.cost(|| drop((share, another)));
    assert_eq!(ended.requests, 0);
    // The end of both is a job each.
    with_jobs(2, ended.allocations, 2);
}

#[test]
fn what_opening_costs() {
    let counted = Counted::new();
    let ipc = &counted.ipc;
    let (process, exports) = exporter();
    // The link.
    let link = ipc.open(&exports[EXPORTS - 1]).at_home().expect("opened");
    let (first, mapping) = counted.cost(|| ipc.open(&exports[0]).at_home().expect("opened"));
    assert_eq!(first, cost(&[("range_of", 1), ("open", 1)], 1, 27), "the first open of an allocation");
    let (second, other) = counted.cost(|| ipc.open(&exports[1]).at_home().expect("opened"));
    assert_eq!(second, cost(&[], 1, 10), "another export of an allocation that is open");
    let (again, third) = counted.cost(|| ipc.open(&exports[0]).at_home().expect("opened"));
    assert_eq!(again, cost(&[], 0, 0), "an export that is open");
    let (released, ()) = counted.cost(|| drop(third));
    assert_eq!(released, cost(&[], 0, 0), "the end of a mapping beside another of its lease");
    let (kept, ()) = counted.cost(|| drop(mapping));
    assert_eq!(kept, cost(&[], 0, 0), "the end of the last, whose lease stays open");
    drop((other, link));
    settle();
    process.finish();
}

#[test]
fn the_end_of_a_mapping_wakes_nobody_unless_its_lease_ends() {
    let counted = Counted::new();
    let ipc = &counted.ipc;
    let (process, exports) = exporter();
    let open = || ipc.open(&exports[0]).at_home().expect("opened");
    let jobs = |operation: &dyn Fn()| {
        settle();
        let (before, driver) = (counters().jobs_total, counted.mock.machine().counters());
        operation();
        let done = counters().jobs_total - before;
        (done, counted.mock.machine().counters().since(&driver).get(Operation::Synchronize))
    };
    let kept = open();
    assert_eq!(jobs(&|| (0..10).for_each(|_| drop(open()))), (0, 0), "beside another mapping");
    drop(kept);
    let one_after_the_other = jobs(&|| (0..10).for_each(|_| drop(open())));
    // The first round begins behind `settle`, which has closed what nobody used.
    assert_eq!(one_after_the_other, (0, 0), "each the last of its lease");
    let ended = jobs(&|| {
        drop(open());
        settle();
    });
    // It is `settle`'s.
    assert_eq!(ended, (1, 1), "the device is waited for once, before the lease ends");
    process.finish();
}

#[test]
fn what_an_export_does_not_keep_is_asked_for_again() {
    let counted = Counted::new();
    let ipc = &counted.ipc;
    let asked = [("range_of", 1)];
    let block = ipc.allocate(0, 4096).expect("memory");
    // Some of the mock's allocations lie in one block.
    let beside = Arc::new(ipc.allocate(0, 4096).expect("memory"));
    let region = Region::new(ipc.backend().info().name, block.range());
    // SAFETY: the block outlives its exports.
    let borrow = || unsafe { ipc.share_borrowed(region) }.start().expect("shared");
    let (_, borrowed) = counted.cost(borrow);
    let (again, other) = counted.cost(borrow);
    assert_eq!(again.driver, asked, "the owner may have freed what is only borrowed");
    drop((borrowed, other));
    let (first, share) = counted.cost(|| ipc.share(block).start().expect("shared"));
    assert_eq!(first.driver.first(), asked.first(), "nobody kept it: {first:?}");
    let (elsewhere, further) = counted.cost(|| ipc.share(beside.clone()).start().expect("shared"));
    assert_eq!(elsewhere.driver.first(), asked.first(), "another allocation: {elsewhere:?}");
    drop(further);
    settle();
    let (ended, again) = counted.cost(|| ipc.share(beside).start().expect("shared"));
    assert_eq!(ended.driver.first(), asked.first(), "the export that kept it has ended: {ended:?}");
    drop((share, again));
}

/// The names, shapes and strides of a thousand tensors.
#[test]
fn what_a_bundle_costs() {
    let counted = Counted::new();
    let ipc = &counted.ipc;
    let (tensors, block) = (1000_u64, Arc::new(ipc.allocate(0, 64_000).expect("memory")));
    let names: Vec<String> = (0..tensors).map(|index| format!("layer.{index}.weight")).collect();
    let make = |names: Vec<String>| {
        let mut bundle = ipc.bundle();
        let memory = bundle.memory(block.clone());
        for (index, name) in names.into_iter().enumerate() {
            let layout = TensorLayout::contiguous(Dtype::F32, [2, 2, 2, 2]).expect("a layout");
            bundle.tensor(name, memory, index as u64 * 64, layout).expect("it fits");
        }
        bundle.start().expect("shared")
    };
    let kept = make(names.clone());
    let (again, bundle) = counted.cost(|| make(names));
    assert_eq!((again.driver.len(), again.requests), (0, 0), "the memory is shared already: {again:?}");
    assert!(again.allocations < 100, "{} allocations for {tensors} tensors", again.allocations);
    let (written, bytes) = counted.cost(|| bundle.descriptor().to_bytes());
    assert_eq!(written.allocations, 1, "one buffer");
    let (read, descriptor) = counted.cost(|| BundleDescriptor::from_bytes(&bytes).expect("it is read back"));
    assert_eq!(descriptor.len() as u64, tensors);
    assert!(read.allocations < 40, "{} allocations for {tensors} tensors", read.allocations);
    drop((kept, bundle));
}

/// A bundle of so many blocks, with a tensor in each.
fn bundle_of(ipc: &Ipc, blocks: &[Arc<Buffer>]) -> BundleExport {
    let mut bundle = ipc.bundle();
    for (index, block) in blocks.iter().enumerate() {
        let memory = bundle.memory(block.clone());
        let layout = TensorLayout::contiguous(Dtype::F32, [16]).expect("a layout");
        bundle.tensor(format!("layer.{index}.weight"), memory, 0, layout).expect("it fits");
    }
    bundle.start().expect("shared")
}

fn blocks(ipc: &Ipc) -> Vec<Arc<Buffer>> {
    (0..BLOCKS).map(|_| Arc::new(ipc.allocate(0, 4096).expect("memory"))).collect()
}

/// What is handed over again costs the same for one allocation as for many, but for what the caller gives of each.
#[test]
fn what_a_bundle_of_many_allocations_costs() {
    let counted = Counted::new();
    let ipc = &counted.ipc;
    let blocks = blocks(ipc);
    let (first, kept) = counted.cost(|| bundle_of(ipc, &blocks));
    assert_eq!(first.driver, [("range_of", BLOCKS), ("export", BLOCKS)], "the driver is asked once for each");
    let (again, bundle) = counted.cost(|| bundle_of(ipc, &blocks));
    assert_eq!((again.driver, again.requests), (vec![], 0), "exports keep all of them");
    // The names, and the lists of what the caller gives.
    assert!(again.allocations < BLOCKS + 40, "{} allocations", again.allocations);
    let (read, _) = counted.cost(|| BundleDescriptor::from_bytes(&bundle.descriptor().to_bytes()));
    assert!(read.allocations < 40, "{} allocations for {BLOCKS} regions", read.allocations);
    drop((kept, bundle));

    let process = Process::role("bundler", &[]);
    let bundles: Vec<BundleDescriptor> = (0..3).map(|_| process.line(|line| line.parse().ok())).collect();
    let open = |bundle| ipc.open_bundle(bundle).at_home().expect("opened");
    let (first, mapping) = counted.cost(|| open(&bundles[0]));
    assert_eq!(first.driver, [("range_of", BLOCKS), ("open", BLOCKS)], "each is opened once");
    assert_eq!(first.requests, 1);
    let (another, second) = counted.cost(|| open(&bundles[1]));
    assert_eq!((another.driver, another.requests), (vec![], 1), "another bundle of the same memory");
    assert!(another.allocations < 30, "{} allocations", another.allocations);
    drop(mapping);
    let (next, third) = counted.cost(|| open(&bundles[2]));
    assert_eq!((next.driver, next.requests), (vec![], 1), "and the next, where the first has gone");
    assert!(next.allocations < 30, "{} allocations", next.allocations);
    let (same, fourth) = counted.cost(|| open(&bundles[2]));
    assert_eq!((same.driver, same.requests), (vec![], 0), "a bundle that is open");
    drop((second, third, fourth));
    settle();
    process.finish();
}

#[test]
fn what_is_ready_is_asked_for_once() {
    let counted = Counted::new();
    let ipc = &counted.ipc;
    let (process, exports) = exporter();
    let stream = ipc.create_stream(0).expect("a stream");
    let (first, mapping) = counted.cost(|| ipc.open(&exports[BEHIND_A_STREAM]).at_home().expect("opened"));
    assert!(first.driver.iter().any(|(name, _)| *name == "open_event"), "{first:?}");
    let (again, second) = counted.cost(|| ipc.open(&exports[BEHIND_A_STREAM]).at_home().expect("opened"));
    assert_eq!(again, cost(&[], 0, 0), "the host has seen it");
    let (waiting, third) = counted.cost(|| ipc.open(&exports[BEHIND_A_STREAM]).on(&stream).expect("opened"));
    assert_eq!(waiting, cost(&[], 0, 0), "no stream has to wait");
    drop((mapping, second, third));
    settle();
    process.finish();
}

#[test]
fn what_a_release_on_a_stream_costs() {
    let counted = Counted::new();
    let ipc = &counted.ipc;
    let (process, exports) = exporter();
    let stream = ipc.create_stream(0).expect("a stream");
    let mapping = ipc.open(&exports[0]).on(&stream).expect("opened");
    let (again, second) = counted.cost(|| ipc.open(&exports[0]).on(&stream).expect("opened"));
    assert_eq!(again, cost(&[], 0, 0), "an export that is open, on a stream");
    let (released, ()) = counted.cost(|| second.release(&stream).expect("released"));
    // The worker asks whether the event has been reached as often as it likes.
    let submitted: Vec<_> =
        released.driver.into_iter().filter(|(name, _)| ["create_event", "record"].contains(name)).collect();
    assert_eq!(submitted, [("create_event", 1), ("record", 1)], "no wait, no synchronisation");
    assert_eq!(released.requests, 0);
    // Eleven of them are the mock's, for the event.
    with_jobs(1, released.allocations, 13);
    drop(mapping);
    settle();
    process.finish();
}

#[test]
fn what_a_timeline_costs() {
    let counted = Counted::new();
    let ipc = &counted.ipc;
    let (process, exports) = exporter();
    let stream = ipc.create_stream(0).expect("a stream");
    let mapping = ipc.open(&exports[0]).on(&stream).expect("opened");
    let (begun, timeline) = counted.cost(|| mapping.timeline().expect("a timeline"));
    assert_eq!((begun.requests, begun.driver), (1, vec![]), "the words are asked for once");
    timeline.signal(1, &stream).expect("signalled");
    let (signalled, ()) = counted.cost(|| timeline.signal(2, &stream).expect("signalled"));
    // Both allocations are the mock's, for the stream's queue.
    assert_eq!(signalled, cost(&[("write_value", 1)], 0, 2), "a signal");
    let (waited, ()) = counted.cost(|| timeline.wait(0, &stream).expect("submitted"));
    assert_eq!(waited, cost(&[("wait_value", 1)], 0, 2), "a wait");
    let (asked, _) = counted.cost(|| mapping.timeline().expect("a timeline"));
    assert_eq!(asked, cost(&[], 0, 0), "the timeline once more");
    stream.synchronize().expect("done");
    drop((timeline, mapping));
    settle();
    process.finish();
}

#[test]
fn what_a_hand_over_through_a_ring_costs() {
    let counted = Counted::new();
    let ipc = &counted.ipc;
    let stream = ipc.create_stream(0).expect("a stream");
    let mut ring = ring_of(ipc);
    let mut reader = ipc.open_ring(ring.descriptor()).on(&stream).expect("joined");
    for _ in 0..4 {
        hand_over_by_hosts(&mut ring, &mut reader, &stream);
    }
    let (by_hosts, ()) = counted.cost(|| hand_over_by_hosts(&mut ring, &mut reader, &stream));
    assert_eq!(by_hosts, cost(&[], 0, 0), "by hosts");
    let mut by_streams = || {
        ring.write(&stream).expect("written").publish(&stream).expect("published");
        reader.next(&stream).expect("taken").release(&stream).expect("released");
    };
    // The device gets to know the pages.
    by_streams();
    stream.synchronize().expect("done");
    let (by_streams, ()) = counted.cost(by_streams);
    let waits = by_streams.driver.iter().filter(|(name, _)| *name == "wait_value").map(|(_, count)| count);
    assert!(waits.sum::<u64>() <= 1, "a wait for the publication, if it has not come: {by_streams:?}");
    let rest: Vec<_> = by_streams.driver.iter().filter(|(name, _)| *name != "wait_value").copied().collect();
    assert_eq!(
        rest,
        [("write_value", 4)],
        "the publication and the release, each with the order of the process's own streams; no host waits"
    );
    assert_eq!(by_streams.requests, 0);
    stream.synchronize().expect("done");
}

fn ring_of(ipc: &Ipc) -> Ring {
    ipc.ring(ipc.allocate(0, 4096).expect("memory")).start().expect("a ring")
}

fn hand_over_by_hosts(ring: &mut Ring, reader: &mut RingReader, stream: &Stream) {
    ring.wait_writable(PATIENCE).expect("released");
    ring.write(stream).expect("written").publish_now().expect("published");
    reader.wait_next(PATIENCE).expect("taken").release_now().expect("released");
}

#[test]
fn what_a_descriptor_costs() {
    let _counted = Counted::new();
    let (process, exports) = exporter();
    let count = |operation: &dyn Fn()| {
        let before = allocations::of_this_thread();
        operation();
        allocations::of_this_thread() - before
    };
    let (bytes, text) = (exports[0].to_bytes(), exports[0].to_string());
    assert_eq!(count(&|| drop(exports[0].to_bytes())), 1, "one buffer");
    assert_eq!(count(&|| drop(Descriptor::from_bytes(&bytes))), 3, "the name, the address, the allocations");
    assert_eq!(count(&|| drop(text.parse::<Descriptor>())), 4, "and the bytes");
    process.finish();
}

/// Both ends of a channel, in this process.
fn channel(ipc: &Ipc) -> (Channel, Channel) {
    let name = format!("counts-{}", std::process::id());
    let listener = ipc.listen(&name).start().expect("it listens");
    let connecting = std::thread::spawn({
        let ipc = ipc.clone();
        move || ipc.connect(&name).timeout(PATIENCE).start()
    });
    let far = listener.accept(PATIENCE).expect("accepted");
    (connecting.join().expect("no panic").expect("connected"), far)
}

#[test]
fn what_a_message_costs() {
    let counted = Counted::new();
    let ipc = &counted.ipc;
    let (near, far) = channel(ipc);
    let block = Arc::new(ipc.allocate(0, 4096).expect("memory"));
    let export = ipc.share(block).start().expect("shared");
    let send = |channel: &Channel| {
        channel.send(Message::new().bytes(b"layer").tensor(&export), PATIENCE).expect("sent");
    };
    // Buffers and tables are as large as they have to be.
    for _ in 0..20 {
        send(&near);
        drop(far.receive(PATIENCE).expect("received"));
    }
    let (sent, ()) = counted.cost(|| send(&near));
    assert_eq!(sent, cost(&[], 0, 4), "the parts, their grants, their list, the bytes of the descriptor");
    let (received, message) = counted.cost(|| far.receive(PATIENCE).expect("received"));
    assert_eq!(
        received,
        cost(&[], 0, 7),
        "the bytes, the parts and their list, the descriptor, where to give it back"
    );
    let (opened, mapping) = counted.cost(|| message.tensors()[0].open().at_home().expect("opened"));
    assert_eq!((opened.driver, opened.requests), (vec![], 0), "opening it");
    drop((mapping, message));
    let (bytes, ()) = counted.cost(|| near.send(Message::new().bytes(b"bytes"), PATIENCE).expect("sent"));
    assert_eq!(bytes, cost(&[], 0, 0), "bytes alone");
    let (received, _) = counted.cost(|| far.receive(PATIENCE).expect("received"));
    assert_eq!(received, cost(&[], 0, 1), "the bytes alone");
}

#[test]
fn what_opening_costs_in_system_calls() {
    let _counted = Counted::new();
    let (process, exports) = exporter();
    let text: Vec<String> = exports.iter().map(Descriptor::to_string).collect();
    let mut traced = Process::role("traced", &[("DESCRIPTORS", &text.join(","))]);
    let pid: i32 = traced.line(|line| line.strip_prefix("pid ")?.parse().ok());
    if traced.line(|line| line.strip_prefix("traced ").map(|yes| yes == "false")) {
        println!("skipped: this system does not permit ptrace");
        return;
    }
    traced.enter();
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

#[test]
#[ignore = "what the other tests start"]
fn role() {
    match role_name().as_str() {
        "exporter" => run_exporter(),
        "bundler" => run_bundler(),
        "traced" => run_traced(),
        other => panic!("there is no role {other}"),
    }
}

fn run_exporter() {
    let ipc = Ipc::with_backend(MockBackend::from_spec("devices=1").expect("a machine"));
    let mut exports = Vec::new();
    for _ in 0..EXPORTS / 2 {
        let block = Arc::new(ipc.allocate(0, 4096).expect("memory"));
        for _ in 0..2 {
            let export = ipc.share(block.clone()).start().expect("shared");
            println!("{}", export.descriptor());
            exports.push(export);
        }
    }
    let stream = ipc.create_stream(0).expect("a stream");
    let block = ipc.allocate(0, 4096).expect("memory");
    let export = ipc.share(block).ready_on(&stream).start().expect("shared");
    println!("{}", export.descriptor());
    exports.push(export);
    let ended = std::io::stdin().lock().lines().next();
    assert!(ended.is_none(), "the test only closes the input");
}

/// Bundles of the same memory.
fn run_bundler() {
    let ipc = Ipc::with_backend(MockBackend::from_spec("devices=1").expect("a machine"));
    let blocks = blocks(&ipc);
    let bundles: Vec<_> = (0..3).map(|_| bundle_of(&ipc, &blocks)).collect();
    bundles.iter().for_each(|bundle| println!("{}", bundle.descriptor()));
    let ended = std::io::stdin().lock().lines().next();
    assert!(ended.is_none(), "the test only closes the input");
}

/// Does the same operations, between marks.
fn run_traced() {
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
    let message = || Message::new().bytes(b"layer").tensor(&shared);
    let round_trip = || {
        // What this process shares is sent with a grant, and what the other one shares is open already.
        near.send(message().descriptor(&exports[0]), PATIENCE).expect("sent");
        let received = far.receive(PATIENCE).expect("received");
        drop(received.tensors()[1].open().at_home().expect("opened"));
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
