//! Streams of one process: asynchronous work, failures, faults and counters.

use std::sync::mpsc;
use std::time::Duration;

use super::support::{DEADLINE, code, machine};
use device_ipc_mock_engine::{EngineError, Machine, MachineConfig, Operation};

#[test]
fn work_runs_after_submission() {
    let ours = Machine::new(MachineConfig { latency: Duration::from_millis(20), ..MachineConfig::default() });
    let stream = ours.create_stream(0).unwrap();
    let block = ours.allocate(0, 4).unwrap();
    ours.fill(block, 4, 1, stream).unwrap();
    assert_eq!(ours.query(stream), Ok(false));
    ours.synchronize(stream).unwrap();
    assert_eq!(ours.query(stream), Ok(true));
    assert_eq!(ours.read_to_host(block, 4, stream).unwrap(), [1; 4]);
}

#[test]
fn work_runs_in_order_and_host_bytes_are_read_at_submission() {
    let ours = machine("");
    let stream = ours.default_stream(0).unwrap();
    assert_eq!(ours.default_stream(0), Ok(stream));
    assert!(matches!(ours.destroy_stream(stream), Err(EngineError::InvalidValue { .. })));
    let (first, second) = (ours.allocate(0, 16).unwrap(), ours.allocate(1, 16).unwrap());
    let mut bytes: Vec<u8> = [1.5_f32, 2.0, -1.0, 0.0].iter().flat_map(|value| value.to_ne_bytes()).collect();
    ours.write_from_host(first, &bytes, stream).unwrap();
    bytes.fill(0);
    ours.add_f32(first, 4, 0.5, stream).unwrap();
    ours.copy(second, first, 16, stream).unwrap();
    ours.fill(first, 16, 0, stream).unwrap();
    let (send, receive) = mpsc::channel();
    ours.read_then(second, 4, stream, move |bytes| send.send(bytes).unwrap()).unwrap();
    assert_eq!(receive.recv_timeout(DEADLINE).unwrap(), 2.0_f32.to_ne_bytes());
    assert_eq!(ours.read_to_host(second.add(12), 4, stream).unwrap(), 0.5_f32.to_ne_bytes());
}

#[test]
fn free_waits_for_streams_of_device() {
    let ours = machine("");
    let (stream, rescue) = (ours.create_stream(0).unwrap(), ours.create_stream(0).unwrap());
    let (gate, block) = (ours.allocate(1, 8).unwrap(), ours.allocate(0, 8).unwrap());
    ours.wait_value64(stream, gate, 1).unwrap();
    let (send, receive) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ours.free(block).unwrap();
            send.send(()).unwrap();
        });
        assert!(receive.recv_timeout(Duration::from_millis(50)).is_err(), "it waits");
        assert!(ours.range_of(block).is_ok());
        let other = ours.allocate(0, 8).unwrap();
        assert_ne!(other, block, "allocating does not wait");
        ours.write_value64(rescue, gate, 1).unwrap();
        receive.recv_timeout(DEADLINE).unwrap();
    });
    assert!(ours.range_of(block).is_err());
}

#[test]
fn free_waits_for_destroyed_stream() {
    let ours = machine("");
    let (stream, rescue) = (ours.create_stream(0).unwrap(), ours.create_stream(1).unwrap());
    let (gate, block) = (ours.allocate(1, 8).unwrap(), ours.allocate(0, 8).unwrap());
    ours.wait_value64(stream, gate, 1).unwrap();
    ours.fill(block, 8, 1, stream).unwrap();
    ours.destroy_stream(stream).unwrap();
    assert_eq!(ours.query(stream), Err(EngineError::InvalidStream { stream: stream.get() }));
    ours.write_value64(rescue, gate, 1).unwrap();
    ours.free(block).unwrap();
    ours.synchronize_device(0).unwrap();
}

#[test]
fn failure_drops_later_work_until_taken() {
    let ours = machine("");
    let stream = ours.create_stream(0).unwrap();
    let block = ours.allocate(0, 8).unwrap();
    ours.inject(Operation::Run, 2, 700);
    ours.fill(block, 8, 1, stream).unwrap();
    ours.fill(block, 8, 2, stream).unwrap();
    ours.fill(block, 8, 3, stream).unwrap();
    let injected = EngineError::Injected { operation: Operation::Run, code: 700 };
    assert_eq!(ours.synchronize(stream), Err(injected.clone()));
    assert_eq!(ours.read_to_host(block, 1, stream).unwrap(), [1]);

    ours.inject(Operation::Run, 1, 700);
    assert_eq!(ours.read_to_host(block, 1, stream), Err(injected));
    ours.synchronize(stream).unwrap();
}

/// Blocks the thread that drops it until the sender is dropped.
struct SlowToDrop(mpsc::Receiver<()>);

impl Drop for SlowToDrop {
    fn drop(&mut self) {
        let _ = self.0.recv_timeout(DEADLINE);
    }
}

