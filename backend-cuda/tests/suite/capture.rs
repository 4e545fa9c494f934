//! Streams that are being captured into graphs: work is captured, immediate operations are refused, and every call
//! leaves the capture intact. Without a GPU, each test reports it and passes.

use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use crate::gpu::backend;
use crate::raw::{CAPTURE_INVALIDATED, Raw};
use cudarc::driver::CudaContext;
use device_ipc_core::backend::{DeviceIpc, DeviceMemory, TestKernels, ViewStream};
use device_ipc_core::{AsStream, BorrowedStream, DeviceOrdinal, DeviceOwner, Error, Ipc, Result};
use device_ipc_cuda::{CudaBackend, NAME, alloc_zeros, clone_htod};

const ZERO: DeviceOrdinal = DeviceOrdinal::new(0);
const BYTES: u64 = 1 << 20;
const NON_BLOCKING: u64 = 1;
const BLOCKING: u64 = 0;
const GLOBAL: u64 = 0;
const MODES: [u64; 3] = [GLOBAL, 1, 2];

/// A stream of the primary context that this thread can capture.
struct Captured<'a> {
    raw: &'a Raw,
    stream: u64,
}

impl<'a> Captured<'a> {
    fn new(raw: &'a Raw, flags: u64) -> Self {
        raw.push(raw.retain_primary(0));
        Self { raw, stream: raw.create_stream(flags) }
    }

    fn begin(&self, mode: u64) {
        self.raw.begin_capture(self.stream, mode);
    }

    fn borrow(&self) -> BorrowedStream<'static> {
        // SAFETY: a stream of device 0 that is never destroyed.
        unsafe { BorrowedStream::from_raw(NAME, ZERO, self.stream) }
    }

    /// Returns the number of nodes, if the capture is intact.
    fn end(&self) -> Result<usize, i32> {
        self.raw.end_capture(self.stream)
    }
}

impl Drop for Captured<'_> {
    fn drop(&mut self) {
        self.raw.pop();
    }
}

#[test]
fn unknown_capture_is_invalidated_only_by_the_driver() {
    let Some((backend, _alone)) = backend() else { return };
    let raw = Raw::of(&backend);
    let captured = Captured::new(&raw, NON_BLOCKING);
    captured.begin(GLOBAL);
    // SAFETY: freed below, if it is allocated.
    let refused = unsafe { cudarc::driver::result::malloc_sync(64) };
    assert!(refused.is_err(), "without this the other tests prove nothing");
    assert_eq!(captured.end(), Err(CAPTURE_INVALIDATED));
}

#[test]
fn calls_of_the_capturing_thread_preserve_the_capture() {
    let Some((backend, _alone)) = backend() else { return };
    let raw = Raw::of(&backend);
    for mode in MODES {
        let captured = Captured::new(&raw, NON_BLOCKING);
        captured.begin(mode);
        on_other_streams(&backend);
        assert_eq!(captured.end(), Ok(0), "mode {mode}");
    }
}

#[test]
fn calls_of_another_thread_preserve_the_capture() {
    let Some((backend, _alone)) = backend() else { return };
    let raw = Raw::of(&backend);
    for mode in MODES {
        let captured = Captured::new(&raw, NON_BLOCKING);
        captured.begin(mode);
        std::thread::scope(|scope| {
            scope.spawn(|| on_other_streams(&backend));
        });
        assert_eq!(captured.end(), Ok(0), "mode {mode}");
    }
}

/// A new backend creates its contexts, kernels, staging buffers and probes during the capture.
#[test]
fn lazy_objects_are_created_during_a_capture() {
    let Some((first, _alone)) = backend() else { return };
    let raw = Raw::of(&first);
    let captured = Captured::new(&raw, NON_BLOCKING);
    captured.begin(GLOBAL);
    let backend = CudaBackend::load().unwrap();
    on_other_streams(&backend);
    drop(backend);
    assert_eq!(captured.end(), Ok(0));
}

fn on_other_streams(backend: &CudaBackend) {
    let capabilities = backend.capabilities(ZERO).unwrap();
    assert!(capabilities.ipc_events);
    backend.memory_info(ZERO).unwrap();
    let stream = backend.create_stream(ZERO).unwrap();
    let on = stream.as_borrowed();
    for kind in backend.handle_kinds() {
        let Ok(range) = backend.allocate_as(ZERO, BYTES, kind.kind) else { continue };
        let extent = backend.extents_of(range, None).unwrap().remove(0);
        let exported = backend.export(&extent, None).unwrap();
        backend.unexport(exported).unwrap();
        let mut bytes = vec![3; BYTES as usize];
        // SAFETY: the memory is ours, and all of it is on one stream.
        unsafe {
            backend.write(range, &bytes, on).unwrap();
            backend.fill(range.slice(0, 64).unwrap(), 0, on).unwrap();
            backend.add_f32(range.slice(0, 64).unwrap(), 1.0, on).unwrap();
            backend.read(range, &mut bytes, on).unwrap();
            backend.free(range).unwrap();
        }
        assert_eq!((&bytes[..4], bytes[64]), (&1.0f32.to_ne_bytes()[..], 3), "{}", kind.name);
    }
    let event = backend.create_event(ZERO).unwrap();
    event.export().unwrap();
    event.record(on).unwrap();
    event.wait_on(on).unwrap();
    event.synchronize(Duration::from_secs(10)).unwrap();
    assert!(event.query().unwrap());
    backend.synchronize(on).unwrap();
    backend.open_event(&[0; 64], ZERO).unwrap_err();
}

