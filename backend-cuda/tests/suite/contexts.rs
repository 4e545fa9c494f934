//! Contexts of the calling thread, streams of other contexts, and device resets. Without a GPU, each test reports it
//! and passes.

mod resets;

use std::ptr::NonNull;
use std::time::Duration;

use crate::capture::block;
use crate::gpu::backend;
use crate::raw::Raw;
use cudarc::driver::CudaContext;
use device_ipc_core::backend::{
    DeviceIpc, DeviceMemory, HandleBytes, HandleKind, ReceivedHandle, TestKernels, ViewStream,
};
use device_ipc_core::{
    Access, AsStream, BorrowedStream, DeviceOrdinal, DeviceOwner, DevicePtr, DeviceRange, Error,
    ProcessIdentity, Result,
};
use device_ipc_cuda::{CudaBackend, LEGACY, NAME, POOL, VIRTUAL_MEMORY, alloc_zeros, clone_htod};
use device_ipc_test_process::{Process, hex, serve, unhex};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

const ZERO: DeviceOrdinal = DeviceOrdinal::new(0);
const NOWHERE: DeviceOrdinal = DeviceOrdinal::new(1000);
const SOON: Duration = Duration::from_secs(10);
const BYTES: u64 = 1 << 20;

/// The test that runs the exporter.
const EXPORTER: &str = concat!(module_path!(), "::the_exporter");

/// Shared pages of this process.
struct Pages(NonNull<u8>);

impl Pages {
    const LEN: usize = 64 * 1024;

    fn map() -> Self {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let pages = unsafe { mmap_anonymous(std::ptr::null_mut(), Self::LEN, protection, MapFlags::SHARED) };
        Self(NonNull::new(pages.unwrap().cast()).unwrap())
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped above, and no longer used.
        unsafe { munmap(self.0.as_ptr().cast(), Self::LEN) }.unwrap();
    }
}

/// Handles of memory and of an event of another process.
#[derive(Clone)]
struct Foreign {
    memory: Vec<u8>,
    event: Vec<u8>,
}

impl Foreign {
    fn of(exporter: &mut Process) -> Self {
        Self::parse(&exporter.ask("export"))
    }

    fn parse(text: &str) -> Self {
        let (memory, event) = text.split_once(' ').unwrap();
        Self { memory: unhex(memory), event: unhex(event) }
    }

    fn received(&self) -> ReceivedHandle {
        ReceivedHandle {
            kind: LEGACY,
            bytes: HandleBytes::new(self.memory.clone()),
            fds: Vec::new(),
            size: BYTES,
            generation: None,
            home: Some(ZERO),
            home_identity: None,
            exporter: ProcessIdentity::current().unwrap(),
        }
    }
}

#[test]
#[ignore = "the child of the other tests"]
fn the_exporter() {
    let backend = CudaBackend::load().unwrap();
    let range = backend.allocate(ZERO, BYTES).unwrap();
    let event = backend.create_event(ZERO).unwrap();
    let extent = backend.extents_of(range, None).unwrap().remove(0);
    serve(|_, _| {
        let memory = backend.export(&extent, Some(LEGACY)).unwrap();
        format!("{} {}", hex(memory.bytes.as_slice()), hex(event.export().unwrap().as_slice()))
    });
}

/// Checks after every call that the caller's context is unchanged.
struct Watch<'a> {
    raw: &'a Raw,
    expected: u64,
}

impl Watch<'_> {
    fn check(&self, call: &str) {
        assert_eq!(self.raw.current(), self.expected, "the caller's context after {call}");
    }
}

macro_rules! kept {
    ($watch:ident, $call:expr) => {{
        let result = $call;
        $watch.check(stringify!($call));
        result
    }};
}

