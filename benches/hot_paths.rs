//! Microbenchmarks of the hot paths on the mock: `cargo bench -p device-ipc-bench`.
//!
//! The program `device-ipc-bench` compares them with a vendor's own calls.

use std::cell::Cell;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use device_ipc::mock::MockBackend;
use device_ipc::{Buffer, Descriptor, Dtype, Export, Ipc, Mapping, TensorLayout};
use divan::Bencher;

/// The variable that makes this program run as the exporter.
const EXPORTER: &str = "DEVICE_IPC_BENCH_EXPORTER";

const BYTES: u64 = 1 << 20;

/// Number of exports of the exporter process.
const EXPORTS: usize = 1000;

fn main() {
    if std::env::var_os(EXPORTER).is_some() {
        return export();
    }
    let (mut exporter, descriptors) = start_exporter();
    DESCRIPTORS.set(descriptors).expect("set once");
    divan::main();
    stop(&mut exporter);
}

/// Stops the exporter by closing its standard input.
fn stop(exporter: &mut Child) {
    drop(exporter.stdin.take());
    exporter.wait().expect("waiting for the exporter");
}

static DESCRIPTORS: OnceLock<Vec<Descriptor>> = OnceLock::new();

fn descriptors() -> &'static [Descriptor] {
    DESCRIPTORS.get().expect("set by main")
}

fn descriptor() -> &'static Descriptor {
    &descriptors()[0]
}

/// Returns the entry point of this process.
fn ipc() -> &'static Ipc {
    static IPC: OnceLock<Ipc> = OnceLock::new();
    IPC.get_or_init(|| Ipc::with_backend(MockBackend::from_spec("devices=1").expect("a machine")))
}

/// Returns a mapping that keeps the export open between measurements.
fn open() -> &'static Mapping {
    static OPEN: OnceLock<Mapping> = OnceLock::new();
    OPEN.get_or_init(|| ipc().open(descriptor()).at_home().expect("opened"))
}

fn block() -> &'static Arc<Buffer> {
    static BLOCK: OnceLock<Arc<Buffer>> = OnceLock::new();
    BLOCK.get_or_init(|| Arc::new(ipc().allocate(0, BYTES).expect("memory")))
}

#[divan::bench]
fn share(bencher: Bencher<'_, '_>) {
    // The handle of the allocation exists, as when further parts of it are shared.
    let first = ipc().share(Arc::clone(block())).start().expect("shared");
    bencher.bench(|| ipc().share(Arc::clone(block())).start().expect("shared"));
    drop(first);
}

#[divan::bench(threads = [1, 8])]
fn open_again(bencher: Bencher<'_, '_>) {
    open();
    bencher.bench(|| ipc().open(descriptor()).at_home().expect("opened"));
}

#[divan::bench(threads = [1, 8])]
fn open_again_and_drop(bencher: Bencher<'_, '_>) {
    open();
    bencher.bench(|| drop(ipc().open(descriptor()).at_home().expect("opened")));
}

/// The lease becomes idle each time and is re-used.
#[divan::bench]
fn open_idle_and_drop(bencher: Bencher<'_, '_>) {
    let descriptor = &descriptors()[EXPORTS - 1];
    bencher.bench(|| drop(ipc().open(descriptor).at_home().expect("opened")));
}

/// Opens a number of exports in turn, all of which are open already.
#[divan::bench(args = [16, EXPORTS - 1], threads = [1, 8])]
fn open_again_in_turn(bencher: Bencher<'_, '_>, exports: usize) {
    let open = |descriptor| ipc().open(descriptor).at_home().expect("opened");
    let kept: Vec<Mapping> = descriptors()[..exports].iter().map(open).collect();
    let turn = AtomicUsize::new(0);
    bencher
        .with_inputs(|| &descriptors()[turn.fetch_add(1, Ordering::Relaxed) % exports])
        .bench_values(|descriptor| drop(open(descriptor)));
    drop(kept);
}

#[divan::bench]
fn release(bencher: Bencher<'_, '_>) {
    let stream = ipc().create_stream(0).expect("a stream");
    open();
    bencher
        .with_inputs(|| ipc().open(descriptor()).at_home().expect("opened"))
        .bench_values(|mapping| mapping.release(&stream).expect("released"));
}

#[divan::bench]
fn descriptor_to_bytes(bencher: Bencher<'_, '_>) {
    bencher.bench(|| descriptor().to_bytes());
}

#[divan::bench]
fn descriptor_from_bytes(bencher: Bencher<'_, '_>) {
    let bytes = descriptor().to_bytes();
    bencher.bench(|| Descriptor::from_bytes(&bytes).expect("valid"));
}

#[divan::bench]
fn descriptor_to_text(bencher: Bencher<'_, '_>) {
    bencher.bench(|| descriptor().to_string());
}

#[divan::bench]
fn descriptor_from_text(bencher: Bencher<'_, '_>) {
    let text = descriptor().to_string();
    bencher.bench(|| text.parse::<Descriptor>().expect("valid"));
}