#[test]
fn captured_stream_records_work_and_rejects_immediate_calls() {
    let Some((backend, _alone)) = backend() else { return };
    let raw = Raw::of(&backend);
    let range = backend.allocate(ZERO, 4096).unwrap();
    let half = |at| range.slice(at, 2048).unwrap();
    let busy = backend.create_stream(ZERO).unwrap();
    let (reached, late) = (backend.create_event(ZERO).unwrap(), backend.create_event(ZERO).unwrap());
    reached.record(busy.as_borrowed()).unwrap();
    backend.synchronize(busy.as_borrowed()).unwrap();
    let blocked = block(&backend, busy.as_borrowed());
    late.record(busy.as_borrowed()).unwrap();
    let mut bytes = vec![0; 2048];
    for mode in MODES {
        let captured = Captured::new(&raw, NON_BLOCKING);
        captured.begin(mode);
        let on = captured.borrow();
        // SAFETY: the range is ours, and stays allocated.
        let refused: Vec<(&str, Result<()>)> = unsafe {
            backend.fill(half(0), 1, on).unwrap();
            let refused = vec![
                ("write", backend.write(half(0), &bytes, on)),
                ("read", backend.read(half(0), &mut bytes, on)),
                ("synchronize", backend.synchronize(on)),
                ("host_function", backend.host_function(Box::new(|| ()), on)),
                ("record", late.record(on)),
                ("wait", if mode == GLOBAL { late.wait_on(on) } else { backend.synchronize(on) }),
            ];
            backend.copy(half(2048), half(0), on).unwrap();
            backend.add_f32(half(0), 1.0, on).unwrap();
            refused
        };
        for (call, result) in refused {
            let error = result.expect_err(call);
            assert!(matches!(error, Error::StreamCapturing { .. }), "{call}: {error}");
            assert!(error.to_string().contains("before the capture begins"), "{call}: {error}");
        }
        reached.wait_on(on).expect("the event has completed");
        assert_eq!(captured.end(), Ok(3), "fill, copy and kernel, in mode {mode}");
    }
    drop(blocked);
    backend.synchronize(busy.as_borrowed()).unwrap();
    // SAFETY: no work uses it any longer: no graph was launched.
    unsafe { backend.free(range) }.unwrap();
}

#[test]
fn ring_rejects_captured_stream_without_data_loss() {
    let Some((backend, _alone)) = backend() else { return };
    if !backend.capabilities(ZERO).unwrap().timelines {
        eprintln!("skipped: the device has no timelines");
        return;
    }
    let raw = Raw::of(&backend);
    let ipc = Ipc::with_backend(backend.clone());
    let stream = ipc.create_stream(0).unwrap();
    let mut ring = ipc.ring(ipc.allocate(0, 4096).unwrap()).slots(1).start().unwrap();
    let mut reader = ipc.open_ring(ring.descriptor()).on(&stream).unwrap();
    let refused = |error: &Error| assert!(matches!(error, Error::StreamCapturing { .. }), "{error}");
    let captured = Captured::new(&raw, NON_BLOCKING);
    captured.begin(GLOBAL);
    refused(&reader.next_ahead(&captured.borrow()).unwrap_err());
    refused(&ring.write(&captured.borrow()).unwrap().publish().unwrap_err());
    assert_eq!(ring.sequence(), 0, "it has not been published");
    ring.write(&stream).unwrap().publish().unwrap();
    let slot = reader.next(Duration::from_secs(10)).unwrap().unwrap();
    refused(&ring.write(&captured.borrow()).map(drop).unwrap_err());
    let kept = slot.release(&captured.borrow()).unwrap_err();
    refused(kept.error());
    kept.into_inner().release(&stream).unwrap();
    ring.wait_writable(Duration::from_secs(10)).unwrap();
    assert_eq!(captured.end(), Ok(0), "the capture is intact");
}

