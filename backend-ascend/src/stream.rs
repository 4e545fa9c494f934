//! Streams of our own, for those who bring none ("Stream Management").
//!
//! `aclrtDestroyStream` is to come after the stream's work: a stream that is dropped with work on it is kept, and
//! destroyed when it is found idle.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use device_ipc_core::{BorrowedStream, DeviceOrdinal, DeviceStream, Result};

use crate::NAME;
use crate::bindings::*;
use crate::driver::{Driver, call};

/// A stream of a device's default context.
#[derive(Debug)]
pub(crate) struct AscendStream {
    driver: Arc<Driver>,
    device: DeviceOrdinal,
    /// `aclrtStream`.
    raw: usize,
}

/// Streams that were dropped before their work was done.
#[derive(Default)]
pub(crate) struct RetiredStreams {
    streams: Mutex<Vec<(DeviceOrdinal, usize)>>,
}

impl AscendStream {
    pub(crate) fn create(driver: &Arc<Driver>, device: DeviceOrdinal) -> Result<Self> {
        let _current = driver.enter(device)?;
        driver.retired.sweep(driver, device);
        let mut raw = aclrtStream(std::ptr::null_mut());
        // SAFETY: writes one stream.
        let status = unsafe { call!(driver, aclrtCreateStream(&raw mut raw)) };
        driver.check("aclrtCreateStream", status)?;
        Ok(Self { driver: Arc::clone(driver), device, raw: raw.0 as usize })
    }

    pub(crate) fn raw(&self) -> aclrtStream {
        aclrtStream(self.raw as *mut c_void)
    }
}

impl DeviceStream for AscendStream {
    fn as_borrowed(&self) -> BorrowedStream<'_> {
        // SAFETY: the stream is of this backend and device, and lives as long as `self`.
        unsafe { BorrowedStream::from_raw(NAME, self.device, self.raw as u64) }
    }
}

impl Drop for AscendStream {
    fn drop(&mut self) {
        let Ok(_current) = self.driver.enter(self.device) else { return };
        self.driver.retired.lock().push((self.device, self.raw));
        self.driver.retired.sweep(&self.driver, self.device);
    }
}

impl RetiredStreams {
    /// Destroys those of `device`, whose context is current, that have no more work.
    pub(crate) fn sweep(&self, driver: &Driver, device: DeviceOrdinal) {
        self.lock().retain(|(of, raw)| {
            let destroyed = *of == device && destroy_if_idle(driver, *raw);
            if destroyed && let Ok(device) = driver.device(*of) {
                device.staging.forget(*raw);
            }
            !destroyed
        });
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(DeviceOrdinal, usize)>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Is the stream done with, destroyed or failed?
fn destroy_if_idle(driver: &Driver, raw: usize) -> bool {
    let stream = aclrtStream(raw as *mut c_void);
    let mut status = aclrtStreamStatus::ACL_STREAM_STATUS_NOT_READY;
    // SAFETY: writes one status; the stream is not destroyed yet.
    let asked = unsafe { call!(driver, aclrtStreamQuery(stream, &raw mut status)) };
    if asked == ACL_SUCCESS && status == aclrtStreamStatus::ACL_STREAM_STATUS_NOT_READY {
        return false;
    }
    // SAFETY: nobody else has the stream, and its work is done or has failed.
    let destroyed = unsafe { call!(driver, aclrtDestroyStream(stream)) };
    if destroyed != ACL_SUCCESS {
        tracing::warn!(status = destroyed, "aclrtDestroyStream failed");
    }
    true
}
