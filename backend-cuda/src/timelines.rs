//! Words in host memory that streams write and wait on.
//!
//! "Stream Memory Operations" (`group__CUDA__MEMOP`) on pages of `cuMemHostRegister` ("Memory Management",
//! `group__CUDA__MEM`). A waiting stream polls the word without a thread of the host; a write is behind a fence for
//! all that its stream has written. Pages of a memory file that two processes map and register are one word for the
//! streams of both (seen with driver 580.159.04 on an H200).

use std::ffi::{c_int, c_uint};
use std::ptr::NonNull;

use device_ipc_core::{BorrowedStream, DeviceOrdinal, DevicePtr, DeviceTimelines, Error, Result};

use crate::NAME;
use crate::api::{
    Api, DEVICE_ATTRIBUTE_FORMER_VALUE_OPERATIONS, DEVICE_ATTRIBUTE_VALUE_OPERATIONS, DevicePointer,
    STREAM_WAIT_VALUE_GEQ, STREAM_WRITE_VALUE_DEFAULT, Stream,
};
use crate::backend::CudaBackend;
use crate::driver::Driver;
use crate::status::number;

type Operation = unsafe extern "C" fn(Stream, DevicePointer, u64, c_uint) -> i32;

/// The two operations, of the newest form that the driver has.
#[derive(Clone, Copy)]
struct ValueOperations {
    write: Operation,
    wait: Operation,
    /// The device attribute that says whether a device has them.
    attribute: c_int,
}

impl ValueOperations {
    fn of(api: &Api) -> Option<Self> {
        let newest = api.value_operations.as_ref().map(|found| Self {
            write: found.write,
            wait: found.wait,
            attribute: DEVICE_ATTRIBUTE_VALUE_OPERATIONS,
        });
        newest.or_else(|| {
            api.former_value_operations.as_ref().map(|found| Self {
                write: found.write,
                wait: found.wait,
                attribute: DEVICE_ATTRIBUTE_FORMER_VALUE_OPERATIONS,
            })
        })
    }
}

impl DeviceTimelines for CudaBackend {
    unsafe fn register(&self, device: DeviceOrdinal, pages: NonNull<u8>, len: usize) -> Result<DevicePtr> {
        let driver = self.driver();
        if !driver.has_timelines(device)? {
            return Err(unsupported("register pages for its streams"));
        }
        // SAFETY: as the caller promised.
        unsafe { driver.register(device, pages, len) }
    }

    /// Waits for streams where the driver does, as for `cuMemFree`.
    unsafe fn unregister(&self, device: DeviceOrdinal, pages: NonNull<u8>) -> Result<()> {
        // SAFETY: as the caller promised.
        unsafe { self.driver().unregister(device, pages) }
    }

    unsafe fn write_value(&self, word: DevicePtr, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let driver = self.driver();
        let operations = driver.value_operations()?;
        let (raw, _current) = driver.enter_with(stream)?;
        driver.refuse_capture(raw, "writing a timeline's value")?;
        // SAFETY: the word is registered for the stream's device until the stream has got there, as the caller promised;
        // the stream lives, as `BorrowedStream` promises.
        let status = unsafe { (operations.write)(raw, word.get(), value, STREAM_WRITE_VALUE_DEFAULT) };
        driver.check("cuStreamWriteValue64", status)
    }

    /// The driver compares as signed numbers do: every value below 2^63 is above those that it is greater than.
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

impl Driver {
    /// Do streams of the device write and wait on words? The driver's word is taken: a trial would register pages and take
    /// them back, for which the driver waits until all streams of the device are idle.
    pub(crate) fn has_timelines(&self, ordinal: DeviceOrdinal) -> Result<bool> {
        let device = self.device(ordinal)?;
        let Some(operations) = ValueOperations::of(&self.api) else { return Ok(false) };
        let mut able: c_int = 0;
        // SAFETY: writes one int; an attribute that the driver does not know is an error.
        let status =
            unsafe { (self.api.device_get_attribute)(&raw mut able, operations.attribute, device.handle) };
        Ok(status == number::SUCCESS && able != 0 && self.api.host_pages.is_some())
    }

    fn value_operations(&self) -> Result<ValueOperations> {
        ValueOperations::of(&self.api).ok_or_else(|| unsupported("write and wait on words"))
    }
}

fn unsupported(what: &str) -> Error {
    Error::Unsupported {
        backend: NAME,
        what: what.into(),
        why: "the device or its driver has no 64-bit stream memory operations (they need a driver of CUDA 11.7 or \
              newer); order by events, or synchronise on the host"
            .into(),
    }
}
