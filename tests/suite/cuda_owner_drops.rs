//! Owners of CUDA memory are dropped, and callbacks run, with the primary context of the memory's device current, whatever
//! thread drops them and whatever ends the export. Without a GPU each test says so and passes.

use std::io::BufRead as _;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use super::roles::{no_cuda, role as this_role, start};
use cudarc::driver::{CudaContext, result, sys};
use device_ipc::{
    Buffer, CopyPolicy, Descriptor, DeviceOwner, Dtype, Error, Ipc, Message, OwnedRegion, Region,
    ShareBuilder, TensorLayout, cuda, shutdown,
};
use device_ipc_test_process::Process;

const SOON: Duration = Duration::from_secs(30);
const BYTES: u64 = 1 << 20;
const ROUNDS: usize = 200;

#[test]
fn slices_of_the_default_stream_are_freed_after_release() {
    in_a_process("slices");
}

#[test]
fn owner_is_dropped_in_context_after_last_release() {
    in_a_process("last-release");
}

#[test]
fn owner_is_dropped_in_context_on_close_and_shutdown() {
    in_a_process("close-and-shutdown");
}

#[test]
fn owner_is_dropped_in_context_after_failed_share() {
    in_a_process("failed-share");
}

#[test]
fn owner_is_dropped_in_context_after_importer_is_killed() {
    in_a_process("killed-importer");
}

#[test]
fn owners_of_bundle_are_dropped_in_context() {
    in_a_process("bundle");
}

#[test]
fn owner_of_ring_is_dropped_in_context() {
    in_a_process("ring");
}

#[test]
fn owner_is_dropped_in_context_after_grant_ends() {
    in_a_process("grant");
}

#[test]
fn owner_is_dropped_in_context_after_staged_copy() {
    in_a_process("staged");
}

#[test]
fn owner_that_panics_in_drop_holds_up_nothing() {
    in_a_process("panic");
}

#[test]
fn callbacks_run_in_context() {
    in_a_process("callbacks");
}

#[test]
fn owner_drop_on_capturing_thread_keeps_the_capture() {
    in_a_process("capture");
}

fn in_a_process(role: &str) {
    match no_cuda() {
        Some(reason) => eprintln!("skipped: {reason}"),
        None => start(module_path!(), role, &[]).finish(),
    }
}

#[test]
#[ignore = "a role of the tests above"]
fn role() {
    match this_role().as_str() {
        "slices" => hand_slices_over(),
        "last-release" => last_release(),
        "close-and-shutdown" => close_and_shutdown(),
        "failed-share" => failed_share(),
        "killed-importer" => killed_importer(),
        "bundle" => bundle(),
        "ring" => ring(),
        "grant" => grant(),
        "staged" => staged(),
        "panic" => panic_in_drop(),
        "callbacks" => callbacks(),
        "capture" => capture(),
        "importer" => import(),
        "exporter" => export_until_told(),
        other => panic!("no such role: {other}"),
    }
}

/// The address of a context, which threads exchange.
type Context = usize;

fn current() -> Context {
    result::ctx::get_current().expect("the driver works").map_or(0, |context| context.addr())
}

/// An owner of device memory that reports which context is current while it is dropped.
struct Witness {
    seen: Sender<Context>,
    memory: Buffer,
}

impl Drop for Witness {
    fn drop(&mut self) {
        let _ = self.seen.send(current());
    }
}

// SAFETY: the buffer is freed after the witness.
unsafe impl DeviceOwner for Witness {
    fn region(&self) -> Region {
        self.memory.region()
    }
}

/// A process that shares memory of device 0, and a second process that opens it.
struct Pair {
    ipc: Ipc,
    context: Arc<CudaContext>,
    importer: Process,
    seen: Receiver<Context>,
    sender: Sender<Context>,
}

impl Pair {
    fn new() -> Self {
        let context = CudaContext::new(0).expect("a context");
        let (sender, seen) = channel();
        let ipc = Ipc::named("cuda").expect("a driver");
        Self { ipc, context, importer: start(module_path!(), "importer", &[]), seen, sender }
    }

    fn primary(&self) -> Context {
        self.context.cu_ctx().addr()
    }

    fn witness(&self) -> Witness {
        self.witness_on(0)
    }

    fn witness_on(&self, device: u32) -> Witness {
        Witness { seen: self.sender.clone(), memory: self.ipc.allocate(device, BYTES).expect("memory") }
    }

