//! The Rust of the pages compiles: each block stands here too, between `begin` and `end`, and is compared with its page.
//! The files that the pages for contributors name exist.

#![allow(
    dead_code,
    unused_variables,
    reason = "snippets are compiled and not run, and name more than they use"
)]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use cudarc::driver::{CudaFunction, CudaSlice, CudaStream};
use device_ipc::cuda::interop::CudaMappedMut;
use device_ipc::cuda::raw::{self, RawHandle};
use device_ipc::{
    AllowList, BorrowedStream, Buffer, Descriptor, DeviceIdentity, DeviceMap, DeviceOrdinal, DevicePtr,
    DeviceRange, Dtype, Error, Export, Ipc, Message, OwnedRegion, Region, RingDescriptor, Stream, View,
};

#[rustfmt::skip]
fn seed_000(ipc: &Ipc, tensor: Buffer, stream: Stream, timeout: Duration) -> Result<()> {
    // begin docs/seeds/000.md
    let channel = ipc.listen("weights").start()?.accept(timeout)?;
    let share = ipc.share(tensor).dtype(Dtype::F32).shape([4, 5]).start()?;
    channel.send(Message::new().bytes(b"version 7").tensor(&share).ready_on(&stream), timeout)?; // the host does not wait

    let channel = ipc.connect("weights").timeout(timeout).start()?; // another process
    let received = channel.receive(timeout)?;
    let tensor = received.tensors()[0].open().on(&stream)?; // the stream waits for the sender's
    tensor.view_mut::<f32, _>(&stream)?.add(1.0)?;
    // end
    Ok(())
}

#[rustfmt::skip]
fn seed_001(ipc: &Ipc, tensor: Buffer, stream: Stream, descriptor: Descriptor, home: DeviceIdentity) -> Result<()> {
    // begin docs/seeds/001.md
    let share = ipc.share(tensor).dtype(Dtype::F32).shape([5]).ready_on(&stream).start()?;
    std::fs::write("w.ipc", share.descriptor().to_string())?; // any road

    let tensor = ipc.open(&descriptor).on(&stream)?; // another process: on the card of its stream
    let tensor = ipc.open(&descriptor).at_home()?; // or where the bytes live, under whatever number that card has here
    let map = DeviceMap::new().insert(home, 1u32)?; // or by a map: from a card's identity to a card of ours
    let tensor = ipc.open(&descriptor).mapped_by(&map)?;
    // end
    Ok(())
}

#[rustfmt::skip]
fn seed_002(ipc: &Ipc, tensor: Buffer, stream: Stream, descriptor: Descriptor, timeout: Duration) -> Result<()> {
    // begin docs/seeds/002.md
    let share = ipc.share(tensor).dtype(Dtype::F32).shape([1000, 1000]).ready_on(&stream).start()?;
    share.wait_released(timeout)?; // B's lease has ended behind its work: what A submits now sees it

    let tensor = ipc.open(&descriptor).on(&stream)?; // behind `ready_on`
    tensor.view_mut::<f32, _>(&stream)?.add(1.0)?;
    tensor.release(&stream)?; // when the stream gets here
    // end
    Ok(())
}

