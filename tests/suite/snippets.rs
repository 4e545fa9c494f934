//! The Rust of the pages compiles: each block stands here too, between `begin` and `end`, and is compared with its page.
//! The files and identifiers that pages for maintainers name exist.

#![allow(
    dead_code,
    unused_variables,
    reason = "snippets are compiled and not run, and name more than they use"
)]

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use anyhow::Result;
use cudarc::driver::{CudaContext, CudaFunction, CudaSlice, CudaStream};
use device_ipc::cuda::interop::CudaMappedMut;
use device_ipc::cuda::raw::{self, RawHandle};
use device_ipc::{
    Buffer, CopyProgress, Descriptor, DeviceIdentity, DeviceMap, DeviceOrdinal, DeviceRange, Dtype, Error,
    Export, Grant, Ipc, Keeper, Mapping, Message, Region, RingReadSlot, RingReader, Stream, TensorLayout,
    View, cuda,
};

mod architecture;

#[rustfmt::skip]
fn seed_000(ipc: &Ipc, tensor: Buffer, stream: Stream, timeout: Duration) -> Result<()> {
    // begin docs/seeds/000.md
    let channel = ipc.listen("weights").start()?.accept(timeout)?;
    let share = ipc.share(tensor).dtype(Dtype::F32).shape([4, 5]).start()?;
    channel.send(Message::new().bytes(b"version 7").export(&share).ready_on(&stream), timeout)?; // the host does not wait

    let channel = ipc.connect("weights").timeout(timeout).start()?; // another process
    let received = channel.receive(timeout)?;
    let tensor = received.exports()[0].open().on(&stream)?; // this stream waits for the sender's stream
    tensor.view_mut::<f32, _>(&stream)?.add(1.0)?;
    // end
    Ok(())
}

#[rustfmt::skip]
fn seed_001(ipc: &Ipc, tensor: Buffer, stream: Stream, descriptor: Descriptor, home: DeviceIdentity) -> Result<()> {
    // begin docs/seeds/001.md
    let share = ipc.share(tensor).dtype(Dtype::F32).shape([5]).ready_on(&stream).start()?;
    std::fs::write("w.ipc", share.descriptor().to_string())?; // or any other transport

    let tensor = ipc.open(&descriptor).on(&stream)?; // another process: on the device of its stream
    let tensor = ipc.open(&descriptor).at_home()?; // or on the home device, whatever its ordinal is in this process
    let map = DeviceMap::new().insert(home, 1u32)?; // or by a map: from a device identity to an ordinal of this process
    let tensor = ipc.open(&descriptor).on_mapped_devices(&map)?;
    // end
    Ok(())
}

#[rustfmt::skip]
fn seed_002(ipc: &Ipc, tensor: Buffer, stream: Stream, descriptor: Descriptor, timeout: Duration) -> Result<()> {
    // begin docs/seeds/002.md
    let share = ipc.share(tensor).dtype(Dtype::F32).shape([1000, 1000]).ready_on(&stream).start()?;
    share.wait_released(timeout)?; // B's lease has ended after its work: work that A submits now sees B's writes

    let tensor = ipc.open(&descriptor).on(&stream)?; // after the point of `ready_on`
    tensor.view_mut::<f32, _>(&stream)?.add(1.0)?;
    tensor.release(&stream)?; // when the stream reaches this point
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
    ipc: &Ipc, share: Export, result: Export, stream: Stream, stream_of_device_1: Stream, timeout: Duration,
) -> Result<()> {
    // begin docs/seeds/004.md
    let map = DeviceMap::new().insert(0u32, 1u32)?; // ordinals or identities; one-to-one, checked in both processes at connection
    let channel = ipc.listen("layers").device_map(map).start()?.accept(timeout)?;
    channel.send(Message::new().export(&share).ready_on(&stream), timeout)?;
    let answer = channel.receive(timeout)?.exports()[0].open().on(&stream)?; // on device 0: the inverse of the map

    let received = channel.receive(timeout)?; // the other process
    let tensor = received.exports()[0].open().on(&stream_of_device_1)?;
    received.reply(Message::new().export(&result).ready_on(&stream_of_device_1), timeout)?;
    // end
    Ok(())
}