#[test]
fn work_queued_before_failure_was_taken_is_dropped() {
    let ours = machine("fault=run:1");
    let stream = ours.create_stream(0).unwrap();
    let block = ours.allocate(0, 8).unwrap();
    let (release, held) = mpsc::channel();
    let slow = SlowToDrop(held);
    ours.fill(block, 8, 1, stream).unwrap();
    ours.host_fn(Box::new(move || drop(slow)), stream).unwrap();
    ours.fill(block, 8, 2, stream).unwrap();
    while ours.query(stream).is_ok() {
        std::thread::yield_now();
    }
    drop(release);
    ours.synchronize(stream).unwrap();
    assert_eq!(ours.read_to_host(block, 8, stream).unwrap(), [0; 8]);
}

#[test]
fn kernel_access_requires_peer_access() {
    let ours = machine("peers=0>1");
    let (on_zero, on_one) = (ours.allocate(0, 8).unwrap(), ours.allocate(1, 8).unwrap());
    let (zero, one) = (ours.create_stream(0).unwrap(), ours.create_stream(1).unwrap());
    ours.add_u8(on_one, 8, 1, zero).unwrap();
    ours.synchronize(zero).unwrap();
    ours.add_u8(on_zero, 8, 1, one).unwrap();
    assert_eq!(ours.synchronize(one), Err(EngineError::IllegalAddress { address: on_zero, device: 1 }));
    ours.copy(on_zero, on_one, 8, one).unwrap();
    assert_eq!(ours.read_to_host(on_zero, 8, one).unwrap(), [1; 8], "copies are staged");
}

#[test]
fn queued_work_on_freed_memory_fails() {
    let ours = machine("");
    let (gate, block) = (ours.allocate(1, 8).unwrap(), ours.allocate(0, 8).unwrap());
    let (stream, rescue) = (ours.create_stream(1).unwrap(), ours.create_stream(1).unwrap());
    ours.wait_value64(stream, gate, 1).unwrap();
    ours.fill(block, 8, 1, stream).unwrap();
    ours.free(block).unwrap();
    ours.write_value64(rescue, gate, 1).unwrap();
    assert_eq!(ours.synchronize(stream), Err(EngineError::IllegalAddress { address: block, device: 1 }));
}

#[test]
fn invalid_arguments_fail_at_submission() {
    let ours = machine("");
    let stream = ours.create_stream(0).unwrap();
    let block = ours.allocate(0, 100).unwrap();
    let beyond = EngineError::OutOfRange { address: block.add(96), len: 8, base: block, size: 100 };
    assert_eq!(ours.fill(block.add(96), 8, 0, stream), Err(beyond));
    assert_eq!(ours.copy(block, block.add(100), 1, stream).map_err(|error| error.code()), Err(4));
    assert!(ours.fill(block, u64::MAX, 0, stream).is_err());
    assert!(ours.add_f32(block, u64::MAX / 2, 0.0, stream).is_err());
    assert!(matches!(ours.fill(block, 0, 0, stream), Err(EngineError::InvalidValue { .. })));
    let odd = block.add(2);
    assert_eq!(
        ours.add_f32(odd, 1, 0.0, stream),
        Err(EngineError::Misaligned { address: odd, alignment: 4 })
    );
    let odd = block.add(4);
    assert_eq!(
        ours.wait_value64(stream, odd, 0),
        Err(EngineError::Misaligned { address: odd, alignment: 8 })
    );
    assert!(matches!(ours.create_stream(2), Err(EngineError::InvalidDevice { ordinal: 2, count: 2 })));
    let event = ours.create_event(1, false).unwrap();
    assert!(matches!(ours.record(event, stream), Err(EngineError::InvalidValue { .. })));
    ours.destroy_event(event).unwrap();
    assert_eq!(ours.wait(stream, event), Err(EngineError::InvalidEvent { event: event.get() }));
}

#[test]
fn host_function_cannot_wait_and_its_panic_fails_stream() {
    let ours = machine("");
    let stream = ours.create_stream(0).unwrap();
    let block = ours.allocate(0, 8).unwrap();
    let (send, receive) = mpsc::channel();
    let inside = ours.clone();
    let calls = move || {
        let codes = [
            code(inside.free(block)),
            code(inside.synchronize(stream)),
            code(inside.read_to_host(block, 1, stream)),
        ];
        send.send(codes).unwrap();
    };
    ours.host_fn(Box::new(calls), stream).unwrap();
    assert_eq!(receive.recv_timeout(DEADLINE).unwrap(), [24; 3]);
    ours.synchronize(stream).unwrap();
    ours.host_fn(Box::new(|| panic!("on purpose")), stream).unwrap();
    assert_eq!(ours.synchronize(stream), Err(EngineError::HostFunctionPanicked));
}

