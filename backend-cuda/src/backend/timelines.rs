//! Timelines: words in host memory that streams write and wait on.
//!
//! "Stream Memory Operations" (`group__CUDA__MEMOP`) on pages of `cuMemHostRegister` ("Memory Management",
//! `group__CUDA__MEM`). A waiting stream polls the word without a host thread; a write is ordered after all earlier
//! writes of its stream by a fence. Pages of a memory file that two processes map and register are one word for the
//! streams of both (observed with driver 580.159.04 on an H200).

use std::ptr::NonNull;

use device_ipc_core::backend::DeviceTimelines;
use device_ipc_core::{BorrowedStream, DeviceOrdinal, DevicePtr, Result};

use super::cuda::CudaBackend;
use crate::bindings::api::{STREAM_WAIT_VALUE_GEQ, STREAM_WRITE_VALUE_DEFAULT};
use crate::objects::value_operations::unsupported;

impl DeviceTimelines for CudaBackend {
    unsafe fn register(&self, device: DeviceOrdinal, pages: NonNull<u8>, len: usize) -> Result<DevicePtr> {
        let driver = self.driver();
        if !driver.has_timelines(device)? {
            return Err(unsupported("register pages for timelines"));
        }
        // SAFETY: as the caller promised.
        unsafe { self.host_pages.register(driver, device, pages, len) }
    }

    /// Unregisters pages. Waits for streams where the driver does, as for `cuMemFree`.
    unsafe fn unregister(&self, device: DeviceOrdinal, pages: NonNull<u8>) -> Result<()> {
        // SAFETY: as the caller promised.
        unsafe { self.host_pages.unregister(self.driver(), device, pages) }
    }

    unsafe fn write_value(&self, word: DevicePtr, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let operations = driver.value_operations()?;
        let (raw, _current) = driver.enter_with(stream)?;
        driver.refuse_capture(raw, "writing a timeline's value")?;
        // SAFETY: the word is registered for the stream's device until the stream has executed the write, as the caller
        // promised; the stream lives, as `BorrowedStream` promises.
        let status = unsafe { (operations.write)(raw, word.get(), value, STREAM_WRITE_VALUE_DEFAULT) };
        driver.check("cuStreamWriteValue64", status)
    }

    /// Makes the stream wait until the word is at least `value`. The driver compares signed numbers, so values must be
    /// below 2^63.
    unsafe fn wait_value(&self, word: DevicePtr, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let operations = driver.value_operations()?;
        let (raw, _current) = driver.enter_with(stream)?;
        driver.refuse_capture(raw, "waiting for a timeline's value")?;
        // SAFETY: as above.
        let status = unsafe { (operations.wait)(raw, word.get(), value, STREAM_WAIT_VALUE_GEQ) };
        driver.check("cuStreamWaitValue64", status)
    }
}
