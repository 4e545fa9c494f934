//! Streams whose work is recorded into a graph instead of being executed.
//!
//! Graphs cannot be launched. The simulator enforces the rules for calls on a stream that the program captures: a
//! call that cannot be recorded fails with 900 and invalidates the capture, and the end of the capture then fails
//! with 901.

use std::cell::Cell;
use std::ffi::{c_int, c_uint};
use std::sync::Arc;
use std::thread::ThreadId;

use crate::context::Context;
use crate::entry::driver;
use crate::ffi::Out;
use crate::simulator::{lock, next_handle, simulator};
use crate::status::{Result, Status};
use crate::stream::{NON_BLOCKING, Stream, Target, target};

/// `CUstreamCaptureMode`.
const GLOBAL: c_int = 0;
const THREAD_LOCAL: c_int = 1;
const RELAXED: c_int = 2;

/// A capture in progress.
pub(crate) struct Capture {
    mode: c_int,
    thread: ThreadId,
    spoilt: bool,
    nodes: usize,
    id: u64,
}

thread_local! {
    static MODE: Cell<c_int> = const { Cell::new(GLOBAL) };
}

/// Invalidates the capture of a stream.
pub(crate) fn invalidate(stream: &Stream) {
    if let Some(capture) = &mut *lock(&stream.capture) {
        capture.spoilt = true;
    }
}

/// Invalidates the capture with this number, and returns whether it exists.
pub(crate) fn invalidate_by_id(id: u64) -> Result<bool> {
    let mut found = false;
    for stream in streams()? {
        if let Some(capture) = lock(&stream.capture).as_mut().filter(|capture| capture.id == id) {
            capture.spoilt = true;
            found = true;
        }
    }
    Ok(found)
}

fn streams() -> Result<Vec<Arc<Stream>>> {
    Ok(simulator()?.objects().streams.values().cloned().collect())
}

/// Rejects a call on all streams of a context while any of them is being captured, in any mode.
pub(crate) fn refuse_in(context: &Context) -> Result {
    let mut refused = false;
    for stream in streams()?.iter().filter(|stream| stream.context.handle == context.handle) {
        refused |= lock(&stream.capture).is_some();
        invalidate(stream);
    }
    if refused { Err(Status::STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

/// Returns whether the legacy default stream would wait for a stream that is being captured.
fn blocks_legacy_stream(context: &Context) -> Result<bool> {
    let blocking =
        |stream: &&Arc<Stream>| stream.context.handle == context.handle && stream.flags & NON_BLOCKING == 0;
    Ok(streams()?.iter().filter(blocking).any(|stream| lock(&stream.capture).is_some()))
}

/// Records work if the stream is being captured, and returns whether it is.
pub(crate) fn node(target: &Target) -> Result<bool> {
    let Some(stream) = &target.stream else { return Ok(false) };
    match &mut *lock(&stream.capture) {
        None => Ok(false),
        Some(capture) if capture.spoilt => Err(Status::STREAM_CAPTURE_INVALIDATED),
        Some(capture) => {
            capture.nodes += 1;
            Ok(true)
        }
    }
}

/// Rejects a call that cannot be recorded, on a stream that is being captured.
pub(crate) fn refuse_on(target: &Target) -> Result {
    let Some(stream) = &target.stream else { return Ok(()) };
    match &mut *lock(&stream.capture) {
        None => Ok(()),
        Some(capture) => {
            capture.spoilt = true;
            Err(Status::STREAM_CAPTURE_UNSUPPORTED)
        }
    }
}

/// Returns the number of the capture that a stream belongs to.
pub(crate) fn capture_of(target: &Target) -> Option<u64> {
    lock(&target.stream.as_ref()?.capture).as_ref().map(|capture| capture.id)
}

/// Rejects a call that may be unsafe during captures: if any is in global mode, or one of this thread is in
/// thread-local mode, unless the thread is in relaxed mode.
pub(crate) fn reject_unsafe_call() -> Result {
    let mode = MODE.get();
    if mode == RELAXED {
        return Ok(());
    }
    let own = std::thread::current().id();
    let mut refused = false;
    for stream in streams()? {
        if let Some(capture) = &mut *lock(&stream.capture) {
            let concerned = match capture.mode {
                GLOBAL => mode == GLOBAL || capture.thread == own,
                THREAD_LOCAL => capture.thread == own,
                _ => false,
            };
            if concerned {
                capture.spoilt = true;
                refused = true;
            }
        }
    }
    if refused { Err(Status::STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

driver! {
    /// Starts to capture a stream, which must not be the legacy default stream.
    fn cuStreamBeginCapture_v2(handle: u64, mode: c_int) {
        let target = target(handle)?;
        if !(GLOBAL..=RELAXED).contains(&mode) {
            return Err(Status::INVALID_VALUE);
        }
        let stream = target.stream.ok_or(Status::STREAM_CAPTURE_UNSUPPORTED)?;
        let mut capture = lock(&stream.capture);
        if capture.is_some() {
            return Err(Status::INVALID_VALUE);
        }
        let thread = std::thread::current().id();
        *capture = Some(Capture { mode, thread, spoilt: false, nodes: 0, id: next_handle() });
        Ok(())
    }

    /// Ends the capture of a stream, and returns the graph.
    fn cuStreamEndCapture(handle: u64, out: Out<u64>) {
        let target = target(handle)?;
        let stream = target.stream.ok_or(Status::INVALID_VALUE)?;
        let mut capture = lock(&stream.capture);
        let ended = capture.as_ref().ok_or(Status::INVALID_VALUE)?;
        if ended.mode != RELAXED && ended.thread != std::thread::current().id() {
            return Err(Status::STREAM_CAPTURE_WRONG_THREAD);
        }
        let (spoilt, nodes) = (ended.spoilt, ended.nodes);
        *capture = None;
        drop(capture);
        if spoilt {
            out.put_if_not_null(0);
            return Err(Status::STREAM_CAPTURE_INVALIDATED);
        }
        let graph = next_handle();
        simulator()?.objects().graphs.insert(graph, nodes);
        out.put(graph)
    }

    /// Returns the capture status of a stream: 0 none, 1 active, 2 invalidated.
    fn cuStreamIsCapturing(handle: u64, out: Out<c_uint>) {
        let target = target(handle)?;
        if target.legacy && blocks_legacy_stream(&target.context)? {
            return Err(Status::STREAM_CAPTURE_IMPLICIT);
        }
        let state = match target.stream.as_ref().map(|stream| lock(&stream.capture)) {
            Some(capture) => capture.as_ref().map_or(0, |capture| if capture.spoilt { 2 } else { 1 }),
            None => 0,
        };
        out.put(state)
    }

    /// Exchanges the capture mode of the thread.
    fn cuThreadExchangeStreamCaptureMode(mode: Out<c_int>) {
        let wanted = mode.get()?;
        if !(GLOBAL..=RELAXED).contains(&wanted) {
            return Err(Status::INVALID_VALUE);
        }
        mode.put(MODE.replace(wanted))
    }

    /// Returns the number of nodes of a graph. Node handles are not supported.
    fn cuGraphGetNodes(graph: u64, nodes: Out<u64>, count: Out<usize>) {
        let known = simulator()?.objects().graphs.get(&graph).copied().ok_or(Status::INVALID_VALUE)?;
        if !nodes.is_null() {
            return Err(Status::NOT_SUPPORTED);
        }
        count.put(known)
    }

    /// Destroys a graph.
    fn cuGraphDestroy(graph: u64) {
        let removed = simulator()?.objects().graphs.remove(&graph);
        removed.map(drop).ok_or(Status::INVALID_VALUE)
    }
}
