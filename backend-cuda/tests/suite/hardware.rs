//! The backend on a real GPU, also between two processes. Without a GPU, each test reports it and passes.
//!
//! The conformance suite tests the behaviour of every backend; these tests are specific to CUDA.

use std::sync::Arc;
use std::time::Duration;

use crate::gpu::{backend, gate};
use cudarc::driver::{CudaContext, result};
use device_ipc_core::backend::{
    DeviceIpc, DeviceMemory, DeviceStream, HandleBytes, ReceivedHandle, TestKernels, ViewStream,
};
use device_ipc_core::{
    Access, AsStream, DeviceOrdinal, DeviceOwner, DevicePtr, DeviceRange, Error, ProcessIdentity,
};
use device_ipc_cuda::{CudaBackend, LEGACY, alloc_zeros, clone_htod};
use device_ipc_test_process::{Process, answer, hex, request, unhex};

const ZERO: DeviceOrdinal = DeviceOrdinal::new(0);
const ONE: DeviceOrdinal = DeviceOrdinal::new(1);

fn floats(backend: &CudaBackend, range: DeviceRange, stream: &dyn DeviceStream) -> Vec<f32> {
    let mut bytes = vec![0; range.len as usize];
    // SAFETY: the range is mapped, and its work has been ordered.
    unsafe { backend.read(range, &mut bytes, stream.as_borrowed()) }.unwrap();
    bytes.chunks(4).map(|chunk| f32::from_ne_bytes(chunk.try_into().unwrap())).collect()
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

#[test]
fn memory_operations_produce_the_expected_bytes() {
    let Some((backend, _alone)) = backend() else { return };
    eprintln!("{:?}\n{:?}", backend.info(), backend.devices().unwrap());
    let stream = backend.create_stream(ZERO).unwrap();
    // More elements than threads of the largest grid, so that the kernel must loop.
    let values: Vec<f32> = (0..2_000_003u32).map(|index| (index % 1000) as f32).collect();
    let bytes = bytes_of(&values);
    let range = backend.allocate(ZERO, bytes.len() as u64).unwrap();
    let copy = backend.allocate(ZERO, bytes.len() as u64).unwrap();
    // SAFETY: both ranges are ours, and all of it is on one stream.
    unsafe {
        backend.write(range, &bytes, stream.as_borrowed()).unwrap();
        backend.copy(copy, range, stream.as_borrowed()).unwrap();
        backend.fill(range, 0, stream.as_borrowed()).unwrap();
        backend.add_f32(copy, 0.5, stream.as_borrowed()).unwrap();
        backend.add_f32(copy.slice(4, 40).unwrap(), 1.0, stream.as_borrowed()).unwrap();
    }
    let got = floats(&backend, copy, &*stream);
    for (index, (got, value)) in got.iter().zip(&values).enumerate() {
        let expected = value + 0.5 + if (1..11).contains(&index) { 1.0 } else { 0.0 };
        assert_eq!(*got, expected, "element {index}");
    }
    assert!(floats(&backend, range, &*stream).iter().all(|value| *value == 0.0));
    // More bytes than the maximum of a staged write.
    let large = backend.allocate(ZERO, (64 << 20) + 1).unwrap();
    let mut bytes = vec![7; (64 << 20) + 1];
    // SAFETY: the range is ours, and all of it is on one stream; freed once, after all work has finished.
    unsafe {
        backend.write(large, &bytes, stream.as_borrowed()).unwrap();
        bytes.fill(0);
        backend.read(large, &mut bytes, stream.as_borrowed()).unwrap();
        backend.free(large).unwrap();
    }
    assert!(bytes == vec![7; (64 << 20) + 1]);
    let free = backend.memory_info(ZERO).unwrap();
    assert!(free.free_bytes > 0 && free.free_bytes < free.total_bytes);
    // SAFETY: freed once, after all work has finished.
    unsafe {
        backend.free(range).unwrap();
        backend.free(copy).unwrap();
    }
    let error = backend.allocate(ZERO, 1 << 50).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    eprintln!("{error}");
}

#[test]
fn write_on_busy_stream_returns_and_frees_its_bytes() {
    let Some((backend, _alone)) = backend() else { return };
    let stream = backend.create_stream(ZERO).unwrap();
    let event = backend.create_event(ZERO).unwrap();
    let range = backend.allocate(ZERO, 4 << 20).unwrap();
    assert!(event.query().unwrap(), "an event that was never recorded is complete");
    // The first write allocates the page-locked buffer.
    // SAFETY: the range is ours.
    unsafe { backend.write(range, &vec![1; 4 << 20], stream.as_borrowed()) }.unwrap();
    backend.synchronize(stream.as_borrowed()).unwrap();

    let gate = gate(&backend, &*stream);
    let mut bytes = vec![2; 4 << 20];
    // SAFETY: the range is ours.
    unsafe { backend.write(range, &bytes, stream.as_borrowed()) }.unwrap();
    bytes.fill(9);
    event.record(stream.as_borrowed()).unwrap();
    assert!(!event.query().unwrap());
    let error = event.synchronize(Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    gate.open();
    event.synchronize(Duration::from_secs(10)).unwrap();
    // SAFETY: as above.
    unsafe { backend.read(range, &mut bytes, stream.as_borrowed()) }.unwrap();
    assert!(bytes.iter().all(|byte| *byte == 2));
    // SAFETY: freed once, after all work has finished.
    unsafe { backend.free(range) }.unwrap();
}

#[test]
fn calls_preserve_the_current_context() {
    let Some((backend, _alone)) = backend() else { return };
    std::thread::spawn({
        let backend = Arc::clone(&backend);
        move || {
            assert_eq!(result::ctx::get_current().unwrap(), None);
            let range = backend.allocate(ZERO, 4096).unwrap();
            backend.open(vec![received(vec![0; 64])], ZERO, Access::ReadWrite).unwrap_err();
            assert_eq!(result::ctx::get_current().unwrap(), None);
            // SAFETY: freed once.
            unsafe { backend.free(range) }.unwrap();
        }
    })
    .join()
    .unwrap();
    let context = CudaContext::new(0).unwrap();
    context.bind_to_thread().unwrap();
    let other = DeviceOrdinal::new(backend.devices().unwrap().len() as u32 - 1);
    backend.synchronize_device(other).unwrap();
    backend.open(vec![received(vec![0; 64])], other, Access::ReadWrite).unwrap_err();
    assert_eq!(result::ctx::get_current().unwrap(), Some(context.cu_ctx()));
}

#[test]
fn memory_source_is_detected_and_unshareable_is_explained() {
    let Some((backend, _alone)) = backend() else { return };
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let extents = |ptr: u64, len| backend.extents_of(DeviceRange::new(ZERO, DevicePtr::new(ptr), len), None);

    let range = backend.allocate_as(ZERO, 10_000, LEGACY).unwrap();
    let inside = backend.extents_of(range.slice(100, 50).unwrap(), Some(range)).unwrap();
    assert_eq!(inside[0].allocation, range);
    let generation = inside[0].generation.expect("CUDA numbers its allocations");
    let error = extents(range.ptr.get() + 9_000, 1_001).unwrap_err();
    assert!(matches!(error, Error::InvalidRegion(_)), "{error}");
    let wrong_base = DeviceRange::new(ZERO, range.ptr.checked_add(64).unwrap(), 10);
    assert!(backend.extents_of(range, Some(wrong_base)).is_err());
    // SAFETY: freed once.
    unsafe { backend.free(range) }.unwrap();
    let again = backend.allocate_as(ZERO, 10_000, LEGACY).unwrap();
    let replaced = backend.extents_of(again, None).unwrap();
    assert_ne!(replaced[0].generation, Some(generation), "at {} after {}", again.ptr, range.ptr);

    for (ptr, word) in
        [(0, "null"), (64, "does not know"), ((&raw const stream).addr() as u64, "does not know")]
    {
        let error = extents(ptr, 1).unwrap_err();
        assert!(matches!(&error, Error::NotDeviceMemory { why, .. } if why.contains(word)), "{error}");
    }
    // SAFETY: the memory is not read.
    let mut pinned = unsafe { stream.context().alloc_pinned::<u8>(4096) }.unwrap();
    let error = extents(pinned.as_mut_ptr().unwrap().addr() as u64, 1).unwrap_err();
    assert!(matches!(&error, Error::NotDeviceMemory { why, .. } if why.contains("page-locked")), "{error}");

    let pooled = stream.alloc_zeros::<f32>(1000).unwrap();
    let error = backend.extents_of(pooled.region().range, None).unwrap_err();
    assert!(
        matches!(&error, Error::NotShareable { remedy, .. }
            if remedy.contains("device_ipc::cuda::make_pool_shareable(device)")
                && remedy.contains("device_ipc::cuda::alloc_zeros")),
        "{error}"
    );
    eprintln!("{error}");
    // SAFETY: freed by the driver with the process.
    let managed =
        unsafe { result::malloc_managed(4096, cudarc::driver::sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL) };
    let error = extents(managed.unwrap(), 1).unwrap_err();
    assert!(matches!(&error, Error::NotShareable { kind, .. } if kind.contains("managed")), "{error}");

    let shareable = alloc_zeros::<f32>(&stream, 1000).unwrap();
    let region = shareable.region();
    assert_eq!(region.range.len, 4000);
    let extent = backend.extents_of(region.range, None).unwrap().remove(0);
    assert_eq!(extent.allocation.len, 4000);
    assert_eq!(backend.export(&extent, None).unwrap().bytes.as_slice().len(), 64);
    if backend.devices().unwrap().len() > 1 {
        let error = backend.extents_of(DeviceRange { device: ONE, ..region.range }, None).unwrap_err();
        assert!(error.to_string().contains("memory of device 0, but device 1 was stated"), "{error}");
    }
    // SAFETY: freed once.
    unsafe { backend.free(again) }.unwrap();
}

#[test]
fn cudarc_frees_slices_and_views_free_nothing() {
    let Some((backend, _alone)) = backend() else { return };
    // A second stream makes cudarc keep the events of slices and views.
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let values: Vec<f32> = (0..1000).map(|index| index as f32).collect();
    let slice = clone_htod(&stream, &values).unwrap();
    let range = slice.region().range;
    // SAFETY: the slice lives, and there is no other view.
    let mut view = unsafe { stream.view_mut::<f32>(range) }.unwrap();
    assert_eq!(stream.clone_dtoh(&view).unwrap(), values);
    stream.memset_zeros(&mut view).unwrap();
    let half = vec![3.0; 500];
    stream.memcpy_htod(&half, &mut view.as_view_mut().slice_mut(500..)).unwrap();
    assert_eq!(stream.clone_dtoh(&view.as_view().slice(499..501)).unwrap(), [0.0, 3.0]);
    drop(view);
    // SAFETY: the slice lives.
    let view = unsafe { stream.view::<f32>(range) }.unwrap();
    assert_eq!(stream.clone_dtoh(&view).unwrap()[500..], half);
    drop(view);
    assert_eq!(backend.extents_of(range, None).unwrap()[0].allocation, range, "the views freed nothing");
    drop(slice);
    stream.synchronize().unwrap();
    context.check_err().unwrap();
    let error = backend.extents_of(range, None);
    eprintln!("after cuMemFreeAsync: {error:?}");

    let free = || backend.memory_info(ZERO).unwrap().free_bytes;
    let before = free();
    // Eight times the device's memory.
    for _ in 0..64 {
        drop(alloc_zeros::<u8>(&stream, (before / 8) as usize).unwrap());
        stream.synchronize().unwrap();
    }
    assert!(before.saturating_sub(free()) < before / 8, "memory of dropped slices was not freed");
}

fn received(bytes: Vec<u8>) -> ReceivedHandle {
    ReceivedHandle {
        kind: LEGACY,
        bytes: HandleBytes::new(bytes),
        fds: Vec::new(),
        size: 0,
        generation: None,
        home: None,
        home_identity: None,
        exporter: ProcessIdentity::current().unwrap(),
    }
}

#[test]
fn importer_opens_block_on_every_device_and_waits_for_event() {
    let Some((backend, _alone)) = backend() else { return };
    let values: Vec<f32> = (0..5000).map(|index| index as f32).collect();
    let range = backend.allocate_as(ZERO, 20_000, LEGACY).unwrap();
    let neighbour = backend.allocate_as(ZERO, 20_000, LEGACY).unwrap();
    let stream = backend.create_stream(ZERO).unwrap();
    let exported = backend.export(&backend.extents_of(range, None).unwrap()[0], None).unwrap();
    assert_eq!(format!("{:?}", exported.bytes), "HandleBytes(64 bytes)");

    let own = backend
        .open(vec![received(exported.bytes.as_slice().to_vec())], ZERO, Access::ReadWrite)
        .unwrap_err();
    assert!(own.to_string().contains("CUDA_ERROR_INVALID_CONTEXT (201)"), "{own}");
    eprintln!("{own}");

    for device in 0..backend.devices().unwrap().len() {
        let event = backend.create_event(ZERO).unwrap();
        assert!(backend.capabilities(ZERO).unwrap().ipc_events);
        // SAFETY: the range is ours.
        unsafe { backend.fill(range, 0xff, stream.as_borrowed()) }.unwrap();
        backend.synchronize(stream.as_borrowed()).unwrap();
        let mut other = Process::of_test(concat!(module_path!(), "::the_other_process"), &[]);
        let handles = [exported.bytes.as_slice(), event.export().unwrap().as_slice()].map(hex).join(" ");
        assert_eq!(other.ask(&format!("{device} {handles}")), "open");
        // The other process waits while the stream is blocked.
        let gate = gate(&backend, &*stream);
        // SAFETY: the range is ours.
        unsafe { backend.write(range, &bytes_of(&values), stream.as_borrowed()) }.unwrap();
        event.record(stream.as_borrowed()).unwrap();
        assert_eq!(other.ask("recorded"), "waits");
        gate.open();
        other.finish();
        let got = floats(&backend, range, &*stream);
        assert!(got.iter().zip(&values).all(|(got, value)| *got == value + 1.0), "device {device}");
    }
    backend.unexport(exported).unwrap();
    // SAFETY: freed once, after every importer has exited.
    unsafe {
        backend.free(range).unwrap();
        backend.free(neighbour).unwrap();
    }
}

#[test]
#[ignore = "the child of another test"]
fn the_other_process() {
    let line = request().expect("the test sends a device, memory and an event");
    let [device, memory, event] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let (memory, event) = (unhex(memory), unhex(event));
    let backend = CudaBackend::load().unwrap();
    let on = DeviceOrdinal::new(device.parse().unwrap());

    let error = backend.open(vec![received(memory.clone())], on, Access::ReadOnly).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    let error = backend.open(vec![received(vec![0; 64])], on, Access::ReadWrite).unwrap_err();
    assert!(error.to_string().contains("The handle is corrupt"), "{error}");
    let error = backend.open_event(&[0; 64], on).unwrap_err();
    assert!(error.to_string().contains("The handle is corrupt"), "{error}");

    let mut handle = received(memory);
    handle.home = Some(ZERO);
    let opened = backend.open(vec![handle], on, Access::ReadWrite).unwrap();
    assert_eq!((opened.range.len, opened.range.device), (20_000, on));
    let error = backend.extents_of(opened.range, None).unwrap_err();
    assert!(matches!(error, Error::SharedOn { .. }), "{error}");

    // cudarc's types on the importer's side, in the same primary context.
    let stream = CudaContext::new(on.index()).unwrap().new_stream().unwrap();
    let event = backend.open_event(&event, on).unwrap();
    assert!(matches!(event.export().unwrap_err(), Error::Unsupported { .. }));
    answer("open");
    request().expect("the exporter lives");
    event.wait_on(stream.as_stream()).unwrap();
    assert!(!event.query().unwrap(), "the exporter is not there yet, so this proves nothing about waiting");
    answer("waits");
    {
        // SAFETY: mapped until `close` below, and there is one view.
        let mut view = unsafe { stream.view_mut::<f32>(opened.range) }.unwrap();
        let values: Vec<f32> = stream.clone_dtoh(&view).unwrap();
        assert!(
            values.iter().enumerate().all(|(index, value)| *value == index as f32),
            "the wait did not wait"
        );
        stream.memcpy_htod(&values, &mut view).unwrap();
    }
    // SAFETY: the range is mapped, and the importer's device can access it.
    unsafe { backend.add_f32(opened.range, 1.0, stream.as_stream()) }.unwrap();
    event.synchronize(Duration::from_secs(1)).unwrap();
    backend.synchronize(stream.as_stream()).unwrap();
    backend.close(opened).unwrap();
}
