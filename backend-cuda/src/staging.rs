//! Page-locked host memory that bytes wait in until the device has fetched them.
//!
//! A write has to return before the device gets there, and the caller may re-use the bytes then. `cuMemcpyHtoDAsync`
//! from ordinary memory promises neither: "API synchronization behavior" says that the driver *may* wait for the stream
//! and stage the bytes, older editions that a thread stages them later. From page-locked memory the copy is
//! asynchronous, so the bytes are copied there first; the buffer is taken again once an event behind the copy has been
//! reached.

use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use device_ipc_core::Result;

use crate::api::{EVENT_DISABLE_TIMING, Event, MEMHOSTALLOC_PORTABLE, Stream};
use crate::driver::Driver;
use crate::status::number;

/// The smallest buffer. Sizes are powers of two, so that buffers fit again.
const SMALLEST: usize = 64 << 10;
/// The most bytes that are staged at a time; a longer write waits for the device instead.
pub(crate) const LARGEST: usize = 64 << 20;

/// The buffers of one device. Its context is current in every method.
#[derive(Default)]
pub(crate) struct Staging {
    buffers: Mutex<Vec<Buffer>>,
}

/// A buffer with an event of its device. Nobody touches its bytes while it is in the list and the event is not reached.
struct Buffer {
    address: usize,
    capacity: usize,
    fetched: Event,
}

impl Staging {
    /// Copies `bytes` aside, at most [`LARGEST`], and submits their copy to `dst`.
    ///
    /// # Safety
    ///
    /// `dst` and as many bytes behind it stay mapped until the copy has finished. The stream is of this device.
    pub(crate) unsafe fn write(&self, driver: &Driver, dst: u64, bytes: &[u8], stream: Stream) -> Result<()> {
        let buffer = self.take(driver, bytes.len())?;
        let staged = buffer.address as *mut u8;
        // SAFETY: the buffer is ours alone while it is not in the list, and holds at least as many bytes.
        unsafe { staged.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        // SAFETY: the buffer stays until `fetched` has been reached; `dst` stays as the caller promised.
        let copied = unsafe { (driver.api.memcpy_htod_async)(dst, staged.cast(), bytes.len(), stream) };
        // SAFETY: stream and event are of this device. After a failed copy the record is harmless.
        let recorded = unsafe { (driver.api.event_record)(buffer.fetched, stream) };
        if recorded == number::SUCCESS {
            self.lock().push(buffer);
        } else {
            // Without a record nothing tells when the device has fetched the bytes.
            // SAFETY: the stream lives.
            let waited = unsafe { (driver.api.stream_synchronize)(stream) };
            if waited == number::SUCCESS {
                self.lock().push(buffer);
            } else {
                tracing::warn!(status = waited, "leaves a staging buffer to the driver");
            }
        }
        driver.check("cuMemcpyHtoDAsync", copied)?;
        driver.check("cuEventRecord", recorded)
    }

    /// Frees the buffers that the device has fetched. The rest goes with the context.
    pub(crate) fn release(&self, driver: &Driver) {
        for buffer in self.lock().drain(..) {
            if !buffer.is_free(driver) {
                continue;
            }
            // SAFETY: the event and the memory are this buffer's, and no copy uses them any longer.
            unsafe {
                (driver.api.event_destroy)(buffer.fetched);
                (driver.api.mem_free_host)(buffer.address as *mut c_void);
            }
        }
    }

    fn take(&self, driver: &Driver, len: usize) -> Result<Buffer> {
        let mut buffers = self.lock();
        let fitting = buffers.iter().position(|one| one.capacity >= len && one.is_free(driver));
        if let Some(index) = fitting {
            return Ok(buffers.swap_remove(index));
        }
        drop(buffers);
        Buffer::new(driver, len.next_power_of_two().max(SMALLEST))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Buffer>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Buffer {
    fn new(driver: &Driver, capacity: usize) -> Result<Self> {
        let mut fetched = Event::NULL;
        // SAFETY: writes one event.
        driver.check("cuEventCreate", unsafe {
            (driver.api.event_create)(&raw mut fetched, EVENT_DISABLE_TIMING)
        })?;
        let mut address = std::ptr::null_mut();
        // SAFETY: writes one address.
        let status =
            unsafe { (driver.api.mem_host_alloc)(&raw mut address, capacity, MEMHOSTALLOC_PORTABLE) };
        if let Err(error) = driver.check("cuMemHostAlloc", status) {
            // SAFETY: the event was created above.
            unsafe { (driver.api.event_destroy)(fetched) };
            return Err(error);
        }
        Ok(Self { address: address as usize, capacity, fetched })
    }

    fn is_free(&self, driver: &Driver) -> bool {
        // SAFETY: the event lives as long as the buffer.
        unsafe { (driver.api.event_query)(self.fetched) == number::SUCCESS }
    }
}