#[test]
fn calls_preserve_the_current_context() {
    let Some((backend, _alone)) = backend() else { return };
    let raw = Raw::of(&backend);
    let mut exporter = Process::of_test(EXPORTER, &[]);
    let foreign = Foreign::of(&mut exporter);
    let last = backend.devices().unwrap().len() as u32 - 1;
    let (first_primary, last_primary) = (raw.retain_primary(0), raw.retain_primary(last));
    let (own, another) = (raw.create_context(0), raw.create_context(last as i32));
    for stack in
        [vec![], vec![first_primary], vec![last_primary], vec![last_primary, own], vec![own, another]]
    {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for context in &stack {
                    raw.push(*context);
                }
                let watch = Watch { raw: &raw, expected: stack.last().copied().unwrap_or(0) };
                of_the_backend(&backend, &foreign, &watch);
                of_memory_and_streams(&backend, &watch);
                of_timelines(&backend, &watch);
                of_cudarc(&backend, &watch);
                for context in stack.iter().rev() {
                    assert_eq!(raw.pop(), *context);
                }
                assert_eq!(raw.current(), 0);
            });
        });
    }
    exporter.finish();
}

#[test]
fn nested_calls_use_the_context_of_their_device() {
    let Some((backend, _alone)) = backend() else { return };
    let raw = Raw::of(&backend);
    let last = DeviceOrdinal::new(backend.devices().unwrap().len() as u32 - 1);
    let (primary, own) = (raw.retain_primary(0), raw.create_context(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            raw.push(own);
            let watch = Watch { raw: &raw, expected: own };
            let mut reached = Vec::new();
            let mut calls = || {
                for device in [ZERO, last, ZERO] {
                    // The driver refuses memory of another device than the one whose context is current.
                    let range = backend.allocate(device, BYTES).unwrap();
                    let extent = backend.extents_of(range, None).unwrap().remove(0);
                    let exported = backend.export(&extent, None).unwrap();
                    assert_eq!(exported.extent.allocation.device, device);
                    backend.unexport(exported).unwrap();
                    // SAFETY: freed once, and not used.
                    unsafe { backend.free(range) }.unwrap();
                    reached.push((device, raw.current()));
                }
            };
            kept!(watch, backend.with_device_context(ZERO, &mut calls));
            assert_eq!(
                reached,
                [ZERO, last, ZERO].map(|device| (device, primary)),
                "one entry around all of them"
            );
            let mut made = false;
            kept!(
                watch,
                backend.with_device_context(NOWHERE, &mut || {
                    made = backend.allocate(NOWHERE, BYTES).is_err();
                })
            );
            assert!(made, "the calls are made, and return errors");
            // Foreign code may leave another context current, or none.
            for left in [own, raw.retain_primary(last.get()), 0] {
                let mut reached = 0;
                let mut body = || {
                    raw.set_current(left);
                    // The driver refuses memory of another device than the one whose context is current.
                    let range = backend.allocate(ZERO, BYTES).unwrap();
                    backend.extents_of(range, None).unwrap();
                    reached = raw.current();
                    // SAFETY: freed once, and not used.
                    unsafe { backend.free(range) }.unwrap();
                };
                kept!(watch, backend.with_device_context(ZERO, &mut body));
                // After a pop, the next context of the stack is current: the caller's.
                assert_eq!(reached, if left == 0 { own } else { left });
            }
            assert_eq!(raw.pop(), own);
        });
    });
}

