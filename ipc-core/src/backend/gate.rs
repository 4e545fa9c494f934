//! Gates in streams, for tests.

#![allow(unsafe_code, reason = "maps the pages of the words that streams wait for")]

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use crate::backend::stream::BorrowedStream;
use crate::backend::{DeviceIpc, DeviceTimelines, test_kernels_of};
use crate::model::address::DevicePtr;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};

/// A point in a stream that the stream does not pass before the gate is opened: for tests that show that something does not wait
/// for the stream. Dropping it opens it.
#[derive(Debug)]
pub struct Gate(Barrier);

#[derive(Debug)]
enum Barrier {
    /// A word that the stream waits for.
    Word(&'static AtomicU64),
    /// A host function waits for this.
    HostFunction(Arc<(Mutex<bool>, Condvar)>),
}

impl Gate {
    /// Closes a gate in a stream of the backend, behind the work that was submitted before.
    ///
    /// # Errors
    ///
    /// As [`Stream::gate`](crate::Stream::gate).
    pub fn close(backend: &Arc<dyn DeviceIpc>, stream: BorrowedStream<'_>) -> Result<Self> {
        if let Some(kernels) = backend.test_kernels() {
            kernels.load(stream.device())?;
        }
        let Some(timelines) = backend.timelines().filter(|_| has_timelines(&**backend, stream)) else {
            let open = Arc::new((Mutex::new(false), Condvar::new()));
            let barrier = Arc::clone(&open);
            let wait = move || {
                let is_open = open.0.lock().unwrap_or_else(PoisonError::into_inner);
                drop(open.1.wait_while(is_open, |is_open| !*is_open));
            };
            test_kernels_of(&**backend)?.host_function(Box::new(wait), stream)?;
            return Ok(Self(Barrier::HostFunction(barrier)));
        };
        let (word, address) = GatePage::next_word(backend, timelines, stream.device())?;
        // SAFETY: an aligned word of a registered page.
        unsafe { timelines.wait_value(address, 1, stream) }?;
        Ok(Self(Barrier::Word(word)))
    }

    /// Lets the stream continue.
    pub fn open(&self) {
        match &self.0 {
            Barrier::Word(word) => word.store(1, Ordering::Release),
            Barrier::HostFunction(open) => {
                *open.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
                open.1.notify_all();
            }
        }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}

/// A page of words of gates. Each word serves one gate, and the page is never unmapped: the stream may reach a gate after its drop.
struct GatePage {
    backend: Arc<dyn DeviceIpc>,
    device: DeviceOrdinal,
    words: &'static [AtomicU64],
    address: DevicePtr,
    used: usize,
}

impl GatePage {
    /// Returns a word that has not been used, and its address on the device.
    fn next_word(
        backend: &Arc<dyn DeviceIpc>,
        timelines: &dyn DeviceTimelines,
        device: DeviceOrdinal,
    ) -> Result<(&'static AtomicU64, DevicePtr)> {
        static PAGES: Mutex<Vec<GatePage>> = Mutex::new(Vec::new());
        let mut pages = PAGES.lock().unwrap_or_else(PoisonError::into_inner);
        let has_word = |page: &GatePage| {
            Arc::ptr_eq(&page.backend, backend) && page.device == device && page.used < page.words.len()
        };
        let index = match pages.iter().position(has_word) {
            Some(index) => index,
            None => {
                pages.push(Self::new(backend, timelines, device)?);
                pages.len() - 1
            }
        };
        let page = &mut pages[index];
        let (word, offset) = (&page.words[page.used], page.used * size_of::<AtomicU64>());
        page.used += 1;
        Ok((word, DevicePtr::new(page.address.get() + offset as u64)))
    }

    fn new(
        backend: &Arc<dyn DeviceIpc>,
        timelines: &dyn DeviceTimelines,
        device: DeviceOrdinal,
    ) -> Result<Self> {
        /// A multiple of every page size.
        const BYTES: usize = 64 << 10;
        let failed = |error| Error::io("mapping the page of a gate", std::io::Error::from(error));
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping.
        let page =
            unsafe { mmap_anonymous(ptr::null_mut(), BYTES, access, MapFlags::SHARED) }.map_err(failed)?;
        let page = NonNull::new(page.cast::<u8>()).expect("a mapping has an address");
        // SAFETY: the mapping is aligned to a page, initialised with zeros, and never unmapped.
        let words =
            unsafe { NonNull::slice_from_raw_parts(page.cast(), BYTES / size_of::<AtomicU64>()).as_ref() };
        // SAFETY: shared memory that stays mapped, and registered.
        let address = unsafe { timelines.register(device, page, BYTES) }?;
        Ok(Self { backend: Arc::clone(backend), device, words, address, used: 0 })
    }
}

fn has_timelines(backend: &dyn DeviceIpc, stream: BorrowedStream<'_>) -> bool {
    backend.capabilities(stream.device()).is_ok_and(|capabilities| capabilities.timelines)
}