    fn share(&self) -> ShareBuilder<'_, Witness> {
        self.ipc.share(self.witness())
    }

    /// Has the importer do something, and waits until it has.
    fn importer(&mut self, command: &str) {
        self.importer.send(command);
        self.importer.line(|line| line.ends_with("done").then_some(()));
    }

    /// So many owners are dropped, or callbacks called, each with the primary context current.
    #[track_caller]
    fn expect(&self, count: usize) {
        for index in 0..count {
            let seen = self.seen.recv_timeout(SOON);
            assert_eq!(seen, Ok(self.primary()), "the context that number {index} of {count} saw");
        }
        assert!(self.seen.try_recv().is_err(), "no more than {count}");
    }

    fn finish(self) {
        self.importer.finish();
    }
}

/// Does what each line asks for, and says so.
fn import() {
    let ipc = Ipc::named("cuda").expect("a driver");
    let (mut mappings, mut bundles, mut readers, mut channels) = (vec![], vec![], vec![], vec![]);
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let (command, argument) = line.split_once(' ').unwrap_or((&line, ""));
        match command {
            "open" => {
                let descriptor: Descriptor = argument.parse().expect("a descriptor");
                mappings.push(ipc.open(&descriptor).at_home().expect("opened"));
            }
            "stage" => {
                let descriptor: Descriptor = argument.parse().expect("a descriptor");
                mappings.push(
                    ipc.open(&descriptor).copy(CopyPolicy::StagedIfNeeded).on_device(1).expect("copied"),
                );
                assert!(mappings[0].is_copy());
            }
            "open-bundle" => {
                let descriptor: Descriptor = argument.parse().expect("a descriptor");
                bundles.push(ipc.open(&descriptor).at_home().expect("opened"));
            }
            "join" => {
                let descriptor: Descriptor = argument.parse().expect("a descriptor");
                readers.push(ipc.open_ring(&descriptor).at_home().expect("joined"));
            }
            "connect" => channels.push(ipc.connect(argument).timeout(SOON).start().expect("connected")),
            "receive" => drop(channels[0].receive(SOON).expect("a message")),
            "release" => {
                mappings.clear();
                bundles.clear();
                readers.clear();
                channels.clear();
                device_ipc::close_unused(SOON).expect("closed");
            }
            other => panic!("no such command: {other}"),
        }
        println!("\ndone");
    }
}

/// cudarc frees a slice of the default stream with whatever context is current; without one the driver refuses, the memory
/// leaks, and the next call of cudarc reports the error.
fn hand_slices_over() {
    cuda::make_pool_shareable(0).expect("a pool that can be shared");
    let mut pair = Pair::new();
    // No other stream: with one, cudarc waits for events first, and makes its context current for that.
    let context = Arc::clone(&pair.context);
    let stream = context.default_stream();
    let mut free_before = 0;
    for round in 0..ROUNDS {
        let slice = stream.alloc_zeros::<u8>(BYTES as usize);
        let slice = slice.unwrap_or_else(|error| panic!("round {round}: {error:?}"));
        let export = pair.ipc.share(slice).ready_on(&stream).start();
        let export = export.unwrap_or_else(|error| panic!("round {round}: {error}"));
        pair.importer(&format!("open {}", export.descriptor()));
        pair.importer("release");
        export.wait_released(SOON).expect("released");
        export.close(SOON).expect("closed");
        context
            .check_err()
            .unwrap_or_else(|error| panic!("an error was recorded in round {round}: {error:?}"));
        if round == 10 {
            stream.synchronize().expect("idle");
            free_before = result::mem_get_info().expect("the driver works").0;
        }
    }
    stream.synchronize().expect("idle");
    let free = result::mem_get_info().expect("the driver works").0;
    // A slice that stays in each round is 189 MiB; pools grow by 32 MiB at a time.
    let lost = free_before.saturating_sub(free);
    assert!(lost < 64 << 20, "{lost} B of device memory are lost after {ROUNDS} hand-overs of {BYTES} B");
    pair.finish();
}

fn last_release() {
    let mut pair = Pair::new();
    let export = pair.share().start().expect("shared");
    pair.importer(&format!("open {}", export.descriptor()));
    drop(export);
    assert!(pair.seen.try_recv().is_err(), "the importer has it open");
    pair.importer("release");
    pair.expect(1);
    pair.finish();
}

fn close_and_shutdown() {
    let pair = Pair::new();
    pair.share().start().expect("shared").close(SOON).expect("closed");
    pair.expect(1);
    let export = pair.share().start().expect("shared");
    shutdown(SOON).expect("nothing is open");
    pair.expect(1);
    drop(export);
    pair.finish();
}

