//! Staging buffers: memory that holds the bytes of a copy in transit.
//!
//! A write returns before the device executes it, and the caller may then reuse the bytes: `aclrtMemcpyAsync` is
//! asynchronous for page-locked host memory only ("Memory Copy and Set"), so the bytes are copied there first. Copies
//! between the host and memory of another card pass through memory of the stream's card. A buffer is reused once an
//! event behind its last use has completed.

use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use device_ipc_core::Result;

use crate::bindings::*;
use crate::library::{AclLibrary, call};

/// Minimum size of a buffer in bytes. Sizes are powers of two, so that buffers can be reused.
const MIN_BUFFER_BYTES: usize = 64 << 10;
/// Maximum number of bytes in a buffer.
pub(crate) const MAX_STAGED_BYTES: usize = 64 << 20;

/// The staging buffers of one device, whose context must be current in every method.
pub(crate) struct Staging {
    pub(crate) host: Pool,
    pub(crate) card: Pool,
}

/// The buffers in one kind of memory.
pub(crate) struct Pool {
    place: Place,
    buffers: Mutex<Vec<Buffer>>,
}

#[derive(Clone, Copy)]
enum Place {
    Host,
    Card,
}

/// A buffer with an event of its device. Its bytes stay untouched while it is in a pool and the event is pending.
pub(crate) struct Buffer {
    address: usize,
    capacity: usize,
    /// `aclrtEvent`.
    passed: usize,
    /// The `aclrtStream` that the event was recorded on, until the stream is destroyed: events on a failed stream never
    /// complete.
    stream: Option<usize>,
}

impl Default for Staging {
    fn default() -> Self {
        let pool = |place| Pool { place, buffers: Mutex::default() };
        Self { host: pool(Place::Host), card: pool(Place::Card) }
    }
}

impl Staging {
    /// Marks the buffers of a destroyed stream as unused by it.
    pub(crate) fn forget(&self, stream: usize) {
        self.host.forget(stream);
        self.card.forget(stream);
    }

    /// Frees the buffers without pending work. The runtime frees the others with the device.
    pub(crate) fn release(&self, library: &AclLibrary) {
        for pool in [&self.host, &self.card] {
            for buffer in pool.lock().drain(..) {
                if buffer.is_free(library) {
                    buffer.free(library, pool.place);
                }
            }
        }
    }
}

impl Pool {
    /// Takes a buffer of at least `len` bytes.
    pub(crate) fn take(&self, library: &AclLibrary, len: usize) -> Result<Buffer> {
        let mut buffers = self.lock();
        let fitting = buffers.iter().position(|one| one.capacity >= len && one.is_free(library));
        if let Some(index) = fitting {
            return Ok(buffers.swap_remove(index));
        }
        drop(buffers);
        Buffer::new(library, self.place, len.next_power_of_two().max(MIN_BUFFER_BYTES))
    }

    /// Returns a buffer that no submitted work uses.
    pub(crate) fn put_back(&self, buffer: Buffer) {
        self.lock().push(buffer);
    }

    /// Marks the buffers of a destroyed stream as unused by it.
    ///
    /// The stream has no work any longer.
    fn forget(&self, stream: usize) {
        self.lock().iter_mut().filter(|one| one.stream == Some(stream)).for_each(|one| one.stream = None);
    }

    /// Returns a buffer that submitted work on the stream uses.
    pub(crate) fn put_back_after(
        &self,
        library: &AclLibrary,
        mut buffer: Buffer,
        stream: aclrtStream,
    ) -> Result<()> {
        buffer.stream = Some(stream.0 as usize);
        // SAFETY: stream and event are of this device.
        let recorded = unsafe { call!(library, aclrtRecordEvent(buffer.event(), stream)) };
        if recorded == ACL_SUCCESS {
            self.put_back(buffer);
            return Ok(());
        }
        let error = library.error("aclrtRecordEvent", recorded, "");
        // Without a record, only the stream's completion proves that the device no longer uses the bytes.
        // SAFETY: the stream lives.
        let waited = unsafe { call!(library, aclrtSynchronizeStream(stream)) };
        if waited == ACL_SUCCESS {
            self.put_back(buffer);
        } else {
            tracing::warn!(target: crate::LOG, status = waited, "leaked a staging buffer that pending work may use");
        }
        Err(error)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Buffer>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Buffer {
    fn new(library: &AclLibrary, place: Place, capacity: usize) -> Result<Self> {
        let passed = library.create_local_event()?;
        let mut address: *mut c_void = std::ptr::null_mut();
        let (name, status) = match place {
            Place::Host => {
                // SAFETY: writes one address.
                let status = unsafe { call!(library, aclrtMallocHost(&raw mut address, capacity)) };
                ("aclrtMallocHost", status)
            }
            Place::Card => {
                let policy = aclrtMemMallocPolicy::ACL_MEM_MALLOC_HUGE_FIRST;
                // SAFETY: writes one address.
                let status =
                    unsafe { call!(library, aclrtMallocAlign32(&raw mut address, capacity, policy)) };
                ("aclrtMallocAlign32", status)
            }
        };
        if let Err(error) = library.check(name, status) {
            // SAFETY: the event was created above.
            unsafe { call!(library, aclrtDestroyEvent(passed)) };
            return Err(error);
        }
        Ok(Self { address: address as usize, capacity, passed: passed.0 as usize, stream: None })
    }

    /// Returns the address of the bytes.
    pub(crate) fn address(&self) -> u64 {
        self.address as u64
    }

    /// Copies `bytes` into the buffer, which must be host memory and large enough.
    pub(crate) fn copy_from(&mut self, bytes: &[u8]) {
        assert!(bytes.len() <= self.capacity, "the staging buffer is large enough");
        // SAFETY: a buffer outside a pool is exclusively ours, and holds at least `bytes.len()` bytes.
        unsafe { (self.address as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    /// Copies the buffer, which must be host memory and large enough, into `bytes`. No pending work writes the buffer.
    pub(crate) fn copy_to(&self, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.capacity, "the staging buffer is large enough");
        // SAFETY: as above.
        unsafe { (self.address as *const u8).copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
    }

    fn event(&self) -> aclrtEvent {
        aclrtEvent(self.passed as *mut c_void)
    }

    fn is_free(&self, library: &AclLibrary) -> bool {
        if self.stream.is_none() {
            return true;
        }
        let mut status = aclrtEventRecordedStatus::ACL_EVENT_RECORDED_STATUS_NOT_READY;
        // SAFETY: writes one status; the event lives as long as the buffer.
        let asked = unsafe { call!(library, aclrtQueryEventStatus(self.event(), &raw mut status)) };
        asked == ACL_SUCCESS && status == aclrtEventRecordedStatus::ACL_EVENT_RECORDED_STATUS_COMPLETE
    }

    fn free(self, library: &AclLibrary, place: Place) {
        let address = self.address as *mut c_void;
        // SAFETY: the buffer owns the event and the memory, and no work uses them any longer.
        unsafe {
            call!(library, aclrtDestroyEvent(self.event()));
            match place {
                Place::Host => call!(library, aclrtFreeHost(address)),
                Place::Card => call!(library, aclrtFree(address)),
            };
        }
    }
}