fn of_the_backend(backend: &CudaBackend, foreign: &Foreign, watch: &Watch<'_>) {
    kept!(watch, CudaBackend::load()).unwrap();
    kept!(watch, CudaBackend::load_from("/nowhere")).unwrap_err();
    kept!(watch, backend.info());
    kept!(watch, backend.devices()).unwrap();
    kept!(watch, backend.handle_kinds());
    kept!(watch, backend.visible_devices_variable());
    kept!(watch, backend.peer_access(ZERO, ZERO)).unwrap();
    kept!(watch, backend.peer_access(ZERO, NOWHERE)).unwrap_err();
    kept!(watch, backend.capabilities(ZERO)).unwrap();
    kept!(watch, backend.capabilities(NOWHERE)).unwrap_err();
    kept!(watch, backend.local_peer_id(ZERO)).unwrap();
    kept!(watch, backend.synchronize_device(ZERO)).unwrap();
    kept!(watch, backend.synchronize_device(NOWHERE)).unwrap_err();
    kept!(watch, backend.fabric(ZERO)).unwrap();

    let range = kept!(watch, backend.allocate(ZERO, BYTES)).unwrap();
    let extent = kept!(watch, backend.extents_of(range, None)).unwrap().remove(0);
    kept!(watch, backend.extents_of(DeviceRange::new(ZERO, DevicePtr::new(64), 1), None)).unwrap_err();
    kept!(watch, backend.extents_of(DeviceRange { len: u64::MAX / 2, ..range }, None)).unwrap_err();
    kept!(watch, backend.export(&extent, Some(HandleKind(99)))).unwrap_err();
    let exported = kept!(watch, backend.export(&extent, None)).unwrap();
    kept!(watch, backend.reach(&exported));
    kept!(watch, backend.authorize(&exported, &[])).unwrap();
    kept!(watch, backend.unexport(exported)).unwrap();
    // SAFETY: freed once, and not used.
    kept!(watch, unsafe { backend.free(range) }).unwrap();

    let opened = kept!(watch, backend.open(vec![foreign.received()], ZERO, Access::ReadWrite)).unwrap();
    kept!(watch, backend.close(opened)).unwrap();
    kept!(watch, backend.open(vec![foreign.received()], NOWHERE, Access::ReadWrite)).unwrap_err();
    kept!(watch, backend.open(vec![foreign.received()], ZERO, Access::ReadOnly)).unwrap_err();
    let zeros = ReceivedHandle { bytes: HandleBytes::new([0; 64]), ..foreign.received() };
    kept!(watch, backend.open(vec![zeros], ZERO, Access::ReadWrite)).unwrap_err();

    kept!(watch, backend.create_event(NOWHERE)).unwrap_err();
    kept!(watch, backend.open_event(&[0; 64], ZERO)).unwrap_err();
    kept!(watch, backend.open_event(&[0; 63], ZERO)).unwrap_err();
    let theirs = kept!(watch, backend.open_event(&foreign.event, ZERO)).unwrap();
    let event = kept!(watch, backend.create_event(ZERO)).unwrap();
    let stream = kept!(watch, backend.create_stream(ZERO)).unwrap();
    kept!(watch, event.device());
    kept!(watch, event.export()).unwrap();
    kept!(watch, theirs.export()).unwrap_err();
    let blocked = kept!(watch, block(backend, stream.as_borrowed()));
    kept!(watch, event.record(stream.as_borrowed())).unwrap();
    kept!(watch, event.query()).unwrap();
    kept!(watch, event.wait_on(stream.as_borrowed())).unwrap();
    kept!(watch, theirs.wait_on(stream.as_borrowed())).unwrap();
    kept!(watch, event.synchronize(Duration::ZERO)).unwrap_err();
    drop(blocked);
    kept!(watch, event.synchronize(SOON)).unwrap();
    let elsewhere = backend.devices().unwrap().last().unwrap().ordinal;
    if elsewhere != ZERO {
        let other = kept!(watch, backend.create_stream(elsewhere)).unwrap();
        kept!(watch, event.record(other.as_borrowed())).unwrap_err();
        kept!(watch, event.wait_on(other.as_borrowed())).unwrap();
        kept!(watch, backend.synchronize(other.as_borrowed())).unwrap();
        kept!(watch, drop(other));
    }
    kept!(watch, drop(event));
    kept!(watch, drop(theirs));
    kept!(watch, drop(stream));
}

