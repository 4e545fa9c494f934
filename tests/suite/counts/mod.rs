//! The cost of each operation in countable units: calls of the driver, requests to the exporter, system calls
//! and heap allocations of the caller's thread. A change that makes one of them dearer has to say so here.

mod patterns;
mod system_calls;
mod traced;

use std::sync::Arc;
use std::time::Duration;

use device_ipc::mock::MockBackend;
use device_ipc::mock::engine::Operation;
use device_ipc::{Descriptor, Export, Ipc, Mapping, Region, counters};
use device_ipc_test_process::{Heap, Process, allocations_of_this_thread, alone, request};

use super::roles::{role as role_name, start};
use patterns::run_bundler;
use traced::run_traced;

const PATIENCE: Duration = Duration::from_secs(60);

/// The module of the role.
const HERE: &str = module_path!();

/// Exports of the second process, and the place of one more, whose bytes are ready behind a stream.
const EXPORTS: usize = 8;
const BEHIND_A_STREAM: usize = EXPORTS;

/// The cost of an operation.
#[derive(Debug, PartialEq, Eq)]
struct Cost {
    /// Calls of the driver, by name.
    driver: Vec<(&'static str, u64)>,
    requests: u64,
    /// Of the calling thread.
    allocations: u64,
}

/// A process that has one machine, and counts. Counters are those of the whole process, which runs one test.
struct Counted {
    ipc: Ipc,
    mock: Arc<MockBackend>,
}

impl Counted {
    fn new() -> Self {
        let mock = MockBackend::from_spec("devices=1").expect("a machine");
        Self { ipc: Ipc::with_backend(mock.clone()), mock }
    }

