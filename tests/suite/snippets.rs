//! The Rust of the pages compiles, in functions that have what a page leaves to its reader.
//! The files and identifiers that pages for maintainers name exist.

#![allow(
    dead_code,
    unused_variables,
    reason = "snippets are compiled and not run, and name more than they use"
)]

use std::fs;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use anyhow::Result;
use cudarc::driver::{CudaContext, CudaFunction, CudaSlice, CudaStream};
use device_ipc::cuda::interop::CudaMappedMut;
use device_ipc::cuda::raw::{self, RawHandle};
use device_ipc::{
    Buffer, CopyPolicy, CopyProgress, Descriptor, DeviceIdentity, DeviceMap, DeviceOrdinal, DeviceRange,
    Dtype, Error, Export, Grant, Ipc, Keeper, Mapping, Message, Region, RingReadSlot, RingReader, Stream,
    TensorLayout, View, cuda,
};
use device_ipc_snippets::snippet;

mod architecture;

fn seed_000(ipc: &Ipc, tensor: Buffer, stream: Stream, timeout: Duration) -> Result<()> {
    snippet!("docs/seeds/000.md", 1);
    Ok(())
}

fn seed_001(
    ipc: &Ipc,
    tensor: Buffer,
    stream: Stream,
    descriptor: Descriptor,
    home: DeviceIdentity,
) -> Result<()> {
    snippet!("docs/seeds/001.md", 1);
    Ok(())
}

fn seed_002(
    ipc: &Ipc,
    tensor: Buffer,
    stream: Stream,
    descriptor: Descriptor,
    timeout: Duration,
) -> Result<()> {
    snippet!("docs/seeds/002.md", 1);
    Ok(())
}