fn of_memory_and_streams(backend: &CudaBackend, watch: &Watch<'_>) {
    kept!(watch, backend.allocate(NOWHERE, 1)).unwrap_err();
    kept!(watch, backend.allocate(ZERO, 0)).unwrap_err();
    kept!(watch, backend.allocate(ZERO, 1 << 50)).unwrap_err();
    kept!(watch, backend.allocate_as(ZERO, 1, HandleKind(99))).unwrap_err();
    kept!(watch, backend.memory_info(ZERO)).unwrap();
    kept!(watch, backend.create_stream(NOWHERE)).unwrap_err();
    let stream = kept!(watch, backend.create_stream(ZERO)).unwrap();
    let on = stream.as_borrowed();
    for kind in backend.handle_kinds() {
        let Ok(range) = kept!(watch, backend.allocate_as(ZERO, BYTES, kind.kind)) else {
            assert!(!matches!(kind.kind, LEGACY | VIRTUAL_MEMORY | POOL), "{} should work", kind.name);
            continue;
        };
        let half = range.slice(0, BYTES / 2).unwrap();
        let mut bytes = vec![0; BYTES as usize / 2];
        // SAFETY: the memory is ours, and all of it is on one stream, which is waited for before it is freed.
        unsafe {
            kept!(watch, backend.fill(range, 1, on)).unwrap();
            kept!(watch, backend.copy(half, range.slice(BYTES / 2, BYTES / 2).unwrap(), on)).unwrap();
            kept!(watch, backend.copy(half, range, on)).unwrap_err();
            kept!(watch, backend.write(half, &bytes, on)).unwrap();
            kept!(watch, backend.write(range, &bytes, on)).unwrap_err();
            kept!(watch, backend.add_f32(range.slice(0, 64).unwrap(), 1.0, on)).unwrap();
            kept!(watch, backend.add_f32(range.slice(1, 4).unwrap(), 1.0, on)).unwrap_err();
            kept!(watch, backend.read(half, &mut bytes, on)).unwrap();
            kept!(watch, backend.read(range, &mut bytes, on)).unwrap_err();
            kept!(watch, backend.synchronize(on)).unwrap();
            kept!(watch, backend.free(range)).unwrap();
        }
        assert_eq!(bytes[..4], 1.0f32.to_ne_bytes());
    }
}

fn of_timelines(backend: &CudaBackend, watch: &Watch<'_>) {
    let timelines = kept!(watch, backend.timelines()).unwrap();
    let pages = Pages::map();
    let stream = backend.create_stream(ZERO).unwrap();
    // SAFETY: the pages outlive their registration; the stream is waited for before it ends.
    unsafe {
        kept!(watch, timelines.register(NOWHERE, pages.0, Pages::LEN)).unwrap_err();
        kept!(watch, timelines.unregister(ZERO, pages.0)).unwrap_err();
        if !backend.capabilities(ZERO).unwrap().timelines {
            kept!(watch, timelines.register(ZERO, pages.0, Pages::LEN)).unwrap_err();
            return;
        }
        let word = kept!(watch, timelines.register(ZERO, pages.0, Pages::LEN)).unwrap();
        kept!(watch, timelines.write_value(word, 1, stream.as_borrowed())).unwrap();
        kept!(watch, timelines.wait_value(word, 1, stream.as_borrowed())).unwrap();
        backend.synchronize(stream.as_borrowed()).unwrap();
        kept!(watch, timelines.unregister(ZERO, pages.0)).unwrap();
    }
}