    /// Counts the cost of an operation, with the jobs that it leaves to the worker.
    fn cost<T>(&self, operation: impl FnOnce() -> T) -> (Cost, T) {
        settle();
        let (driver, requests) = (self.mock.machine().counters(), counters().requests_total);
        let allocations = allocations_of_this_thread();
        let result = operation();
        let allocations = allocations_of_this_thread() - allocations;
        let requests = counters().requests_total - requests;
        // Work on a stream's own thread is not a call.
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

/// Asserts the allocations of a call that queues `jobs` jobs: the queue of the worker grows by a block now and then.
#[track_caller]
fn with_jobs(jobs: u64, allocations: u64, expected: u64) {
    assert!((expected..=expected + jobs).contains(&allocations), "{allocations} allocations, not {expected}");
}

/// A second process with its exports: two of each of its allocations.
fn exporter() -> (Process, Vec<Descriptor>) {
    let process = start(HERE, "exporter", &[]);
    let descriptors = (0..=EXPORTS).map(|_| process.line(|line| line.parse().ok())).collect();
    (process, descriptors)
}

#[test]
fn cost_of_export() {
    alone!();
    let counted = Counted::new();
    let ipc = &counted.ipc;
    let block = Arc::new(ipc.allocate(0, 4096).expect("memory"));
    // The poller, the socket and the tables.
    drop(ipc.share(Arc::new(ipc.allocate(0, 4096).expect("memory"))).start().expect("shared"));
    let (first, share) = counted.cost(|| ipc.share(block.clone()).start().expect("shared"));
    assert_eq!(first, cost(&[("range_of", 1), ("export", 1)], 0, 13), "the first of an allocation");
    let (second, another) = counted.cost(|| ipc.share(block.clone()).start().expect("shared"));
    assert_eq!(second, cost(&[], 0, 8), "another of an allocation that an export keeps");
    let (ended, ()) = counted.cost(|| drop((share, another)));
    assert_eq!(ended.requests, 0);
    // Each drop is a job.
    with_jobs(2, ended.allocations, 2);
}

#[test]
fn cost_of_open() {
    alone!();
    let counted = Counted::new();
    let ipc = &counted.ipc;
    let (process, exports) = exporter();
    // The link.
    let link = ipc.open(&exports[EXPORTS - 1]).at_home().expect("opened");
    let (first, mapping) = counted.cost(|| ipc.open(&exports[0]).at_home().expect("opened"));
    assert_eq!(first, cost(&[("range_of", 1), ("open", 1)], 1, 26), "the first open of an allocation");
    let (second, other) = counted.cost(|| ipc.open(&exports[1]).at_home().expect("opened"));
    assert_eq!(second, cost(&[], 1, 9), "another export of an allocation that is open");
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
fn drop_of_mapping_queues_no_job_unless_its_lease_ends() {
    alone!();
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
    // The first round begins after `settle`, which closes idle mappings.
    assert_eq!(one_after_the_other, (0, 0), "each the last of its lease");
    let used = || {
        let _ = open().range();
    };
    assert_eq!(jobs(&|| (0..10).for_each(|_| used())), (0, 0), "also of mappings whose address was used");
    let ended = jobs(&|| {
        used();
        settle();
    });
    // It is `settle`'s.
    assert_eq!(ended, (1, 1), "the device is waited for once, before the lease ends");
    let unused = jobs(&|| {
        drop(open());
        settle();
    });
    assert_eq!(unused, (1, 0), "no device work can have used it");
    process.finish();
}

#[test]
fn borrowed_memory_is_looked_up_for_each_export() {
    alone!();
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

#[test]
fn ready_event_is_queried_once() {
    alone!();
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
fn cost_of_release_on_stream() {
    alone!();
    let counted = Counted::new();
    let ipc = &counted.ipc;
    let (process, exports) = exporter();
    let stream = ipc.create_stream(0).expect("a stream");
    let mapping = ipc.open(&exports[0]).on(&stream).expect("opened");
    // The first work of a stream starts the mock's thread of the stream.
    ipc.open(&exports[0]).on(&stream).expect("opened").release(&stream).expect("released");
    let (again, second) = counted.cost(|| ipc.open(&exports[0]).on(&stream).expect("opened"));
    assert_eq!(again, cost(&[], 0, 0), "an export that is open, on a stream");
    let (released, ()) = counted.cost(|| second.release(&stream).expect("released"));
    // The worker asks whether the event has been reached as often as it likes.
    let submitted: Vec<_> =
        released.driver.into_iter().filter(|(name, _)| ["create_event", "record"].contains(name)).collect();
    assert_eq!(submitted, [("create_event", 1), ("record", 1)], "no wait, no synchronisation");
    assert_eq!(released.requests, 0);
    // Most of them are the mock's, for the event.
    with_jobs(1, released.allocations, 5);
    drop(mapping);
    settle();
    process.finish();
}

#[test]
fn cost_of_timeline() {
    alone!();
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
fn cost_of_descriptor() {
    alone!();
    let (process, exports) = exporter();
    let count = |operation: &dyn Fn()| {
        let before = allocations_of_this_thread();
        operation();
        allocations_of_this_thread() - before
    };
    let (bytes, text) = (exports[0].to_bytes(), exports[0].to_string());
    assert_eq!(count(&|| drop(exports[0].to_bytes())), 1, "one buffer");
    assert_eq!(count(&|| drop(Descriptor::from_bytes(&bytes))), 3, "the name, the address, the allocations");
    assert_eq!(count(&|| drop(text.parse::<Descriptor>())), 4, "and the bytes");
    process.finish();
}

/// The exports of the role `crowd`, and the objects whose memory is counted: many, so that the doubling of tables is averaged.
const CROWD: usize = 2002;
const COUNTED: usize = CROWD - 2;

#[test]
fn objects_take_few_bytes_and_two_threads() {
    alone!();
    let ipc = Counted::new().ipc;
    let block = Arc::new(ipc.allocate(0, 4096).expect("memory"));
    let share = || ipc.share(block.clone()).start().expect("shared");
    let open = |descriptor| ipc.open(descriptor).at_home().expect("opened");
    let bytes_of_each = |make: &mut dyn FnMut(usize)| {
        let before = Heap::now().bytes;
        (0..COUNTED).for_each(make);
        (Heap::now().bytes - before) as usize / COUNTED
    };
    let (mut exports, first) = (Vec::with_capacity(COUNTED), share());
    let export = size_of::<Export>() + bytes_of_each(&mut |_| exports.push(share()));
    let process = start(HERE, "crowd", &[]);
    let others: Vec<Descriptor> = (0..CROWD).map(|_| process.line(|line| line.parse().ok())).collect();
    // The connection, the range and the tables.
    let warm = [open(&others[COUNTED]), open(&others[COUNTED + 1])];
    let mut mappings = Vec::with_capacity(2 * COUNTED);
    let guard = size_of::<Mapping>();
    let with_lease = guard + bytes_of_each(&mut |index| mappings.push(open(&others[index])));
    let alone = guard + bytes_of_each(&mut |_| mappings.push(open(&others[0])));
    drop((mappings, warm));
    settle();
    let names = std::fs::read_dir("/proc/self/task").expect("/proc is there").flatten();
    let names = names.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    let threads = names.filter(|name| name.starts_with("device-ipc-")).count();
    drop((exports, first));
    process.finish();
    println!("{export} B for an export, {alone} B for a mapping, {with_lease} B with its lease");
    assert!(export <= 1024 && alone <= 128 && with_lease <= 512, "{export}, {alone}, {with_lease} B");
    assert_eq!(threads, 2, "the poller and the worker");
}

#[test]
#[ignore = "what the other tests start"]
fn role() {
    match role_name().as_str() {
        "exporter" => run_exporter(),
        "bundler" => run_bundler(),
        "crowd" => run_crowd(),
        "traced" => run_traced(),
        other => panic!("there is no role {other}"),
    }
}

fn run_crowd() {
    let ipc = Ipc::with_backend(MockBackend::from_spec("devices=1").expect("a machine"));
    let block = Arc::new(ipc.allocate(0, 4096).expect("memory"));
    let exports: Vec<_> = (0..CROWD).map(|_| ipc.share(block.clone()).start().expect("shared")).collect();
    exports.iter().for_each(|export| println!("{}", export.descriptor()));
    assert!(request().is_none(), "the test only closes the input");
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
    // A stream without work has no event.
    let gate = stream.gate().expect("the mock has timelines");
    let export = ipc.share(block).ready_on(&stream).start().expect("shared");
    gate.open();
    println!("{}", export.descriptor());
    exports.push(export);
    assert!(request().is_none(), "the test only closes the input");
}