/// Numbers of tensors in a bundle, all in one allocation.
const TENSORS: [u64; 2] = [1000, 10_000];

/// Exports a bundle of tensors of 64 B.
fn bundle(tensors: u64) -> Export {
    bundle_of(tensors, 16)
}

/// Exports a bundle of tensors with this number of elements.
fn bundle_of(tensors: u64, elements: u64) -> Export {
    let mut bundle = ipc().tensors();
    let memory = bundle.memory(Arc::clone(block()));
    for index in 0..tensors {
        let layout = TensorLayout::contiguous(Dtype::F32, [elements]).expect("a layout");
        bundle.tensor(format!("layer.{index}.weight"), memory, index * 64, layout).expect("it fits");
    }
    ipc().share_all(bundle).start().expect("shared")
}

/// Shares the same tensors each time.
#[divan::bench(args = TENSORS)]
fn bundle_share(bencher: Bencher<'_, '_>, tensors: u64) {
    let first = bundle(1);
    bencher.bench(|| bundle(tensors));
    drop(first);
}

/// Shares tensors that differ from the last 15 bundles.
#[divan::bench(args = TENSORS)]
fn bundle_share_others(bencher: Bencher<'_, '_>, tensors: u64) {
    let first = bundle(1);
    let elements = Cell::new(0);
    bencher.bench_local(|| {
        elements.set(elements.get() % 16 + 1);
        bundle_of(tensors, elements.get())
    });
    drop(first);
}

/// Shares the same 500 allocations each time, with one tensor in each.
#[divan::bench]
fn bundle_share_many_allocations(bencher: Bencher<'_, '_>) {
    let blocks: Vec<_> = (0..500).map(|_| Arc::new(ipc().allocate(0, 64).expect("memory"))).collect();
    let share = || {
        let mut bundle = ipc().tensors();
        for (index, block) in blocks.iter().enumerate() {
            let memory = bundle.memory(Arc::clone(block));
            let layout = TensorLayout::contiguous(Dtype::F32, [16]).expect("a layout");
            bundle.tensor(format!("layer.{index}.weight"), memory, 0, layout).expect("it fits");
        }
        ipc().share_all(bundle).start().expect("shared")
    };
    let first = share();
    bencher.bench_local(share);
    drop(first);
}

#[divan::bench(args = TENSORS)]
fn bundle_to_bytes(bencher: Bencher<'_, '_>, tensors: u64) {
    let bundle = bundle(tensors);
    bencher.bench(|| bundle.descriptor().to_bytes());
}

#[divan::bench(args = TENSORS)]
fn bundle_from_bytes(bencher: Bencher<'_, '_>, tensors: u64) {
    let bytes = bundle(tensors).descriptor().to_bytes();
    bencher.bench(|| Descriptor::from_bytes(&bytes).expect("valid"));
}

/// Reads descriptors that differ from the last 15.
#[divan::bench(args = TENSORS)]
fn bundle_from_bytes_of_others(bencher: Bencher<'_, '_>, tensors: u64) {
    let bytes: Vec<_> =
        (1..=16).map(|elements| bundle_of(tensors, elements).descriptor().to_bytes()).collect();
    let turn = Cell::new(0);
    bencher.bench_local(|| {
        turn.set(turn.get() + 1);
        Descriptor::from_bytes(&bytes[turn.get() % bytes.len()]).expect("valid")
    });
}

#[divan::bench(args = TENSORS)]
fn bundle_every_tensor(bencher: Bencher<'_, '_>, tensors: u64) {
    let bundle = bundle(tensors);
    let mapping = ipc().open(bundle.descriptor()).at_home().expect("opened");
    bencher.bench(|| mapping.tensors().map(|(_, tensor)| tensor.range().len).sum::<u64>());
}

/// Runs the exporter: prints its descriptors, and serves until its standard input is closed.
fn export() {
    let ipc = Ipc::with_backend(MockBackend::from_spec("devices=1").expect("a machine"));
    let block = ipc.allocate(0, BYTES).expect("memory");
    let block = Arc::new(block);
    let share = |_| ipc.share(Arc::clone(&block)).start().expect("shared");
    let exports: Vec<_> = (0..EXPORTS).map(share).collect();
    exports.iter().for_each(|export| println!("{}", export.descriptor()));
    let _ = std::io::stdin().lock().lines().next();
}

fn start_exporter() -> (Child, Vec<Descriptor>) {
    let mut child = Command::new(std::env::current_exe().expect("the path of this program"))
        .env(EXPORTER, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("starting the exporter");
    let output = BufReader::new(child.stdout.take().expect("piped"));
    let read = |line: std::io::Result<String>| {
        line.expect("the exporter prints its descriptors").parse().expect("a descriptor")
    };
    let descriptors = output.lines().take(EXPORTS).map(read).collect();
    (child, descriptors)
}