/// The owner is dropped on the caller's thread, whose own context is the same afterwards.
fn failed_share() {
    let pair = Pair::new();
    let foreign = {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one context, for a device that there is.
        unsafe { sys::cuCtxCreate_v4(&raw mut context, std::ptr::null_mut(), 0, 0) }
            .result()
            .expect("a context of its own");
        context
    };
    for current_before in [std::ptr::null_mut(), foreign] {
        // SAFETY: none, or a context that lives.
        unsafe { result::ctx::set_current(current_before) }.expect("the driver works");
        let before = current();
        drop(pair.share());
        pair.expect(1);
        drop(pair.share().shape([1 << 40]).dtype(Dtype::F32).start().expect_err("too large"));
        pair.expect(1);
        let failed = pair.share().shape([1 << 40]).dtype(Dtype::F32).start();
        drop(Error::from(failed.expect_err("too large")));
        pair.expect(1);
        drop(pair.ipc.ring(pair.witness()).slots(0).start().expect_err("no slots"));
        pair.expect(1);
        let mut bundle = pair.ipc.tensors();
        drop(bundle.owned("x", pair.witness(), None).expect_err("it has no element type"));
        pair.expect(1);
        bundle.memory(pair.witness());
        bundle.memory(pair.witness());
        drop(pair.ipc.share_all(bundle).start().expect_err("it has no tensors"));
        pair.expect(2);
        let owner =
            pair.share().shape([1 << 40]).dtype(Dtype::F32).start().expect_err("too large").into_inner();
        assert!(pair.seen.try_recv().is_err(), "the caller has it");
        drop(pair.ipc.share(owner));
        pair.expect(1);
        assert_eq!(current(), before, "the caller's context");
    }
    pair.finish();
}

fn killed_importer() {
    let mut pair = Pair::new();
    let export = pair.share().start().expect("shared");
    pair.importer(&format!("open {}", export.descriptor()));
    drop(export);
    pair.importer.kill();
    pair.expect(1);
}

fn bundle() {
    let mut pair = Pair::new();
    let mut bundle = pair.ipc.tensors();
    let layout = TensorLayout::contiguous(Dtype::U8, [BYTES]).expect("a layout");
    for name in ["a", "b"] {
        bundle.owned(name, pair.witness(), Some(layout.clone())).expect("it fits");
    }
    // An owner of another type.
    let (witness, region) = (pair.witness(), pair.ipc.allocate(0, BYTES).expect("memory"));
    let range = region.region();
    // SAFETY: the buffer is dropped with the pair.
    let owned = unsafe { OwnedRegion::new((witness, region), range) };
    bundle.owned("c", owned, Some(layout.clone())).expect("it fits");
    let mut expected = vec![pair.primary(); 3];
    if pair.ipc.devices().expect("devices").len() > 1 {
        bundle.owned("d", pair.witness_on(1), Some(layout)).expect("it fits");
        expected.push(CudaContext::new(1).expect("a context").cu_ctx().addr());
    }
    let export = pair.ipc.share_all(bundle).start().expect("shared");
    let descriptor = export.descriptor().to_string();
    pair.importer(&format!("open-bundle {descriptor}"));
    drop(export);
    assert!(pair.seen.try_recv().is_err(), "the importer has it open");
    pair.importer("release");
    let mut seen: Vec<_> = expected.iter().map(|_| pair.seen.recv_timeout(SOON).expect("dropped")).collect();
    seen.sort_unstable();
    expected.sort_unstable();
    assert_eq!(seen, expected, "each owner sees the context of its device");
    assert!(pair.seen.try_recv().is_err(), "each is dropped once");
    pair.finish();
}

fn ring() {
    let mut pair = Pair::new();
    let ring = pair.ipc.ring(pair.witness()).start().expect("a ring");
    let descriptor = ring.descriptor().to_string();
    pair.importer(&format!("join {descriptor}"));
    drop(ring);
    pair.importer("release");
    pair.expect(1);
    pair.finish();
}

/// The receiver of a message drops it and has not opened the export, whose guard is gone.
fn grant() {
    let mut pair = Pair::new();
    let name = format!("owner-drops-{}", std::process::id());
    let listener = pair.ipc.listen(&name).start().expect("it listens");
    pair.importer.send(&format!("connect {name}"));
    let channel = listener.accept(SOON).expect("the importer connects");
    pair.importer.line(|line| line.ends_with("done").then_some(()));
    let export = pair.share().start().expect("shared");
    channel.send(Message::new().export(&export), SOON).expect("sent");
    drop(export);
    assert!(pair.seen.try_recv().is_err(), "it may still be opened");
    pair.importer("receive");
    pair.expect(1);
    // The same where the receiver ends the channel and never reads the message.
    let export = pair.share().start().expect("shared");
    channel.send(Message::new().export(&export), SOON).expect("sent");
    drop((export, channel));
    pair.importer("release");
    pair.expect(1);
    pair.finish();
}

