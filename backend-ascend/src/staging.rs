//! Memory that bytes wait in on their way.
//!
//! A write has to return before the device gets there, and the caller may re-use the bytes then: `aclrtMemcpyAsync` is
//! asynchronous for page-locked host memory only ("Memory Copy and Set"), so the bytes are copied there first. And
//! what goes between the host and memory of another card goes through memory of this one. A buffer is taken again once
//! an event behind its last use has been reached.

use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use device_ipc_core::Result;

use crate::bindings::*;
use crate::driver::{Driver, call};

/// The smallest buffer. Sizes are powers of two, so that buffers fit again.
const SMALLEST: usize = 64 << 10;
/// The most bytes that a buffer holds.
pub(crate) const LARGEST: usize = 64 << 20;

/// The buffers of one device. Its context is current in every method.
pub(crate) struct Staging {
    pub(crate) host: Pool,
    pub(crate) card: Pool,
}

/// Buffers of one sort.
pub(crate) struct Pool {
    place: Place,
    buffers: Mutex<Vec<Buffer>>,
}

#[derive(Clone, Copy)]
enum Place {
    Host,
    Card,
}

/// A buffer with an event of its device. Nobody touches its bytes while it is in a pool and the event is not reached.
pub(crate) struct Buffer {
    address: usize,
    capacity: usize,
    /// `aclrtEvent`.
    passed: usize,
    /// The `aclrtStream` that the event was recorded on, until that has ended: one whose work failed reaches nothing more.
    stream: Option<usize>,
}

impl Default for Staging {
    fn default() -> Self {
        let pool = |place| Pool { place, buffers: Mutex::default() };
        Self { host: pool(Place::Host), card: pool(Place::Card) }
    }
}

impl Staging {
    /// The stream, which was destroyed, has come to its end.
    pub(crate) fn forget(&self, stream: usize) {
        self.host.forget(stream);
        self.card.forget(stream);
    }

    /// Frees the buffers that no work uses any longer. The rest goes with the device.
    pub(crate) fn release(&self, driver: &Driver) {
        for pool in [&self.host, &self.card] {
            for buffer in pool.lock().drain(..) {
                if buffer.is_free(driver) {
                    buffer.free(driver, pool.place);
                }
            }
        }
    }
}

impl Pool {
    /// A buffer of at least so many bytes.
    pub(crate) fn take(&self, driver: &Driver, len: usize) -> Result<Buffer> {
        let mut buffers = self.lock();
        let fitting = buffers.iter().position(|one| one.capacity >= len && one.is_free(driver));
        if let Some(index) = fitting {
            return Ok(buffers.swap_remove(index));
        }
        drop(buffers);
        Buffer::new(driver, self.place, len.next_power_of_two().max(SMALLEST))
    }

    /// Gives back a buffer that no submitted work uses.
    pub(crate) fn put_back(&self, buffer: Buffer) {
        self.lock().push(buffer);
    }

    /// The stream has come to its end: no work of it uses any buffer.
    fn forget(&self, stream: usize) {
        self.lock().iter_mut().filter(|one| one.stream == Some(stream)).for_each(|one| one.stream = None);
    }

    /// Gives back a buffer that work on the stream uses.
    pub(crate) fn put_back_behind(
        &self,
        driver: &Driver,
        mut buffer: Buffer,
        stream: aclrtStream,
    ) -> Result<()> {
        buffer.stream = Some(stream.0 as usize);
        // SAFETY: stream and event are of this device.
        let recorded = unsafe { call!(driver, aclrtRecordEvent(buffer.event(), stream)) };
        if recorded == ACL_SUCCESS {
            self.put_back(buffer);
            return Ok(());
        }
        let error = driver.error("aclrtRecordEvent", recorded, "");
        // Without a record nothing tells when the device is done with the bytes.
        // SAFETY: the stream lives.
        let waited = unsafe { call!(driver, aclrtSynchronizeStream(stream)) };
        if waited == ACL_SUCCESS {
            self.put_back(buffer);
        } else {
            tracing::warn!(status = waited, "leaves a staging buffer to the driver");
        }
        Err(error)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Buffer>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Buffer {
    fn new(driver: &Driver, place: Place, capacity: usize) -> Result<Self> {
        let mut passed = aclrtEvent(std::ptr::null_mut());
        // SAFETY: writes one event. Such an event can be recorded again and again, and counts as reached before.
        let status = unsafe { call!(driver, aclrtCreateEventExWithFlag(&raw mut passed, ACL_EVENT_SYNC)) };
        driver.check("aclrtCreateEventExWithFlag", status)?;
        let mut address: *mut c_void = std::ptr::null_mut();
        let (name, status) = match place {
            Place::Host => {
                // SAFETY: writes one address.
                let status = unsafe { call!(driver, aclrtMallocHost(&raw mut address, capacity)) };
                ("aclrtMallocHost", status)
            }
            Place::Card => {
                let policy = aclrtMemMallocPolicy::ACL_MEM_MALLOC_HUGE_FIRST;
                // SAFETY: writes one address.
                let status = unsafe { call!(driver, aclrtMallocAlign32(&raw mut address, capacity, policy)) };
                ("aclrtMallocAlign32", status)
            }
        };
        if let Err(error) = driver.check(name, status) {
            // SAFETY: the event was created above.
            unsafe { call!(driver, aclrtDestroyEvent(passed)) };
            return Err(error);
        }
        Ok(Self { address: address as usize, capacity, passed: passed.0 as usize, stream: None })
    }

    /// Where the bytes are.
    pub(crate) fn address(&self) -> u64 {
        self.address as u64
    }

    /// Takes the bytes, of which the buffer, one of the host's, holds at least as many.
    pub(crate) fn copy_from(&mut self, bytes: &[u8]) {
        assert!(bytes.len() <= self.capacity, "a staging buffer is as large as was asked for");
        // SAFETY: the buffer is ours alone while it is not in a pool, and holds at least as many bytes.
        unsafe { (self.address as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    /// Gives the bytes, of which the buffer, one of the host's, holds at least as many. No work writes them any longer.
    pub(crate) fn copy_to(&self, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.capacity, "a staging buffer is as large as was asked for");
        // SAFETY: as above.
        unsafe { (self.address as *const u8).copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
    }

    fn event(&self) -> aclrtEvent {
        aclrtEvent(self.passed as *mut c_void)
    }

    fn is_free(&self, driver: &Driver) -> bool {
        if self.stream.is_none() {
            return true;
        }
        let mut status = aclrtEventRecordedStatus::ACL_EVENT_RECORDED_STATUS_NOT_READY;
        // SAFETY: writes one status; the event lives as long as the buffer.
        let asked = unsafe { call!(driver, aclrtQueryEventStatus(self.event(), &raw mut status)) };
        asked == ACL_SUCCESS && status == aclrtEventRecordedStatus::ACL_EVENT_RECORDED_STATUS_COMPLETE
    }

    fn free(self, driver: &Driver, place: Place) {
        let address = self.address as *mut c_void;
        // SAFETY: the event and the memory are this buffer's, and no work uses them any longer.
        unsafe {
            call!(driver, aclrtDestroyEvent(self.event()));
            match place {
                Place::Host => call!(driver, aclrtFreeHost(address)),
                Place::Card => call!(driver, aclrtFree(address)),
            };
        }
    }
}
