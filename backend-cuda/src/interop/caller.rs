//! The state of the calling thread, restored after calls of cudarc.
//!
//! cudarc makes its context current without restoring the previous one, and ignores captures on other threads. The
//! guard here restores both, like [`Current`](crate::objects::context::Current) for calls of this crate.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUcontext, CUstreamCaptureMode, CUstreamCaptureStatus};
use cudarc::driver::{CudaStream, result};
use device_ipc_core::{Error, Result};

use super::error::vendor_error;
use crate::objects::capture;

/// A guard: the thread is in the relaxed capture mode until the guard is dropped, which restores the thread's context
/// and capture mode.
pub(super) struct CallerState {
    context: Option<CUcontext>,
    mode: Option<CUstreamCaptureMode>,
}

impl CallerState {
    pub(super) fn save() -> Self {
        Self {
            context: result::ctx::get_current().ok().flatten(),
            mode: exchange(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED),
        }
    }
}

impl Drop for CallerState {
    fn drop(&mut self) {
        if let Some(mode) = self.mode {
            exchange(mode);
        }
        if result::ctx::get_current() == Ok(self.context) {
            return;
        }
        // SAFETY: the context was current before, or is null for none.
        let restored = unsafe { result::ctx::set_current(self.context.unwrap_or(std::ptr::null_mut())) };
        if let Err(error) = restored {
            tracing::warn!(target: crate::LOG, status = error.0 as i32, "cuCtxSetCurrent failed");
        }
    }
}

/// Puts the thread into a capture mode. Returns the previous mode, or `None` if the driver has no modes.
fn exchange(mut mode: CUstreamCaptureMode) -> Option<CUstreamCaptureMode> {
    // SAFETY: reads the new mode and writes the previous one.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }.result().ok().map(|()| mode)
}

/// Refuses a stream that is being captured, for work that must execute immediately.
pub(super) fn refuse_capture(stream: &Arc<CudaStream>, what: &'static str) -> Result<()> {
    if is_capturing(stream)? { Err(Error::StreamCapturing { what }) } else { Ok(()) }
}

/// Returns whether the stream is being captured, and records the result.
pub(super) fn is_capturing(stream: &Arc<CudaStream>) -> Result<bool> {
    let status = stream.capture_status().map_err(|error| vendor_error("cuStreamIsCapturing", error))?;
    let capturing = status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    capture::record(stream.cu_stream().addr(), capturing);
    Ok(capturing)
}