/// Through the host, to a device that cannot reach the memory.
fn staged() {
    let mut pair = Pair::new();
    if pair.ipc.devices().expect("devices").len() < 2
        || pair.ipc.backend().peer_access(1.into(), 0.into()).expect("known")
    {
        eprintln!("there are no two devices without peer access");
        return pair.finish();
    }
    let export = pair.share().start().expect("shared");
    pair.importer(&format!("stage {}", export.descriptor()));
    drop(export);
    pair.importer("release");
    pair.expect(1);
    pair.finish();
}

fn panic_in_drop() {
    struct Panicking {
        _witness: Witness,
    }

    impl Drop for Panicking {
        fn drop(&mut self) {
            // Left current, as by a drop that returns early.
            // SAFETY: none.
            unsafe { result::ctx::set_current(std::ptr::null_mut()) }.expect("the driver works");
            panic!("this panic is part of the test");
        }
    }

    let pair = Pair::new();
    for _ in 0..2 {
        let witness = pair.witness();
        let region = witness.region();
        // SAFETY: the witness keeps the memory.
        let owner = unsafe { OwnedRegion::new(Panicking { _witness: witness }, region) };
        pair.ipc.share(owner).start().expect("shared").close(SOON).expect("closed");
        assert_eq!(device_ipc::counters().exports, 0);
        // The witness is dropped while its owner unwinds, without the context that it took away.
        assert_eq!(pair.seen.recv_timeout(SOON), Ok(0));
        pair.share().start().expect("shared").close(SOON).expect("closed");
        pair.expect(1);
    }
    pair.finish();
}

fn callbacks() {
    let mut pair = Pair::new();
    let export = pair.share().start().expect("shared");
    let (seen, called) = channel();
    // Captured values are dropped in the context too.
    let captured = pair.witness();
    export.on_change(move || {
        let _ = (&captured, seen.send(current()));
    });
    pair.importer(&format!("open {}", export.descriptor()));
    assert_eq!(called.recv_timeout(SOON), Ok(pair.primary()), "the context of on_change");
    pair.importer("release");
    assert_eq!(called.recv_timeout(SOON), Ok(pair.primary()), "the context of on_change");
    export.close(SOON).expect("closed");
    // The captured owner, and that of the memory.
    pair.expect(2);

    let mut exporter = start(module_path!(), "exporter", &[]);
    let descriptor: Descriptor = exporter.line(|line| line.parse().ok());
    let mapping = pair.ipc.open(&descriptor).at_home().expect("opened");
    let (seen, captured) = (pair.sender.clone(), pair.witness());
    mapping.on_gone(move |_| {
        let _ = (&captured, seen.send(current()));
    });
    let unused = pair.witness();
    let other = pair.ipc.open(&descriptor).at_home().expect("opened");
    other.on_gone(move |_| drop(unused));
    drop(other);
    // A callback that is not called.
    pair.expect(1);
    exporter.kill();
    // The call, and the owner that the callback captured.
    pair.expect(2);
    drop(mapping);
    pair.finish();
}

fn export_until_told() {
    let ipc = Ipc::named("cuda").expect("a driver");
    let export = ipc.share(ipc.allocate(0, BYTES).expect("memory")).start().expect("shared");
    println!("\n{}", export.descriptor());
    let _ = std::io::stdin().lock().lines().next();
}

/// A thread that captures in the strictest mode drops an owner.
fn capture() {
    let pair = Pair::new();
    let (builder, buffer) = (pair.share(), pair.ipc.allocate(0, BYTES).expect("memory"));
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    let stream = pair.context.new_stream().expect("a stream");
    stream.begin_capture(mode).expect("a capture begins");
    drop(builder);
    drop(pair.ipc.share(buffer));
    let other = std::thread::spawn({
        let ipc = pair.ipc.clone();
        let witness = pair.witness();
        move || drop(ipc.share(witness))
    });
    other.join().expect("it ends");
    // SAFETY: the stream lives, and this thread began the capture.
    let graph = unsafe { result::stream::end_capture(stream.cu_stream()) }.expect("the capture is intact");
    // SAFETY: of the capture, and used nowhere else.
    unsafe { sys::cuGraphDestroy(graph) }.result().expect("destroyed");
    pair.expect(2);
    pair.finish();
}