#[test]
fn fault_fails_nth_call_once() {
    let ours = machine("fault=allocate:2:-3,query:1");
    let before = ours.counters();
    let block = ours.allocate(0, 8).unwrap();
    let injected = |operation, code| EngineError::Injected { operation, code };
    assert_eq!(ours.allocate(0, 8), Err(injected(Operation::Allocate, -3)));
    assert!(ours.allocate(0, 8).is_ok());
    let stream = ours.create_stream(0).unwrap();
    assert_eq!(ours.query(stream), Err(injected(Operation::Query, 1)));
    let event = ours.create_event(0, false).unwrap();
    for operation in [Operation::Copy, Operation::Record, Operation::Synchronize] {
        ours.inject(operation, 1, 9);
        let result = match operation {
            Operation::Copy => ours.copy(block, block, 8, stream),
            Operation::Record => ours.record(event, stream),
            _ => ours.synchronize(stream),
        };
        assert_eq!(result, Err(injected(operation, 9)));
    }
    let calls = ours.counters().since(&before);
    assert_eq!(calls.get(Operation::Allocate), 3);
    assert_eq!(calls.get(Operation::CreateEvent), 1);
    assert_eq!(calls.get(Operation::Open), 0);
    assert_eq!(calls.iter().map(|(_, calls)| calls).sum::<u64>(), 9);
}

#[test]
fn machine_drop_cancels_waiting_streams() {
    let ours = machine("");
    let stream = ours.create_stream(0).unwrap();
    let block = ours.allocate(0, 8).unwrap();
    ours.wait_value64(stream, block, 1).unwrap();
    let (send, receive) = mpsc::channel::<()>();
    ours.host_fn(Box::new(move || send.send(()).unwrap()), stream).unwrap();
    drop(ours);
    assert_eq!(receive.recv_timeout(DEADLINE), Err(mpsc::RecvTimeoutError::Disconnected), "dropped unrun");
}

#[test]
fn stream_thread_starts_with_first_work() {
    let threads = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let name =
            |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        tasks.map(name).filter(|name| name == "mock-stream-123\n").count()
    };
    let ours = machine("");
    let stream = (0..200).map(|_| ours.create_stream(0).unwrap()).find(|stream| stream.get() == 123).unwrap();
    assert_eq!(threads(), 0);
    let event = ours.create_event(0, false).unwrap();
    ours.record(event, stream).unwrap();
    // A thread has its name only once it runs.
    ours.synchronize(stream).unwrap();
    assert_eq!(threads(), 1);
}

#[test]
fn calls_in_forked_child_fail() {
    unsafe extern "C" {
        fn fork() -> i32;
        fn _exit(code: i32) -> !;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
    }
    let ours = machine("");
    let block = ours.allocate(0, 8).unwrap();
    // SAFETY: the child makes calls that return before they take a lock, drops nothing, and leaves.
    let pid = unsafe { fork() };
    if pid == 0 {
        let refused = ours.free(block) == Err(EngineError::Forked)
            && ours.allocate(0, 8) == Err(EngineError::Forked)
            && ours.create_event(0, true) == Err(EngineError::Forked);
        // The drop of the machine must not change the parent's memory or this child.
        drop(ours);
        // SAFETY: exits the child without running the parent's exit handlers.
        unsafe { _exit(i32::from(!refused)) };
    }
    let mut status = -1;
    // SAFETY: waits for our own child, which exits.
    assert_eq!(unsafe { waitpid(pid, &raw mut status, 0) }, pid);
    assert_eq!(status, 0);
    let stream = ours.create_stream(0).unwrap();
    assert_eq!(ours.read_to_host(block, 8, stream).unwrap(), [0; 8]);
}

#[test]
fn word_wait_compares_and_replaces() {
    let machine = machine("devices=1");
    let (waiter, writer) =
        (machine.create_stream(0).expect("a stream"), machine.create_stream(0).expect("a stream"));
    let word = machine.allocate(0, 8).expect("memory");
    let read = || machine.read_to_host(word, 8, writer).expect("read");
    machine.wait_word(waiter, word, |value| value & 6 == 4, Some(0), None).expect("queued");
    for value in [1, 6, 2] {
        machine.write_value64(writer, word, value).expect("queued");
        machine.synchronize(writer).expect("written");
        assert_eq!(machine.query(waiter), Ok(false), "{value} is not what it waits for");
    }
    machine.write_value64(writer, word, 5).expect("queued");
    machine.synchronize(waiter).expect("the word came");
    assert_eq!(read(), [0; 8], "it was taken");
    machine
        .wait_word(waiter, word, |value| value == 1, None, Some(Duration::from_millis(5)))
        .expect("queued");
    assert_eq!(machine.synchronize(waiter), Err(EngineError::TimedOut));
}

#[test]
fn discard_queued_drops_work_and_stream_continues() {
    let machine = machine("devices=1");
    let stream = machine.create_stream(0).expect("a stream");
    let block = machine.allocate(0, 1).expect("memory");
    let (go, wait) = mpsc::channel::<()>();
    let (started, running) = mpsc::channel();
    let hold = move || {
        started.send(()).expect("the test waits");
        wait.recv_timeout(DEADLINE).expect("the test sends");
    };
    machine.host_fn(Box::new(hold), stream).expect("queued");
    machine.fill(block, 1, 1, stream).expect("queued");
    // Work that has not started yet would be dropped too.
    running.recv_timeout(DEADLINE).expect("the host function runs");
    machine.discard_queued(stream).expect("the stream exists");
    go.send(()).expect("the host function waits");
    machine.synchronize(stream).expect("nothing failed");
    assert_eq!(machine.read_to_host(block, 1, stream), Ok(vec![0]));
}
