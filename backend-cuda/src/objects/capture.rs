//! Graph capture: calls of this crate leave the captures of a process intact.
//!
//! A stream that is being captured into a graph executes nothing; submitted work becomes a node of the graph. Two
//! things invalidate a whole capture ("Stream Management", `group__CUDA__STREAM`; "Graphs" in the CUDA C++ Programming
//! Guide):
//!
//! - Calls that the driver considers unsafe during a capture (`cuMemAlloc`, `cuEventQuery` and others), on the
//!   capturing thread or, in the global mode, on any thread. A thread in the *relaxed* mode may make them:
//!   [`Current`](super::context::Current) puts the thread into that mode for the duration of a call.
//! - Work on the captured stream that must execute immediately, such as waiting for the stream or for an event that was
//!   recorded outside the capture. This crate refuses such work before the driver sees it.
//!
//! Waiting for a whole device is both: `cuCtxSynchronize` breaks the captures of every stream and thread, in every mode
//! (observed with driver 580.159.04), and the driver has no query for active captures. So this module remembers streams
//! that were observed in a capture ([`CapturingStreams`]), and uses another call that waits for all streams while there
//! are any.

use std::ffi::c_uint;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use device_ipc_core::{Error, Result};

use crate::bindings::api::{
    MEMHOSTALLOC_PORTABLE, STREAM_CAPTURE_MODE_RELAXED, STREAM_CAPTURE_STATUS_NONE, Stream,
};
use crate::library::CudaLibrary;
use crate::library::status::number;

/// The streams of this process that were last observed in a capture, through any backend or through cudarc.
static CAPTURING: CapturingStreams =
    CapturingStreams { count: AtomicUsize::new(0), streams: Mutex::new(Vec::new()) };

struct CapturingStreams {
    /// The number of streams, readable without the lock.
    count: AtomicUsize,
    streams: Mutex<Vec<Stream>>,
}

impl CapturingStreams {
    fn any(&self) -> bool {
        self.count.load(Ordering::Acquire) != 0
    }

    fn record(&self, stream: Stream, capturing: bool) {
        if !capturing && !self.any() {
            return;
        }
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.retain(|known| *known != stream);
        if capturing {
            streams.push(stream);
        }
        self.count.store(streams.len(), Ordering::Release);
    }
}

/// Records whether a live stream is being captured.
pub(crate) fn record(stream: usize, capturing: bool) {
    CAPTURING.record(Stream(stream), capturing);
}

/// A guard: this thread is in the relaxed capture mode until the guard is dropped.
pub(crate) struct RelaxedCapture<'a> {
    library: &'a CudaLibrary,
    /// The mode to restore; `None` if the driver has no modes.
    previous: Option<c_uint>,
}

impl CudaLibrary {
    /// Puts this thread into the relaxed capture mode.
    pub(crate) fn relax_capture(&self) -> RelaxedCapture<'_> {
        RelaxedCapture { library: self, previous: self.exchange_mode(STREAM_CAPTURE_MODE_RELAXED) }
    }

    fn exchange_mode(&self, mut mode: c_uint) -> Option<c_uint> {
        let exchange = self.api.capture.as_ref()?.exchange_mode;
        // SAFETY: reads the new mode and writes the previous one.
        match unsafe { exchange(&raw mut mode) } {
            number::SUCCESS => Some(mode),
            status => {
                tracing::debug!(target: crate::LOG, status, "cuThreadExchangeStreamCaptureMode failed");
                None
            }
        }
    }

    /// Returns whether the stream is being captured. The device's context must be current.
    pub(crate) fn is_capturing(&self, stream: Stream) -> Result<bool> {
        let Some(capture) = &self.api.capture else { return Ok(false) };
        let mut state = STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: writes one number; the stream lives, as its `BorrowedStream` promised.
        let status = unsafe { (capture.is_capturing)(stream, &raw mut state) };
        match status {
            number::SUCCESS => {
                let capturing = state != STREAM_CAPTURE_STATUS_NONE;
                CAPTURING.record(stream, capturing);
                Ok(capturing)
            }
            _ => Err(self.error("cuStreamIsCapturing", status, "")),
        }
    }

    /// Refuses a stream that is being captured, for work that must execute immediately. The device's context must be
    /// current.
    pub(crate) fn refuse_capture(&self, stream: Stream, what: &'static str) -> Result<()> {
        if self.is_capturing(stream)? { Err(Error::StreamCapturing { what }) } else { Ok(()) }
    }

    /// Updates the record of captured streams, if it has any. The device's context must be current.
    pub(crate) fn refresh_capture(&self, stream: Stream) {
        if CAPTURING.any() {
            let _ = self.is_capturing(stream);
        }
    }

    /// Waits on the host for all work in the current context.
    pub(crate) fn synchronize_context(&self) -> Result<()> {
        if !CAPTURING.any() && self.is_capturing(Stream::NULL).is_ok() {
            // SAFETY: takes no arguments.
            return self.check("cuCtxSynchronize", unsafe { (self.api.ctx_synchronize)() });
        }
        // Freeing page-locked memory also waits for all streams, and leaves captures intact. It is the second choice
        // because it blocks driver calls of other threads meanwhile.
        let mut address = std::ptr::null_mut();
        // SAFETY: writes one address.
        let status = unsafe { (self.api.mem_host_alloc)(&raw mut address, 1, MEMHOSTALLOC_PORTABLE) };
        self.check("cuMemHostAlloc", status)?;
        // SAFETY: allocated above, and not shared.
        self.check("cuMemFreeHost", unsafe { (self.api.mem_free_host)(address) })
    }
}

impl Drop for RelaxedCapture<'_> {
    fn drop(&mut self) {
        if let Some(mode) = self.previous {
            self.library.exchange_mode(mode);
        }
    }
}
