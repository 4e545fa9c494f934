//! Streams of one device that were dropped while they had work. `aclrtDestroyStream` must follow a stream's work, so
//! they are destroyed when they are found idle.

use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::staging::Staging;
use crate::bindings::*;
use crate::library::{AclLibrary, call};

/// The dropped streams of one device that may still have work.
#[derive(Default)]
pub(crate) struct RetiredStreams {
    streams: Mutex<Vec<usize>>,
}

impl RetiredStreams {
    /// Adds a stream, an `aclrtStream`.
    pub(super) fn push(&self, raw: usize) {
        self.lock().push(raw);
    }

    /// Destroys the idle streams, and releases their staging buffers. The device's context must be current.
    pub(super) fn sweep(&self, library: &AclLibrary, staging: &Staging) {
        self.lock().retain(|raw| {
            let destroyed = destroy_if_idle(library, *raw);
            if destroyed {
                staging.forget(*raw);
            }
            !destroyed
        });
    }

    fn lock(&self) -> MutexGuard<'_, Vec<usize>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Destroys a stream that is idle or has failed. Returns whether it did.
fn destroy_if_idle(library: &AclLibrary, raw: usize) -> bool {
    let stream = aclrtStream(raw as *mut c_void);
    let mut status = aclrtStreamStatus::ACL_STREAM_STATUS_NOT_READY;
    // SAFETY: writes one status; the stream is not destroyed yet.
    let queried = unsafe { call!(library, aclrtStreamQuery(stream, &raw mut status)) };
    if queried == ACL_SUCCESS && status == aclrtStreamStatus::ACL_STREAM_STATUS_NOT_READY {
        return false;
    }
    // SAFETY: the table owns the stream, whose work has completed or failed.
    let destroyed = unsafe { call!(library, aclrtDestroyStream(stream)) };
    if destroyed != ACL_SUCCESS {
        tracing::warn!(target: crate::LOG, status = destroyed, "aclrtDestroyStream failed");
    }
    true
}