#[rustfmt::skip]
fn readme(stream: Arc<CudaStream>, add_one: fn(&Arc<CudaStream>, CudaMappedMut<'_, f32>) -> Result<()>) -> Result<()> {
    // begin README.md
    // The exporter, with cudarc as the owner of the memory.
    cuda::make_pool_shareable(0)?; // once: memory that cudarc (or candle) allocates on device 0 from now on can be shared
    let stream = CudaContext::new(0)?.default_stream();
    let weights = Arc::new(stream.clone_htod(&[1f32; 20])?);
    let export = Ipc::auto()?.share(weights.clone()).shape([4, 5]).ready_on(&stream).start()?;
    std::fs::write("w.ipc", export.descriptor().to_string())?;
    export.wait_released(Duration::from_secs(30))?; // on timeout the error names pid, program and bytes

    // The importer, another process.
    let descriptor: Descriptor = std::fs::read_to_string("w.ipc")?.parse()?;
    let tensor = Ipc::auto()?.open(&descriptor).on(&stream)?; // the stream waits until the bytes are written
    add_one(&stream, tensor.view_mut(&stream)?)?; // element type and access are checked
    tensor.release(&stream)?; // the lease ends when the stream reaches this point
    // end
    Ok(())
}

#[rustfmt::skip]
fn sharing() -> Result<()> {
    // begin docs/guide/sharing.md
    use std::time::Duration;

    use device_ipc::{Descriptor, Dtype, Ipc};

    // The exporter.
    let ipc = Ipc::auto()?;
    let stream = ipc.create_stream(0)?;
    let weights = ipc.allocate(0, 20 * 4)?; // or any owner of device memory, e.g. a CudaSlice
    weights.view_mut::<f32, _>(&stream)?.copy_from(&[1.0; 20])?;
    let export = ipc.share(weights).dtype(Dtype::F32).shape([4, 5]).ready_on(&stream).start()?;
    std::fs::write("w.ipc", export.descriptor().to_string())?;
    export.wait_released(Duration::from_secs(30))?; // on timeout the error names pid, program and bytes

    // The importer, another process.
    let ipc = Ipc::auto()?;
    let stream = ipc.create_stream(0)?;
    let descriptor: Descriptor = std::fs::read_to_string("w.ipc")?.parse()?;
    let tensor = ipc.open(&descriptor).on(&stream)?; // the stream waits until the bytes are written; the host does not
    tensor.view_mut::<f32, _>(&stream)?.add(1.0)?; // element type and access are checked
    let values = tensor.view::<f32, _>(&stream)?.to_vec()?; // waits for the stream
    tensor.check()?; // an error if the exporter died before it had written the bytes
    tensor.release(&stream)?; // the lease ends when the stream reaches this point
    // end
    assert_eq!(values.len(), 20);
    Ok(())
}

#[rustfmt::skip]
fn grants(ipc: &Ipc, export: Export, descriptor: Descriptor, stream: Stream, grant_text: &str, send: fn(String, String)) -> Result<()> {
    // begin docs/guide/sharing.md
    // The exporter.
    let grant = export.grant(Duration::from_secs(60))?;
    send(export.descriptor().to_string(), grant.to_string()); // "dipc1:…" and "dipcg1:…"
    drop(export); // the grant keeps the memory for 60 s at most

    // The importer, another process.
    let grant: Grant = grant_text.parse()?;
    let tensor = ipc.open(&descriptor).grant(&grant)?.on(&stream)?; // uses the grant up; the lease keeps the memory now
    // end
    Ok(())
}

#[rustfmt::skip]
fn elements(mapping: Mapping, stream: Stream) -> Result<()> {
    // begin docs/guide/sharing.md
    use device_ipc::Bool;

    let tensor = mapping.get("layer.0.weight")?; // any element type, any strides
    let elements: Vec<f32> = tensor.to_host(&stream)?; // in row-major order; strided elements are gathered on the host
    let bytes: Vec<u8> = tensor.to_host_bytes(&stream)?; // the bytes of the same elements, whatever their type
    let on_device: View<'_, u8> = tensor.view_bytes(&stream)?; // with the gaps between strided elements
    let mask: Vec<Bool> = mapping.get("mask")?.to_host(&stream)?;
    // end
    Ok(())
}

#[rustfmt::skip]
fn memory_for_a_use(ipc: Ipc) -> Result<()> {
    // begin docs/guide/sharing.md
    use device_ipc::{Access, MemoryUse};

    let memory = ipc.allocate_for(0, 1 << 20, MemoryUse::new().read_only_importers())?;
    let export = ipc.share(memory).access(Access::ReadOnly).start()?;
    // end
    Ok(())
}

#[rustfmt::skip]
fn mock() -> Result<()> {
    // begin docs/guide/mock.md
    use device_ipc::{Access, Ipc, MemoryUse, mock::MockBackend};

    let ipc = Ipc::with_backend(MockBackend::from_spec("devices=2;like=cuda")?);
    let memory = ipc.allocate_for(0, 4096, MemoryUse::new().read_only_importers())?;
    let export = ipc.share(memory).access(Access::ReadOnly).start()?;
    // end
    Ok(())
}

#[rustfmt::skip]
fn timelines(export: Export, mapping: Mapping, stream: Stream, timeout: Duration) -> Result<()> {
    // begin docs/guide/sharing.md
    // The exporter: `export` has one importer.
    let timeline = export.timelines(1, timeout)?.remove(0);
    timeline.signal(1, &stream)?; // version 1 is written when the stream reaches this point
    timeline.wait(1, &stream)?; // the stream waits until the importer has read version 1

    // The importer.
    let timeline = mapping.timeline()?;
    timeline.wait(1, &stream)?;
    timeline.signal(1, &stream)?;
    timeline.check()?; // an error if the peer died: a wait that ended this way proves nothing about the bytes
    // end
    Ok(())
}

#[rustfmt::skip]
fn bundle(stream: Stream, buffer: Buffer, head: Buffer, send: fn(String), line: &str) -> Result<()> {
    // begin docs/guide/bundle.md
    use device_ipc::{Descriptor, Dtype, Ipc, TensorLayout};

    // The exporter: two tensors in one buffer, and one buffer that is a tensor itself.
    let ipc = Ipc::auto()?;
    let mut bundle = ipc.tensors();
    let memory = bundle.memory(buffer);
    bundle.tensor("layer.0.weight", memory, 0, TensorLayout::contiguous(Dtype::F32, [64, 32])?)?;
    bundle.tensor("layer.0.bias", memory, 64 * 32 * 4, TensorLayout::contiguous(Dtype::F32, [64])?)?;
    bundle.owned("head", head, Some(TensorLayout::contiguous(Dtype::BF16, [1000])?))?;
    let export = ipc.share_all(bundle).ready_on(&stream).start()?;
    send(export.descriptor().to_string()); // "dipc1:…"

    // The importer.
    let descriptor: Descriptor = line.parse()?;
    let weights = ipc.open(&descriptor).on(&stream)?; // all tensors, or an error that names one
    for (name, tensor) in weights.tensors() {
        println!("{name}: {:?} {:?}", tensor.dtype(), tensor.shape());
    }
    let bias = weights.get("layer.0.bias")?.view::<f32, _>(&stream)?;
    // end
    Ok(())
}

#[rustfmt::skip]
fn channel(tensor: Buffer, stream: Stream, timeout: Duration) -> Result<()> {
    // begin docs/guide/channel.md
    use device_ipc::{Dtype, Ipc, Message};

    let ipc = Ipc::auto()?;

    // One process listens under a name, and sends.
    let channel = ipc.listen("weights").start()?.accept(timeout)?;
    let share = ipc.share(tensor).dtype(Dtype::F32).shape([4, 5]).start()?;
    channel.send(Message::new().bytes(b"version 7").export(&share).ready_on(&stream), timeout)?;
    drop(share); // safe: the message keeps the memory allocated until the peer has opened or discarded the tensor

    // Another process connects to the name, and receives.
    let channel = ipc.connect("weights").timeout(timeout).start()?;
    let received = channel.receive(timeout)?;
    println!("{}", String::from_utf8_lossy(received.bytes()));
    let tensor = received.exports()[0].open().on(&stream)?; // this stream waits for the sender's stream
    received.reply(Message::new().bytes(b"done"), timeout)?;
    // end
    Ok(())
}

#[rustfmt::skip]
#[allow(clippy::too_many_arguments, reason = "everything that the page leaves to the reader")]
fn ring(
    buffer: Buffer, stream: Stream, bucket: Vec<f32>, descriptor: Descriptor,
    send: fn(String), compute: fn(View<'_, f32>) -> Result<()>,
) -> Result<()> {
    // begin docs/guide/ring.md
    use std::time::Duration;

    use device_ipc::Ipc;

    // The writer.
    let ipc = Ipc::auto()?;
    let mut ring = ipc.ring(buffer).slots(2).start()?;
    send(ring.descriptor().to_string());                 // "dipc1:…", over any transport
    ring.wait_readers(2, Duration::from_secs(30))?;
    let mut slot = ring.write(&stream)?;                 // the stream waits until every reader has released the slot's last contents
    slot.view_mut::<f32, _>(&stream)?.copy_from(&bucket)?;
    slot.publish(&stream)?;                              // published when the stream reaches this point

    // A reader.
    let mut reader = ipc.open_ring(&descriptor).on(&stream)?;
    while let Some(slot) = reader.next(Duration::from_secs(30))? { // a published slot; None: the writer has closed the ring
        compute(slot.view::<f32, _>(&stream)?)?;
        slot.release(&stream)?;                          // the writer may reuse the slot when the stream reaches this point
    }
    // end
    Ok(())
}

#[rustfmt::skip]
fn ring_ahead(
    mut reader: RingReader, stream: Stream,
    compute: fn(View<'_, f32>) -> Result<f32, Error>, use_it: fn(f32),
) -> Result<()> {
    // begin docs/guide/ring.md
    let mut read = || -> Result<f32, Error> {
        let slot = reader.next_ahead(&stream)?;          // the stream waits for the publication
        let result = compute(slot.view::<f32, _>(&stream)?)?;
        stream.synchronize()?;                           // or an event: the work has finished
        slot.release(&stream)?;                          // fails if the bytes were never published
        Ok(result)
    };
    loop {
        match read() {
            Ok(result) => use_it(result),
            Err(Error::RingClosed { .. }) => break,      // the writer closed the ring instead of publishing this slot
            Err(error) => return Err(error.into()),
        }
    }
    // end
    Ok(())
}

#[rustfmt::skip]
fn ring_in_event_loop(
    mut reader: RingReader, consume: fn(RingReadSlot) -> Result<()>, wait_readable: fn(BorrowedFd<'_>) -> Result<()>,
) -> Result<()> {
    // begin docs/guide/ring.md
    loop {
        match reader.try_next()? {
            Poll::Ready(Some(slot)) => consume(slot)?,
            Poll::Ready(None) => break,                  // the writer has closed the ring
            Poll::Pending => wait_readable(reader.as_fd())?,
        }
    }
    // end
    Ok(())
}

#[rustfmt::skip]
fn staging(stream: Stream, descriptor: Descriptor) -> Result<()> {
    // begin docs/guide/staging.md
    use device_ipc::Ipc;

    let ipc = Ipc::auto()?;
    let mapping = ipc.open(&descriptor).or_staged().on(&stream)?; // opened if possible, else copied
    if mapping.is_copy() {
        // A private copy of the bytes at this moment: the exporter's later writes do not reach it.
    }
    // end
    Ok(())
}

#[rustfmt::skip]
fn reservation(stream: Stream, version_1: Descriptor, version_2: Descriptor, version_3: Descriptor) -> Result<()> {
    // begin docs/guide/reservation.md
    use device_ipc::Ipc;

    let ipc = Ipc::auto()?;
    let mut weights = ipc.open(&version_1).reserved().on(&stream)?;
    // … capture graphs over the tensors of `weights` …

    weights.replace_on(&version_2, &stream)?; // the same addresses, another export: the graphs read version 2

    weights.suspend()?; // nothing is mapped, the lease has ended: the exporter may free the memory
    weights.resume(&version_3)?; // the same export as before, or another one
    // end
    Ok(())
}

#[rustfmt::skip]
fn side_by_side(stream: Stream, experts_0: Descriptor, experts_1: Descriptor) -> Result<()> {
    // begin docs/guide/reservation.md
    use device_ipc::{Dtype, Ipc, TensorLayout};

    let ipc = Ipc::auto()?;
    let owner = 8 << 20; // bytes: what each owner shares, 8 experts of 1 MiB
    let reservation = ipc.reserve(0, 2 * owner)?;
    let first = ipc.open(&experts_0).reserved_in(&reservation, 0).on(&stream)?;
    let second = ipc.open(&experts_1).reserved_in(&reservation, owner).on(&stream)?;

    let layout = TensorLayout::contiguous(Dtype::F32, [16, 1 << 18])?;
    let owners = [&first, &second];
    let experts = reservation.tensor(&owners, &layout)?.view::<f32, _>(&stream)?;
    // end
    drop(experts);
    Ok(())
}

#[rustfmt::skip]
fn equal_addresses(descriptor: Descriptor) -> Result<()> {
    // begin docs/guide/reservation.md
    use device_ipc::{DevicePtr, DeviceRange, Ipc};

    // one process
    let reservation = Ipc::auto()?.reserve(0, 1 << 30)?;
    let address = reservation.range().ptr.get(); // a number to send

    // the others: the device may have another ordinal there
    let ipc = Ipc::auto()?;
    let reservation = ipc.reserve_at(DeviceRange::new(0.into(), DevicePtr::new(address), 1 << 30))?;
    let objects = ipc.open(&descriptor).reserved_in(&reservation, 0).on_device(0)?;
    // end
    drop(objects);
    Ok(())
}

#[rustfmt::skip]
fn two_versions(ipc: &Ipc, keeper: &Keeper, blocks: [Arc<Buffer>; 2], version: u64, stream: Stream, timeout: Duration, write: fn(&Buffer, &Stream) -> Result<()>) -> Result<()> {
    // begin docs/guide/reservation.md
    let next = &blocks[version as usize % 2]; // Arc<Buffer>, of Ipc::allocate_for with MemoryUse::new().remappable()
    write(next, &stream)?; // no process has it: the export of version - 2 is closed
    let export = ipc.share(Arc::clone(next)).ready_on(&stream).start()?;
    let former = Arc::into_inner(keeper.replace(version, export)).expect("the only reference");
    former.close(timeout)?; // the readers have followed; the error names those that have not
    // end
    Ok(())
}

#[rustfmt::skip]
fn remote(stream: Stream, descriptor: Descriptor) -> Result<()> {
    // begin docs/guide/remote.md
    use device_ipc::nixl::NixlEngine;
    use device_ipc::{Ipc, Remote};

    // The exporter: listens at the address of the interface that the importers reach.
    let engine = Arc::new(NixlEngine::load()?);
    let ipc = Ipc::builder().remote(Remote::new(engine).listen("10.0.0.1:0")?).auto()?;
    let export = ipc.share(ipc.allocate(0, 1 << 20)?).ready_on(&stream).start()?;
    println!("{}", export.descriptor()); // contains the address

    // The importer, on another host.
    let engine = Arc::new(NixlEngine::load()?);
    let ipc = Ipc::builder().remote(Remote::new(engine)).auto()?;
    let mapping = ipc.open(&descriptor).or_pulled().on(&stream)?; // opened if possible, else copied
    if mapping.is_copy() {
        // A private copy of the bytes at this moment: the exporter's later writes do not reach it.
    }
    // end
    Ok(())
}

#[rustfmt::skip]
fn remote_into(ipc: Ipc, buffer: Arc<Buffer>, descriptor: Descriptor) -> Result<()> {
    // begin docs/guide/remote.md
    let mut weights = ipc.tensors();
    weights.owned("w", Arc::clone(&buffer), Some(TensorLayout::contiguous(Dtype::F32, [4, 5])?))?;
    let report = |progress: CopyProgress| eprintln!("{} of {} B", progress.copied_bytes, progress.total_bytes);
    weights = ipc.open(&descriptor).on_progress(&report).pull_into(weights)?; // can be used again
    // end
    drop(weights);
    Ok(())
}

#[rustfmt::skip]
fn remote_ring(
    ipc: &Ipc, buffer: Buffer, stream: Stream, descriptor: Descriptor, compute: fn(View<'_, f32>) -> Result<()>,
) -> Result<()> {
    // begin docs/guide/remote.md
    // The writer: as for readers on its own host.
    let ring = ipc.ring(buffer).slots(4).start()?;
    ring.wait_readers(1, Duration::from_secs(30))?;

    // A reader, on another host.
    let mut reader = ipc.open_ring(&descriptor).or_pulled().on(&stream)?;
    while let Some(slot) = reader.next(Duration::from_secs(30))? { // copied completely
        compute(slot.view::<f32, _>(&stream)?)?;
        slot.release(&stream)?;
    }
    // end
    Ok(())
}

#[rustfmt::skip]
fn cuda_kinds(descriptor: Descriptor) -> Result<()> {
    // begin docs/guide/cuda.md
    use std::sync::Arc;

    use cudarc::driver::CudaContext;
    use device_ipc::{Access, Ipc, MemoryUse, cuda};

    // The exporter. Once, before the first allocation: cudarc's and candle's memory of this device becomes shareable.
    cuda::make_pool_shareable(0)?;
    let stream = CudaContext::new(0)?.default_stream();
    let weights = Arc::new(stream.clone_htod(&[1f32; 20])?);
    let export = Ipc::auto()?.share(weights.clone()).shape([4, 5]).ready_on(&stream).start()?;
    println!("{:?}", export.exposure()); // bytes that importers can reach

    // The exporter, for memory that the hardware protects against writes of importers.
    let ipc = Ipc::auto()?;
    let memory = ipc.allocate_for(0, 1 << 20, MemoryUse::new().read_only_importers())?;
    let read_only = ipc.share(memory).access(Access::ReadOnly).start()?;

    // An importer opens all kinds of memory by the same call.
    let tensor = Ipc::auto()?.open(&descriptor).on(&stream)?;
    let host: Vec<f32> = stream.clone_dtoh(&tensor.view::<f32, _>(&stream)?)?;
    // end
    Ok(())
}

/// A framework's tensor.
struct Tensor;

impl Tensor {
    fn data_ptr(&self) -> *mut u8 {
        std::ptr::null_mut()
    }
}

#[rustfmt::skip]
fn raw_owner(tensor: Tensor, device: DeviceOrdinal, bytes: u64, raw_stream: *mut u8) -> Result<()> {
    // begin docs/guide/interop.md
    use device_ipc::{BorrowedStream, DevicePtr, DeviceRange, Dtype, Ipc, OwnedRegion, Region};

    let range = DeviceRange::new(device, DevicePtr::new(tensor.data_ptr() as u64), bytes);
    // SAFETY: `tensor` keeps these bytes allocated for as long as it exists.
    let owner = unsafe { OwnedRegion::new(tensor, Region::new("cuda", range).with_dtype(Dtype::F32)) };
    // SAFETY: a stream of this device that exists until `start` has returned.
    let stream = unsafe { BorrowedStream::from_raw("cuda", device, raw_stream as u64) };
    let export = Ipc::named("cuda")?.share(owner).ready_on(&stream).start()?;
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
    let &RawHandle { bytes, byte_offset, len, .. } = export.handle();
    // ... the other program opens, works, closes, and reports that it has closed ...
    drop(export);

    // SAFETY: the other program keeps the memory until it is notified; the stream is synchronised before `mapping` is dropped.
    let mapping = unsafe { raw::open(&RawHandle::new(bytes, byte_offset, len), 0)? };
    let numbers = stream.clone_dtoh(&mapping.view::<f32>(&stream)?)?;
    // end
    Ok(())
}

#[rustfmt::skip]
fn kubernetes(weights: Buffer, stream: Stream) -> Result<()> {
    // begin docs/guide/kubernetes.md
    use device_ipc::{AllowList, Descriptor, Ipc};

    // Container 1: the exporter. 2000 is the `runAsUser` of container 2.
    let ipc = Ipc::builder().allow(AllowList::own_user().user(2000)).auto()?;
    let export = ipc.share(weights).ready_on(&stream).start()?;
    std::fs::write("/shared/w.ipc", export.descriptor().to_string())?; // an emptyDir volume of the pod

    // Container 2: the importer. 1000 is the `runAsUser` of container 1.
    let ipc = Ipc::builder().allow(AllowList::own_user().user(1000)).auto()?;
    let descriptor: Descriptor = std::fs::read_to_string("/shared/w.ipc")?.parse()?;
    let tensor = ipc.open(&descriptor).on(&stream)?;
    // end
    Ok(())
}

#[rustfmt::skip]
fn ascend_owner(tensor: Tensor, device: DeviceOrdinal, bytes: u64, acl_stream: *mut u8, descriptor: Descriptor) -> Result<()> {
    // begin docs/guide/ascend.md
    use device_ipc::{BorrowedStream, DevicePtr, DeviceRange, Ipc, OwnedRegion, Region};

    let range = DeviceRange::new(device, DevicePtr::new(tensor.data_ptr() as u64), bytes);
    // SAFETY: `tensor` keeps these bytes allocated for as long as it exists.
    let owner = unsafe { OwnedRegion::new(tensor, Region::new("ascend", range)) };
    // SAFETY: an `aclrtStream` of this device that exists until `start` has returned.
    let stream = unsafe { BorrowedStream::from_raw("ascend", device, acl_stream as u64) };
    let export = Ipc::named("ascend")?.share(owner).ready_on(&stream).start()?;

    // The importer, another process.
    let mapping = Ipc::named("ascend")?.open(&descriptor).on(&stream)?;
    // end
    Ok(())
}

#[rustfmt::skip]
fn ascend_allocation(range: DeviceRange, whole_allocation: DeviceRange) -> Region {
    // begin docs/guide/ascend.md
    Region::new("ascend", range).with_allocation(whole_allocation)
    // end
}

#[rustfmt::skip]
fn attachable(weights: Buffer) -> Result<()> {
    // begin docs/guide/program.md
    use device_ipc::{Dtype, Ipc};

    let export = Ipc::auto()?.share(weights).dtype(Dtype::F32).shape([4, 5]).start()?;
    std::fs::write("w.ipc", export.descriptor().to_string())?; // then, in a terminal: device-ipc attach @w.ipc read
    // end
    Ok(())
}

#[rustfmt::skip]
fn kept_weights(ipc: &Ipc, stream: Stream, new_version: Arc<AtomicBool>) -> Result<()> {
    // begin docs/guide/keeper.md
    let kept = ipc.find("keeper:llama").start()?; // waits until a keeper of this name answers, 30 s at most
    let weights = kept.open().on(&stream)?; // or at_home(), on_device(1)
    weights.on_dropped(move || new_version.store(true, Ordering::Release)); // `weights` stays valid: open the new version when it suits
    for (name, tensor) in weights.tensors() {
        println!("{name}: {:?} {:?}, version {}", tensor.dtype(), tensor.shape(), kept.version());
    }
    // end
    Ok(())
}

#[rustfmt::skip]
fn keep(ipc: &Ipc, export: Export, next: Export, timeout: Duration) -> Result<()> {
    // begin docs/guide/keeper.md
    let keeper = ipc.keep("llama", 1, export)?; // an export of one tensor, or of many
    keeper.answer(timeout)?; // in a loop, or try_answer() when the keeper's descriptor is readable
    drop(keeper.replace(2, next)); // the drop of the former export notifies the processes that have it open
    // end
    Ok(())
}

#[rustfmt::skip]
fn followed_weights(ipc: &Ipc, stream: Stream) -> Result<()> {
    // begin docs/guide/keeper.md
    let kept = ipc.find("keeper:llama").start()?;
    let mut weights = kept.open().reserved().on(&stream)?; // … capture graphs over the tensors of `weights` …
    if let Some(version) = weights.follow_on(&stream)? {
        println!("version {version}, at the same addresses"); // None: there is no newer one
    }
    // end
    Ok(())
}

#[rustfmt::skip]
fn remote_channel(ipc: Ipc, export: Export, key: device_ipc::Key, stream: Stream, timeout: Duration) -> Result<()> {
    // begin docs/guide/remote.md
    // One process listens at an address, and sends.
    let listener = ipc.listen_tcp("10.0.0.1:29531", &key).start()?;
    let channel = listener.accept(timeout)?;
    channel.send(Message::new().bytes(b"weights").export(&export), timeout)?;
    drop(export); // safe: the message keeps the memory allocated until the peer has copied or discarded it
    channel.close(timeout)?; // waits for that; after it, the process may exit

    // A process of another host connects, and receives. Both have the key, a shared secret of at least 16 random bytes.
    let channel = ipc.connect_tcp("10.0.0.1:29531", &key).timeout(timeout).start()?;
    let received = channel.receive(timeout)?;
    let weights = received.exports()[0].open().or_pulled().on(&stream)?; // opened if both are on one host, else copied
    // end
    Ok(())
}

#[rustfmt::skip]
fn operations() -> Result<()> {
    // begin docs/guide/operations.md
    std::fs::write("/var/lib/node_exporter/device_ipc.prom", device_ipc::counters().to_prometheus())?;
    device_ipc::shutdown(Duration::from_secs(30))?; // the error names the processes that still hold memory
    // end
    Ok(())
}

const PAGES: &[(&str, &str)] = &[
    ("README.md", include_str!("../../README.md")),
    ("docs/seeds/000.md", include_str!("../../docs/seeds/000.md")),
    ("docs/seeds/001.md", include_str!("../../docs/seeds/001.md")),
    ("docs/seeds/002.md", include_str!("../../docs/seeds/002.md")),
    ("docs/seeds/003.md", include_str!("../../docs/seeds/003.md")),
    ("docs/seeds/004.md", include_str!("../../docs/seeds/004.md")),
    ("docs/guide/sharing.md", include_str!("../../docs/guide/sharing.md")),
    ("docs/guide/bundle.md", include_str!("../../docs/guide/bundle.md")),
    ("docs/guide/channel.md", include_str!("../../docs/guide/channel.md")),
    ("docs/guide/ring.md", include_str!("../../docs/guide/ring.md")),
    ("docs/guide/reservation.md", include_str!("../../docs/guide/reservation.md")),
    ("docs/guide/staging.md", include_str!("../../docs/guide/staging.md")),
    ("docs/guide/remote.md", include_str!("../../docs/guide/remote.md")),
    ("docs/guide/cuda.md", include_str!("../../docs/guide/cuda.md")),
    ("docs/guide/interop.md", include_str!("../../docs/guide/interop.md")),
    ("docs/guide/kubernetes.md", include_str!("../../docs/guide/kubernetes.md")),
    ("docs/guide/ascend.md", include_str!("../../docs/guide/ascend.md")),
    ("docs/guide/mock.md", include_str!("../../docs/guide/mock.md")),
    ("docs/guide/keeper.md", include_str!("../../docs/guide/keeper.md")),
    ("docs/guide/program.md", include_str!("../../docs/guide/program.md")),
    ("docs/guide/operations.md", include_str!("../../docs/guide/operations.md")),
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
        assert_eq!(shown, compiled, "{page} and tests/suite/snippets.rs differ");
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
