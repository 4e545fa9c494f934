//! Streams that this backend creates, for callers without one ("Stream Management").

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use device_ipc_core::backend::DeviceStream;
use device_ipc_core::{BorrowedStream, DeviceOrdinal, Result};

use super::driver::Driver;
use crate::bindings::*;
use crate::library::{AclLibrary, NAME, call};

/// An owned stream of a device's default context. A stream that is dropped with work is [retired](super::retired).
#[derive(Debug)]
pub(crate) struct AscendStream {
    driver: Arc<Driver>,
    device: DeviceOrdinal,
    /// `aclrtStream`.
    raw: usize,
}

impl AscendStream {
    pub(crate) fn create(driver: &Arc<Driver>, device: DeviceOrdinal) -> Result<Self> {
        let _current = driver.enter(device)?;
        driver.device(device)?.sweep_retired(driver);
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
        let Ok(device) = self.driver.device(self.device) else { return };
        device.retired.push(self.raw);
        device.sweep_retired(&self.driver);
    }
}

impl AclLibrary {
    /// Waits until the stream is idle. Its device's context must be current.
    pub(crate) fn synchronize_stream(&self, stream: aclrtStream) -> Result<()> {
        // SAFETY: the stream lives, as `BorrowedStream` promises.
        self.check("aclrtSynchronizeStream", unsafe { call!(self, aclrtSynchronizeStream(stream)) })
    }

    /// Waits until the stream is idle, for at most `limit`. Its device's context must be current.
    pub(super) fn synchronize_stream_within(&self, stream: aclrtStream, limit: Duration) -> Result<()> {
        let limit = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: the stream lives.
        let status = unsafe { call!(self, aclrtSynchronizeStreamWithTimeout(stream, limit)) };
        self.check("aclrtSynchronizeStreamWithTimeout", status)
    }
}
