//! Streams that this backend creates, for callers without one ("Stream Management", `group__CUDA__STREAM`).

use std::sync::Arc;

use device_ipc_core::backend::DeviceStream;
use device_ipc_core::{BorrowedStream, DeviceOrdinal, Result};

use crate::bindings::api::{STREAM_NON_BLOCKING, Stream};
use crate::library::NAME;
use crate::library::status::number;
use crate::objects::driver::Driver;

/// An owned non-blocking stream: it does not synchronise with the legacy default stream.
#[derive(Debug)]
pub(crate) struct OwnedStream {
    driver: Arc<Driver>,
    device: DeviceOrdinal,
    raw: Stream,
}

impl OwnedStream {
    pub(crate) fn create(driver: &Arc<Driver>, device: DeviceOrdinal) -> Result<Self> {
        let _current = driver.enter(device)?;
        let mut raw = Stream::NULL;
        // SAFETY: writes one stream.
        let status = unsafe { (driver.api.stream_create)(&raw mut raw, STREAM_NON_BLOCKING) };
        driver.check("cuStreamCreate", status)?;
        Ok(Self { driver: Arc::clone(driver), device, raw })
    }
}

impl DeviceStream for OwnedStream {
    fn as_borrowed(&self) -> BorrowedStream<'_> {
        // SAFETY: the stream is of this backend and device, and lives as long as `self`.
        unsafe { BorrowedStream::from_raw(NAME, self.device, self.raw.0 as u64) }
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        let Ok(_current) = self.driver.enter(self.device) else { return };
        // SAFETY: the stream is owned by this value; submitted work still executes.
        let status = unsafe { (self.driver.api.stream_destroy)(self.raw) };
        if !matches!(status, number::SUCCESS | number::ERROR_DEINITIALIZED) {
            tracing::warn!(target: crate::LOG, status, "cuStreamDestroy failed");
        }
    }
}