#[test]
fn timeline_operations_on_captured_stream_are_rejected() {
    let Some((backend, _alone)) = backend() else { return };
    if !backend.capabilities(ZERO).unwrap().timelines {
        eprintln!("skipped: the device has no timelines");
        return;
    }
    let raw = Raw::of(&backend);
    let captured = Captured::new(&raw, NON_BLOCKING);
    captured.begin(GLOBAL);
    let timelines = backend.timelines().unwrap();
    let word = device_ipc_core::DevicePtr::new(64);
    // SAFETY: refused before the driver sees the address.
    for result in unsafe {
        [timelines.write_value(word, 1, captured.borrow()), timelines.wait_value(word, 1, captured.borrow())]
    } {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::StreamCapturing { .. }), "{error}");
    }
    assert_eq!(captured.end(), Ok(0));
}

#[test]
fn device_wait_preserves_an_observed_capture() {
    let Some((backend, _alone)) = backend() else { return };
    let raw = Raw::of(&backend);
    let busy = backend.create_stream(ZERO).unwrap();
    let event = backend.create_event(ZERO).unwrap();
    let range = backend.allocate(ZERO, 64).unwrap();
    for (flags, seen) in [(NON_BLOCKING, true), (BLOCKING, false)] {
        let captured = Captured::new(&raw, flags);
        captured.begin(GLOBAL);
        if seen {
            // SAFETY: refused.
            backend.synchronize(captured.borrow()).unwrap_err();
        }
        let blocked = block(&backend, busy.as_borrowed());
        event.record(busy.as_borrowed()).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| backend.synchronize_device(ZERO).unwrap());
            thread::sleep(Duration::from_millis(50));
            assert!(!waiting.is_finished(), "the call did not wait");
            drop(blocked);
        });
        assert!(event.query().unwrap());
        assert_eq!(captured.end(), Ok(0));
        // The next call on the stream records that its capture has ended.
        backend.synchronize(captured.borrow()).unwrap();
        backend.synchronize_device(ZERO).unwrap();
    }
    // SAFETY: not used.
    unsafe { backend.free(range) }.unwrap();
}

#[test]
fn default_stream_is_rejected_during_a_blocking_capture() {
    let Some((backend, _alone)) = backend() else { return };
    let raw = Raw::of(&backend);
    let event = backend.create_event(ZERO).unwrap();
    // SAFETY: the default stream lives as long as its context.
    let default = unsafe { BorrowedStream::from_raw(NAME, ZERO, 0) };
    let calls: [(&str, &dyn Fn() -> Result<()>); 3] = [
        ("record", &|| event.record(default)),
        ("wait", &|| event.wait_on(default)),
        ("synchronize", &|| backend.synchronize(default)),
    ];
    for (call, make) in calls {
        let captured = Captured::new(&raw, BLOCKING);
        captured.begin(GLOBAL);
        let text = make().unwrap_err().to_string();
        assert!(text.contains("CUDA_ERROR_STREAM_CAPTURE_IMPLICIT (906)"), "{call}: {text}");
        assert!(text.contains("use another stream (cuStreamCreate)"), "{call}: {text}");
        assert_eq!(captured.end(), Ok(0), "{call}");
    }
}

#[test]
fn cudarc_slices_are_shared_and_viewed_during_a_capture() {
    let Some((backend, _alone)) = backend() else { return };
    let raw = Raw::of(&backend);
    let context = CudaContext::new(0).unwrap();
    // The second stream makes cudarc keep events with every slice.
    let (stream, _second) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let slice = clone_htod(&stream, &[1.0f32; 256]).unwrap();
    raw.begin_capture(stream.as_stream().raw(), GLOBAL);
    let range = slice.region().range;
    // SAFETY: the slice lives, and there is no other view.
    drop(unsafe { stream.view_mut::<f32>(range) }.unwrap());
    for result in [alloc_zeros::<u8>(&stream, 8).map(drop), clone_htod(&stream, &[1u8]).map(drop)] {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::StreamCapturing { .. }), "{error}");
    }
    let ipc = Ipc::with_backend(backend.clone());
    let share = ipc.share(slice).start().unwrap();
    assert_eq!(raw.end_capture(stream.as_stream().raw()), Ok(0));
    // Not earlier: dropping the slice makes its stream wait for its last use.
    drop(share);
}

/// Blocks a stream until the sender is dropped, for what no gate serves: on a GPU, a capture does not end while a stream waits for a
/// value (driver 580.159.04). A host function leaves the device idle.
pub(crate) fn block(backend: &CudaBackend, stream: BorrowedStream<'_>) -> Sender<()> {
    let (open, opened) = channel();
    let wait = move || {
        // Fails when the sender is dropped, or after the time.
        let _ = opened.recv_timeout(Duration::from_secs(20));
    };
    backend.host_function(Box::new(wait), stream).unwrap();
    open
}
