//! Graph capture: calls of ours leave a capture as it was.
//!
//! A stream that is being captured into a graph runs nothing; what is submitted to it becomes a node. Two things break
//! a capture, and it is then lost as a whole ("Stream Management", `group__CUDA__STREAM`; "Graphs" in the CUDA C++
//! Programming Guide):
//!
//! - Calls that the driver takes for unsafe while a capture goes on (`cuMemAlloc`, `cuEventQuery` and the like), by the
//!   thread that captures or, in the global mode, by any thread. A thread in the *relaxed* mode may make them:
//!   [`Current`](crate::context::Current) puts it into that mode for the time of a call.
//! - Work on the captured stream that must happen now, such as waiting for it or for an event that was recorded outside
//!   of the capture. It is refused before the driver sees it.
//!
//! Waiting for a whole device is both: `cuCtxSynchronize` breaks the captures of every stream and thread, in every mode
//! (seen with driver 580.159.04), and nothing tells whether there are any. So streams that were seen being captured are
//! remembered ([`Seen`]), and while there are any, another call that waits for all streams is made.

use std::ffi::c_uint;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use device_ipc_core::{Error, Result};

use crate::api::{MEMHOSTALLOC_PORTABLE, STREAM_CAPTURE_MODE_RELAXED, STREAM_CAPTURE_STATUS_NONE, Stream};
use crate::driver::Driver;
use crate::status::number;

/// The streams of this process that were being captured when they were last seen, by whichever driver table or by cudarc.
static SEEN: Seen = Seen { count: AtomicUsize::new(0), streams: Mutex::new(Vec::new()) };

struct Seen {
    /// How many they are, for a look without the lock.
    count: AtomicUsize,
    streams: Mutex<Vec<Stream>>,
}

impl Seen {
    fn any(&self) -> bool {
        self.count.load(Ordering::Acquire) != 0
    }

    fn note(&self, stream: Stream, capturing: bool) {
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

/// Notes a stream, which lives, as being captured or not.
pub(crate) fn note(stream: usize, capturing: bool) {
    SEEN.note(Stream(stream), capturing);
}

/// This thread is in the relaxed mode until this is dropped.
pub(crate) struct Relaxed<'a> {
    driver: &'a Driver,
    /// The mode to go back to; `None` where the driver has no modes.
    former: Option<c_uint>,
}

impl Driver {
    /// Puts this thread into the relaxed mode.
    pub(crate) fn relax_captures(&self) -> Relaxed<'_> {
        Relaxed { driver: self, former: self.exchange_mode(STREAM_CAPTURE_MODE_RELAXED) }
    }

    fn exchange_mode(&self, mut mode: c_uint) -> Option<c_uint> {
        let exchange = self.api.capture.as_ref()?.exchange_mode;
        // SAFETY: reads a mode and writes the one before.
        match unsafe { exchange(&raw mut mode) } {
            number::SUCCESS => Some(mode),
            status => {
                tracing::debug!(status, "cuThreadExchangeStreamCaptureMode failed");
                None
            }
        }
    }

    /// Is the stream being captured? Its device's context is current.
    pub(crate) fn is_capturing(&self, stream: Stream) -> Result<bool> {
        let Some(capture) = &self.api.capture else { return Ok(false) };
        let mut state = STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: writes one number; the stream lives, as its `BorrowedStream` promised.
        let status = unsafe { (capture.is_capturing)(stream, &raw mut state) };
        match status {
            number::SUCCESS => {
                let capturing = state != STREAM_CAPTURE_STATUS_NONE;
                SEEN.note(stream, capturing);
                Ok(capturing)
            }
            _ => Err(self.error("cuStreamIsCapturing", status, "")),
        }
    }

    /// Refuses a stream that is being captured, where `what` is to happen now. Its device's context is current.
    pub(crate) fn refuse_capture(&self, stream: Stream, what: &'static str) -> Result<()> {
        if self.is_capturing(stream)? { Err(Error::StreamCapturing { what }) } else { Ok(()) }
    }
}

impl Driver {
    /// Notes that a stream is no longer being captured, if it was seen so. Its device's context is current.
    pub(crate) fn look_at_capture(&self, stream: Stream) {
        if SEEN.any() {
            let _ = self.is_capturing(stream);
        }
    }

    /// Waits on the host for all work of the context that is current.
    pub(crate) fn wait_for_all(&self) -> Result<()> {
        if !SEEN.any() && self.is_capturing(Stream::NULL).is_ok() {
            // SAFETY: takes nothing.
            return self.check("cuCtxSynchronize", unsafe { (self.api.ctx_synchronize)() });
        }
        // Freeing page-locked memory waits for all streams too, and leaves captures alone. It is the second choice, because
        // other threads' calls wait meanwhile.
        let mut address = std::ptr::null_mut();
        // SAFETY: writes one address.
        let status = unsafe { (self.api.mem_host_alloc)(&raw mut address, 1, MEMHOSTALLOC_PORTABLE) };
        self.check("cuMemHostAlloc", status)?;
        // SAFETY: allocated above, and known to nobody else.
        self.check("cuMemFreeHost", unsafe { (self.api.mem_free_host)(address) })
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        if let Some(mode) = self.former {
            self.driver.exchange_mode(mode);
        }
    }
}