type Launch = fn(&Arc<CudaStream>, &CudaFunction, CudaMappedMut<'_, u8>, u8) -> Result<()>;

#[rustfmt::skip]
fn seed_003(stream: Arc<CudaStream>, kernel: CudaFunction, launch: Launch, descriptor: Descriptor) -> Result<()> {
    // begin docs/seeds/003.md
    let bytes = Ipc::auto()?.open(&descriptor).on(&stream)?;
    launch(&stream, &kernel, bytes.view_mut(&stream)?, 3)?;
    bytes.release(&stream)?;
    // end
    Ok(())
}

#[rustfmt::skip]
fn seed_004(
    ipc: &Ipc, share: Export, result: Export, stream: Stream, stream_of_card_1: Stream, timeout: Duration,
) -> Result<()> {
    // begin docs/seeds/004.md
    let map = DeviceMap::new().insert(0u32, 1u32)?; // numbers or identities; one to one, checked on both sides at connection
    let channel = ipc.listen("layers").device_map(map).start()?.accept(timeout)?;
    channel.send(Message::new().tensor(&share).ready_on(&stream), timeout)?;
    let answer = channel.receive(timeout)?.tensors()[0].open().mapped()?; // on card 0: the inverse of the map

    let received = channel.receive(timeout)?; // the other process
    let tensor = received.tensors()[0].open().on(&stream_of_card_1)?;
    received.reply(Message::new().tensor(&result).ready_on(&stream_of_card_1), timeout)?;
    // end
    Ok(())
}

#[rustfmt::skip]
#[allow(clippy::too_many_arguments, reason = "everything that the page leaves to the reader")]
fn ring(
    ipc: &Ipc, buffer: Buffer, stream: Stream, bucket: Vec<f32>, descriptor: RingDescriptor,
    send: fn(String), compute: fn(View<'_, f32>) -> Result<f32, Error>, use_it: fn(f32),
) -> Result<()> {
    // begin docs/guide/ring.md
    // The writer.
    let mut ring = ipc.ring(buffer).slots(2).start()?;
    send(ring.descriptor().to_string());                 // "dipcr.…", by any road
    ring.wait_readers(2, Duration::from_secs(30))?;
    let mut slot = ring.write(&stream)?;                 // the stream waits until every reader has passed what the slot held
    slot.view_mut::<f32, _>(&stream)?.copy_from(&bucket)?;
    slot.publish(&stream)?;                              // told when the stream gets here

    // A reader.
    let mut reader = ipc.join(&descriptor).on(&stream)?;
    let mut read = || -> Result<f32, Error> {
        let slot = reader.next(&stream)?;                // the stream waits for the publication
        let result = compute(slot.view::<f32, _>(&stream)?)?;
        stream.synchronize()?;                           // where the host uses the result
        slot.release(&stream)?;                          // fails if the bytes were never published
        Ok(result)
    };
    loop {
        match read() {
            Ok(result) => use_it(result),
            Err(Error::RingClosed { .. }) => break,      // the orderly end
            Err(error) => return Err(error.into()),
        }
    }
    // end
    Ok(())
}

#[rustfmt::skip]
fn staging(ipc: &Ipc, stream: Stream, descriptor: Descriptor) -> Result<()> {
    // begin docs/guide/staging.md
    let mapping = ipc.open(&descriptor).or_staged().on(&stream)?; // opened where that works, else copied
    if mapping.is_copy() { /* it has the bytes of this moment, and nobody else writes them */ }
    // end
    Ok(())
}

#[rustfmt::skip]
fn kubernetes() -> Result<()> {
    // begin docs/guide/kubernetes.md
    let ipc = Ipc::builder().allow(AllowList::own_user().user(2000)).auto()?; // the other container's runAsUser
    // end
    Ok(())
}

#[rustfmt::skip]
fn ascend_allocation(range: DeviceRange, whole_allocation: DeviceRange) -> Region {
    // begin docs/guide/ascend.md
    Region::new("ascend", range).with_allocation(whole_allocation)
    // end
}

/// As a framework's.
struct Tensor;

impl Tensor {
    fn data_ptr(&self) -> *mut u8 {
        std::ptr::null_mut()
    }
}

#[rustfmt::skip]
#[allow(clippy::undocumented_unsafe_blocks, reason = "the page says around it what the caller promises")]
fn ascend_owner(tensor: Tensor, device: DeviceOrdinal, bytes: u64, acl_stream: *mut u8) -> Result<()> {
    // begin docs/guide/ascend.md
    let range = DeviceRange::new(device, DevicePtr::new(tensor.data_ptr() as u64), bytes);
    let owner = unsafe { OwnedRegion::new(tensor, Region::new("ascend", range)) };
    let stream = unsafe { BorrowedStream::from_raw("ascend", device, acl_stream as u64) };
    let share = Ipc::named("ascend")?.share(owner).ready_on(&stream).start()?;
    // end
    Ok(())
}

type Compile = fn(&CudaStream) -> Result<CudaFunction>;

#[rustfmt::skip]
fn nvrtc(stream: Arc<CudaStream>, compile: Compile, launch: Launch, descriptor: Descriptor) -> Result<()> {
    // begin docs/guide/interop.md
    let kernel = compile(&stream)?; // by cudarc::nvrtc, for the architecture of this device
    let bytes = Ipc::auto()?.open(&descriptor).on(&stream)?;
    launch(&stream, &kernel, bytes.view_mut(&stream)?, 3)?; // stream.launch_builder(kernel).arg(&mut view)
    bytes.release(&stream)?;
    // end
    Ok(())
}

#[rustfmt::skip]
fn bare_handles(stream: Arc<CudaStream>, slice: Arc<CudaSlice<f32>>) -> Result<()> {
    // begin docs/guide/interop.md
    let export = raw::export(slice.clone())?; // keeps the slice
    let &RawHandle { bytes, offset, len, .. } = export.handle();
    // ... the other program opens, works, closes, and says so ...
    drop(export);

    // SAFETY: the other program keeps the memory until it is told; the stream is waited for before `mapping` is dropped.
    let mapping = unsafe { raw::open(&RawHandle::new(bytes, offset, len), 0)? };
    let numbers = stream.clone_dtoh(&mapping.view::<f32>(&stream)?)?;
    // end
    Ok(())
}

const PAGES: [(&str, &str); 10] = [
    ("docs/seeds/000.md", include_str!("../docs/seeds/000.md")),
    ("docs/seeds/001.md", include_str!("../docs/seeds/001.md")),
    ("docs/seeds/002.md", include_str!("../docs/seeds/002.md")),
    ("docs/seeds/003.md", include_str!("../docs/seeds/003.md")),
    ("docs/seeds/004.md", include_str!("../docs/seeds/004.md")),
    ("docs/guide/ring.md", include_str!("../docs/guide/ring.md")),
    ("docs/guide/staging.md", include_str!("../docs/guide/staging.md")),
    ("docs/guide/kubernetes.md", include_str!("../docs/guide/kubernetes.md")),
    ("docs/guide/ascend.md", include_str!("../docs/guide/ascend.md")),
    ("docs/guide/interop.md", include_str!("../docs/guide/interop.md")),
];

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

#[test]
fn the_rust_of_the_pages_is_what_is_compiled_here() {
    for (page, text) in PAGES {
        let compiled = blocks(include_str!("snippets.rs"), &format!("// begin {page}"), "// end");
        let shown = blocks(text, "```rust", "```");
        assert!(!shown.is_empty(), "{page} shows no Rust");
        assert_eq!(shown, compiled, "{page} and tests/snippets.rs differ");
    }
}

/// The Rust files below a folder, but for build outputs.
fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder of the checkout").flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        if path.is_dir() && name != "target" && !name.to_string_lossy().starts_with('.') {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn pages_for_contributors_name_files_that_exist() {
    let mut files = Vec::new();
    rust_files(Path::new(env!("CARGO_MANIFEST_DIR")), &mut files);
    for (page, text) in [
        ("docs/architecture.md", include_str!("../docs/architecture.md")),
        ("CONTRIBUTING.md", include_str!("../CONTRIBUTING.md")),
    ] {
        for name in text.split('`').filter(|code| code.ends_with(".rs") && !code.contains(' ')) {
            assert!(
                files.iter().any(|file| file.ends_with(name)),
                "{page} names {name}, which does not exist"
            );
        }
    }
}
