//! The calling thread as it was.
//!
//! cudarc makes its context current and leaves it so, and knows nothing of captures on other threads. What is done for
//! our callers leaves both as they were, as [`Current`](crate::objects::context::Current) does for calls of our own.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUcontext, CUstreamCaptureMode, CUstreamCaptureStatus};
use cudarc::driver::{CudaStream, result};
use device_ipc_core::{Error, Result};

use super::error::vendor_error;
use crate::objects::capture;

/// When this is dropped, the thread has the context current that it had before, and its capture mode, which is the relaxed
/// one meanwhile.
pub(super) struct Caller {
    context: Option<CUcontext>,
    mode: Option<CUstreamCaptureMode>,
}

impl Caller {
    pub(super) fn keep() -> Self {
        Self {
            context: result::ctx::get_current().ok().flatten(),
            mode: exchange(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED),
        }
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        if let Some(mode) = self.mode {
            exchange(mode);
        }
        if result::ctx::get_current() == Ok(self.context) {
            return;
        }
        // SAFETY: it was current before, or is null, for none.
        let restored = unsafe { result::ctx::set_current(self.context.unwrap_or(std::ptr::null_mut())) };
        if let Err(error) = restored {
            tracing::warn!(status = error.0 as i32, "cuCtxSetCurrent failed");
        }
    }
}

/// Puts the thread into a capture mode; the one before, or `None` where there are no modes.
fn exchange(mut mode: CUstreamCaptureMode) -> Option<CUstreamCaptureMode> {
    // SAFETY: reads a mode and writes the one before.
    unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }.result().ok().map(|()| mode)
}

/// Refuses a stream that is being captured, where `what` is to happen now.
pub(super) fn refuse_capture(stream: &Arc<CudaStream>, what: &'static str) -> Result<()> {
    if is_capturing(stream)? { Err(Error::StreamCapturing { what }) } else { Ok(()) }
}

/// Is the stream being captured? The answer is noted.
pub(super) fn is_capturing(stream: &Arc<CudaStream>) -> Result<bool> {
    let status = stream.capture_status().map_err(|error| vendor_error("cuStreamIsCapturing", error))?;
    let capturing = status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    capture::record(stream.cu_stream().addr(), capturing);
    Ok(capturing)
}