type Launch = fn(&Arc<CudaStream>, &CudaFunction, CudaMappedMut<'_, u8>, u8) -> Result<()>;

fn seed_003(
    stream: Arc<CudaStream>,
    kernel: CudaFunction,
    launch: Launch,
    descriptor: Descriptor,
) -> Result<()> {
    snippet!("docs/seeds/003.md", 1);
    Ok(())
}

fn seed_004(
    ipc: &Ipc,
    share: Export,
    result: Export,
    stream: Stream,
    stream_of_device_1: Stream,
    timeout: Duration,
) -> Result<()> {
    snippet!("docs/seeds/004.md", 1);
    Ok(())
}

fn readme(
    stream: Arc<CudaStream>,
    add_one: fn(&Arc<CudaStream>, CudaMappedMut<'_, f32>) -> Result<()>,
) -> Result<()> {
    snippet!("README.md", 1);
    Ok(())
}

fn sharing() -> Result<()> {
    snippet!("docs/guide/sharing.md", 1);
    assert_eq!(values.len(), 20);
    Ok(())
}

fn grants(
    ipc: &Ipc,
    export: Export,
    descriptor: Descriptor,
    stream: Stream,
    grant_text: &str,
    send: fn(String, String),
) -> Result<()> {
    snippet!("docs/guide/sharing.md", 2);
    Ok(())
}

fn elements(mapping: Mapping, stream: Stream) -> Result<()> {
    snippet!("docs/guide/sharing.md", 3);
    Ok(())
}

fn memory_for_a_use(ipc: Ipc) -> Result<()> {
    snippet!("docs/guide/sharing.md", 4);
    Ok(())
}

fn mock() -> Result<()> {
    snippet!("docs/guide/mock.md", 1);
    Ok(())
}

fn timelines(export: Export, mapping: Mapping, stream: Stream, timeout: Duration) -> Result<()> {
    snippet!("docs/guide/sharing.md", 5);
    Ok(())
}

fn bundle(stream: Stream, buffer: Buffer, head: Buffer, send: fn(String), line: &str) -> Result<()> {
    snippet!("docs/guide/bundle.md", 1);
    Ok(())
}

fn channel(tensor: Buffer, stream: Stream, timeout: Duration) -> Result<()> {
    snippet!("docs/guide/channel.md", 1);
    Ok(())
}

#[allow(clippy::too_many_arguments, reason = "everything that the page leaves to the reader")]
fn ring(
    buffer: Buffer,
    stream: Stream,
    bucket: Vec<f32>,
    descriptor: Descriptor,
    send: fn(String),
    compute: fn(View<'_, f32>) -> Result<()>,
) -> Result<()> {
    snippet!("docs/guide/ring.md", 1);
    Ok(())
}

fn ring_ahead(
    mut reader: RingReader,
    stream: Stream,
    compute: fn(View<'_, f32>) -> Result<f32, Error>,
    use_it: fn(f32),
) -> Result<()> {
    snippet!("docs/guide/ring.md", 2);
    Ok(())
}

fn ring_in_event_loop(
    mut reader: RingReader,
    consume: fn(RingReadSlot) -> Result<()>,
    wait_readable: fn(BorrowedFd<'_>) -> Result<()>,
) -> Result<()> {
    snippet!("docs/guide/ring.md", 3);
    Ok(())
}

fn staging(stream: Stream, descriptor: Descriptor) -> Result<()> {
    snippet!("docs/guide/staging.md", 1);
    Ok(())
}

fn reservation(
    stream: Stream,
    version_1: Descriptor,
    version_2: Descriptor,
    version_3: Descriptor,
) -> Result<()> {
    snippet!("docs/guide/reservation.md", 1);
    Ok(())
}

fn side_by_side(stream: Stream, experts_0: Descriptor, experts_1: Descriptor) -> Result<()> {
    snippet!("docs/guide/reservation.md", 2);
    drop(experts);
    Ok(())
}

fn equal_addresses(descriptor: Descriptor) -> Result<()> {
    snippet!("docs/guide/reservation.md", 3);
    drop(objects);
    Ok(())
}

fn two_versions(
    ipc: &Ipc,
    keeper: &Keeper,
    blocks: [Arc<Buffer>; 2],
    version: u64,
    stream: Stream,
    timeout: Duration,
    write: fn(&Buffer, &Stream) -> Result<()>,
) -> Result<()> {
    snippet!("docs/guide/reservation.md", 4);
    Ok(())
}

fn remote(stream: Stream, descriptor: Descriptor) -> Result<()> {
    snippet!("docs/guide/remote.md", 1);
    Ok(())
}

fn remote_into(ipc: Ipc, buffer: Arc<Buffer>, descriptor: Descriptor) -> Result<()> {
    snippet!("docs/guide/remote.md", 2);
    drop(weights);
    Ok(())
}

fn remote_ring(
    ipc: &Ipc,
    buffer: Buffer,
    stream: Stream,
    descriptor: Descriptor,
    compute: fn(View<'_, f32>) -> Result<()>,
) -> Result<()> {
    snippet!("docs/guide/remote.md", 3);
    Ok(())
}

fn cuda_kinds(descriptor: Descriptor) -> Result<()> {
    snippet!("docs/guide/cuda.md", 1);
    Ok(())
}

/// A framework's tensor.
struct Tensor;

impl Tensor {
    fn data_ptr(&self) -> *mut u8 {
        std::ptr::null_mut()
    }
}

fn raw_owner(tensor: Tensor, device: DeviceOrdinal, bytes: u64, raw_stream: *mut u8) -> Result<()> {
    snippet!("docs/guide/interop.md", 1);
    Ok(())
}

type Compile = fn(&CudaStream) -> Result<CudaFunction>;

fn nvrtc(stream: Arc<CudaStream>, compile: Compile, launch: Launch, descriptor: Descriptor) -> Result<()> {
    snippet!("docs/guide/interop.md", 2);
    Ok(())
}

fn bare_handles(stream: Arc<CudaStream>, slice: Arc<CudaSlice<f32>>) -> Result<()> {
    snippet!("docs/guide/interop.md", 3);
    Ok(())
}

fn kubernetes(weights: Buffer, stream: Stream) -> Result<()> {
    snippet!("docs/guide/kubernetes.md", 1);
    Ok(())
}

fn ascend_owner(
    tensor: Tensor,
    device: DeviceOrdinal,
    bytes: u64,
    acl_stream: *mut u8,
    descriptor: Descriptor,
) -> Result<()> {
    snippet!("docs/guide/ascend.md", 1);
    Ok(())
}

fn ascend_allocation(range: DeviceRange, whole_allocation: DeviceRange) -> Region {
    snippet!("docs/guide/ascend.md", 2)
}

fn attachable(weights: Buffer) -> Result<()> {
    snippet!("docs/guide/program.md", 1);
    Ok(())
}

fn kept_weights(ipc: &Ipc, stream: Stream, new_version: Arc<AtomicBool>) -> Result<()> {
    snippet!("docs/guide/keeper.md", 1);
    Ok(())
}

fn keep(ipc: &Ipc, export: Export, next: Export) -> Result<()> {
    snippet!("docs/guide/keeper.md", 2);
    Ok(())
}

fn followed_weights(ipc: &Ipc, stream: Stream) -> Result<()> {
    snippet!("docs/guide/keeper.md", 3);
    Ok(())
}

fn remote_channel(
    ipc: Ipc,
    export: Export,
    key: device_ipc::Key,
    stream: Stream,
    timeout: Duration,
) -> Result<()> {
    snippet!("docs/guide/remote.md", 4);
    Ok(())
}

fn operations() -> Result<()> {
    snippet!("docs/guide/operations.md", 1);
    Ok(())
}

/// What stands between a line that is `begin` and the next that is `end`, each time, less the indentation of the former.
fn blocks(text: &str, begin: &str, end: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut open: Option<(usize, Vec<&str>)> = None;
    for line in text.lines() {
        match &mut open {
            None if line.trim_start() == begin => open = Some((line.len() - begin.len(), Vec::new())),
            None => {}
            Some((_, lines)) if line.trim_start() == end => {
                blocks.push(lines.join("\n"));
                open = None;
            }
            Some((indentation, lines)) => lines.push(line.get(*indentation..).unwrap_or_default()),
        }
    }
    assert!(open.is_none(), "a block has no end");
    blocks
}

/// Every block of Rust of the pages for users stands above. Those of `async.md` are parts of an example.
#[test]
fn every_block_of_the_pages_is_compiled() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = |name: &str| fs::read_dir(root.join(name)).expect("a folder of pages").flatten();
    let pages = ["docs/guide", "docs/seeds"].into_iter().flat_map(folder).map(|entry| entry.path());
    let pages = pages.chain([root.join("README.md")]).filter(|page| page.extension() == Some("md".as_ref()));
    for page in pages.filter(|page| !page.ends_with("async.md")) {
        let name = page.strip_prefix(root).expect("it is below").to_str().expect("a plain path");
        let shown = fs::read_to_string(&page).expect("a page").matches("\n```rust\n").count();
        let compiles =
            |number: &usize| include_str!("snippets.rs").contains(&format!("snippet!(\"{name}\", {number})"));
        assert_eq!((1..=shown).filter(compiles).count(), shown, "{name}: blocks without a `snippet!`");
    }
}

/// The page shows parts of an example, which runs as a test.
#[test]
fn async_page_shows_its_example() {
    let example = include_str!("../../examples/channel_server.rs");
    let shown: Vec<_> = include_str!("../../docs/guide/async.md").split("```rust\n").skip(1).collect();
    assert_eq!(shown.len(), 3);
    for block in shown {
        let block = block.split("```").next().expect("a first part").trim_end();
        assert!(example.contains(block), "not in examples/channel_server.rs:\n{block}");
    }
}

/// The page shows a part of a program of another workspace, which `.ci/candle` checks.
#[test]
fn keeper_page_shows_the_example_with_candle() {
    let program = include_str!("../../examples/candle/src/main.rs");
    let compiled = blocks(program, "// begin docs/guide/keeper.md", "// end");
    assert_eq!(blocks(include_str!("../../docs/guide/keeper.md"), "```rust,ignore", "```"), compiled);
    assert_eq!(compiled.len(), 1);
}

#[test]
fn mock_page_lists_all_keys() {
    let error =
        device_ipc::mock::MockBackend::from_spec("unknown=1").expect_err("an unknown key").to_string();
    let keys = error.split("expected one of ").nth(1).expect("the error lists the keys");
    for key in keys.split(", ") {
        let listed = include_str!("../../docs/guide/mock.md").contains(&format!("\n| `{key}` |"));
        assert!(listed, "docs/guide/mock.md does not list {key}");
    }
}