fn of_cudarc(backend: &CudaBackend, watch: &Watch<'_>) {
    // A second stream makes cudarc keep events, which it creates and destroys in its own context.
    let (context, stream) = {
        let before = watch.raw.current();
        let context = CudaContext::new(0).unwrap();
        let streams = [context.new_stream().unwrap(), context.new_stream().unwrap()];
        // cudarc's own calls leave its context current; the test restores the previous one.
        // SAFETY: the context was current before, or is none.
        unsafe { cudarc::driver::result::ctx::set_current(before as usize as *mut _) }.unwrap();
        (context, streams)
    };
    let [stream, _second] = stream;
    let slice = kept!(watch, clone_htod(&stream, &[1.0f32; 64])).unwrap();
    kept!(watch, alloc_zeros::<f32>(&stream, 0)).unwrap_err();
    let zeros = kept!(watch, alloc_zeros::<f32>(&stream, 64)).unwrap();
    kept!(watch, stream.as_stream());
    let region = kept!(watch, slice.region());
    // SAFETY: the slices live, and there are no other views.
    unsafe {
        let view = kept!(watch, stream.view::<f32>(region.range)).unwrap();
        kept!(watch, drop(view));
        let view = kept!(watch, stream.view_mut::<f32>(region.range)).unwrap();
        kept!(watch, drop(view));
        kept!(watch, stream.view::<f32>(DeviceRange { device: NOWHERE, ..region.range })).unwrap_err();
    }
    kept!(watch, backend.synchronize(stream.as_stream())).unwrap();
    std::thread::spawn(move || drop((slice, zeros, stream, _second, context))).join().unwrap();
}

#[test]
fn stream_of_another_context_is_rejected() {
    let Some((backend, _alone)) = backend() else { return };
    let raw = Raw::of(&backend);
    let own = raw.create_context(0);
    raw.push(own);
    let stream = raw.create_stream(1);
    // SAFETY: a stream of device 0, though not of its primary context, which outlives the test.
    let stream = unsafe { BorrowedStream::from_raw(NAME, ZERO, stream) };
    let event = backend.create_event(ZERO).unwrap();
    let range = backend.allocate(ZERO, 64).unwrap();
    let mut byte = [0; 64];
    // SAFETY: the range is ours; no work is submitted.
    let refused: [(&str, Result<()>); 9] = unsafe {
        [
            ("record", event.record(stream)),
            ("wait", event.wait_on(stream)),
            ("fill", backend.fill(range, 1, stream)),
            ("copy", backend.copy(range, range, stream)),
            ("write", backend.write(range, &byte, stream)),
            ("read", backend.read(range, &mut byte, stream)),
            ("add", backend.add_f32(range, 1.0, stream)),
            ("host_function", backend.host_function(Box::new(|| ()), stream)),
            ("synchronize", backend.synchronize(stream)),
        ]
    };
    for (call, result) in refused {
        let error = result.expect_err(call);
        assert!(matches!(error, Error::Unsupported { .. }), "{call}: {error}");
        let text = error.to_string();
        assert!(text.contains("outside the primary context of device 0"), "{call}: {text}");
        assert!(text.contains("CudaContext::new"), "{call}: {text}");
    }
    assert_eq!(raw.current(), own);
    // The default stream is that of the primary context, whichever context is current.
    // SAFETY: the default stream lives as long as its context; the range is ours.
    unsafe {
        let default = BorrowedStream::from_raw(NAME, ZERO, 0);
        backend.fill(range, 7, default).unwrap();
        backend.read(range, &mut byte, default).unwrap();
        backend.free(range).unwrap();
    }
    assert_eq!(byte, [7; 64]);
    assert_eq!(raw.pop(), own);
}

#[test]
fn memory_of_another_context_is_shareable() {
    let Some((backend, _alone)) = backend() else { return };
    let raw = Raw::of(&backend);
    raw.push(raw.create_context(0));
    // SAFETY: freed below.
    let address = unsafe { cudarc::driver::result::malloc_sync(4096) }.unwrap();
    let range = DeviceRange::new(ZERO, DevicePtr::new(address), 4096);
    let extent = backend.extents_of(range, None).unwrap().remove(0);
    assert_eq!(extent.allocation, range);
    assert_eq!(backend.export(&extent, None).unwrap().kind, LEGACY);
    // SAFETY: allocated above.
    unsafe { cudarc::driver::result::free_sync(address) }.unwrap();
    raw.pop();
}
