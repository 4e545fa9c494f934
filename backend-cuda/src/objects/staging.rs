//! Staging buffers: page-locked host memory that holds the bytes of a write until the device has copied them.
//!
//! A write returns before the device executes it, and the caller may then reuse the bytes. `cuMemcpyHtoDAsync` from
//! ordinary memory promises neither: "API synchronization behavior" says that the driver *may* wait for the stream and
//! stage the bytes, older editions that a thread stages them later. From page-locked memory the copy is asynchronous,
//! so the bytes are copied there first; the buffer is reused once an event behind the copy has completed.

use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use device_ipc_core::Result;

use crate::bindings::api::{Event, MEMHOSTALLOC_PORTABLE, Stream};
use crate::library::CudaLibrary;
use crate::library::status::number;

/// Minimum size of a buffer in bytes. Sizes are powers of two, so that buffers can be reused.
const MIN_BUFFER_BYTES: usize = 64 << 10;
/// Maximum size of a staged write in bytes; a longer write waits for the device instead.
pub(crate) const MAX_STAGED_BYTES: usize = 64 << 20;

/// The staging buffers of one device, whose context must be current in every method.
#[derive(Default)]
pub(crate) struct Staging {
    buffers: Mutex<Vec<Buffer>>,
}

/// A buffer with an event of its device. Its bytes stay untouched while it is in the list and the event is pending.
struct Buffer {
    address: usize,
    capacity: usize,
    copied: Event,
}

impl Staging {
    /// Copies `bytes`, at most [`MAX_STAGED_BYTES`], into a buffer and submits the buffer's copy to `dst`.
    ///
    /// # Safety
    ///
    /// `dst` stays mapped for `bytes.len()` bytes until the copy has finished. The stream is of this device.
    pub(crate) unsafe fn write(
        &self,
        library: &CudaLibrary,
        dst: u64,
        bytes: &[u8],
        stream: Stream,
    ) -> Result<()> {
        let buffer = self.take(library, bytes.len())?;
        let staged = buffer.address as *mut u8;
        // SAFETY: a buffer outside the list is exclusively ours, and holds at least `bytes.len()` bytes.
        unsafe { staged.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        // SAFETY: the buffer stays until `copied` has completed; `dst` stays as the caller promised.
        let copied = unsafe { (library.api.memcpy_htod_async)(dst, staged.cast(), bytes.len(), stream) };
        // SAFETY: stream and event are of this device. After a failed copy the record is harmless.
        let recorded = unsafe { (library.api.event_record)(buffer.copied, stream) };
        if recorded == number::SUCCESS {
            self.lock().push(buffer);
        } else {
            // Without a record, only the stream's completion proves that the device has copied the bytes.
            // SAFETY: the stream lives.
            let waited = unsafe { (library.api.stream_synchronize)(stream) };
            if waited == number::SUCCESS {
                self.lock().push(buffer);
            } else {
                tracing::warn!(target: crate::LOG, status = waited, "leaked a staging buffer that pending work may use");
            }
        }
        library.check("cuMemcpyHtoDAsync", copied)?;
        library.check("cuEventRecord", recorded)
    }

    /// Frees the buffers that the device has copied. The driver frees the others with the context.
    pub(crate) fn release(&self, library: &CudaLibrary) {
        for buffer in self.lock().drain(..) {
            if !buffer.is_free(library) {
                continue;
            }
            // SAFETY: the buffer owns the event and the memory, and no copy uses them any longer.
            unsafe {
                (library.api.event_destroy)(buffer.copied);
                (library.api.mem_free_host)(buffer.address as *mut c_void);
            }
        }
    }

    fn take(&self, library: &CudaLibrary, len: usize) -> Result<Buffer> {
        let mut buffers = self.lock();
        let fitting = buffers.iter().position(|one| one.capacity >= len && one.is_free(library));
        if let Some(index) = fitting {
            return Ok(buffers.swap_remove(index));
        }
        drop(buffers);
        Buffer::new(library, len.next_power_of_two().max(MIN_BUFFER_BYTES))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Buffer>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Buffer {
    fn new(library: &CudaLibrary, capacity: usize) -> Result<Self> {
        let copied = library.create_local_event()?;
        let mut address = std::ptr::null_mut();
        // SAFETY: writes one address.
        let status =
            unsafe { (library.api.mem_host_alloc)(&raw mut address, capacity, MEMHOSTALLOC_PORTABLE) };
        if let Err(error) = library.check("cuMemHostAlloc", status) {
            // SAFETY: the event was created above.
            unsafe { (library.api.event_destroy)(copied) };
            return Err(error);
        }
        Ok(Self { address: address as usize, capacity, copied })
    }

    fn is_free(&self, library: &CudaLibrary) -> bool {
        // SAFETY: the event lives as long as the buffer.
        unsafe { (library.api.event_query)(self.copied) == number::SUCCESS }
    }
}
