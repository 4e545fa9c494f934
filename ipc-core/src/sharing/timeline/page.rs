//! Counter pages: words that two processes and their devices share.

#![allow(unsafe_code, reason = "words in shared memory")]

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use super::{ENDED, Side};
use crate::backend::{DeviceIpc, DeviceTimelines};
use crate::model::address::DevicePtr;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::sharing::host_pages::{GRANULE, HostPages, Use};

/// Bytes of a page.
const BYTES: usize = GRANULE;

/// Bytes of a slot: each side's words have a cache line of their own.
const SLOT_BYTES: usize = 256;

/// Number of slots of a page.
pub(crate) const SLOTS: u32 = (BYTES / SLOT_BYTES) as u32;

/// A word of a slot, by its offset in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    /// The exporter's: 1 when the bytes are ready.
    Ready = 0,
    /// The exporter's timeline, which the importer waits for.
    FromExporter = 64,
    /// The importer's timeline, which the exporter waits for.
    FromImporter = 128,
    /// Written by the exporter's host, for a ring: the sequence at which the reader begins.
    Start = 192,
    /// Written by the exporter's host, for a ring: the total number of publications, once it is known.
    Total = 200,
}

/// A page in shared memory, mapped here, and known to the devices whose streams have used it.
#[derive(Debug)]
pub(crate) struct WordPage {
    pages: HostPages,
    /// Streams of this process have been made to wait for words of it.
    awaited: AtomicBool,
}

impl WordPage {
    /// Creates a page of zeros, and its file, which other processes map.
    pub(crate) fn create() -> Result<(Arc<Self>, OwnedFd)> {
        Self::create_as("device-ipc-words")
    }

    /// As [`create`](Self::create), under the name that `/proc` shows.
    pub(super) fn create_as(name: &str) -> Result<(Arc<Self>, OwnedFd)> {
        let (pages, file) = HostPages::create(name, BYTES)?.into_file();
        Ok((Arc::new(Self { pages, awaited: AtomicBool::new(false) }), file))
    }

    /// Maps the page of another process, and closes its file: the mapping is enough.
    pub(crate) fn open(file: OwnedFd) -> Result<Arc<Self>> {
        let (pages, _) = HostPages::open(file, BYTES, "its page of words")?.into_file();
        Ok(Arc::new(Self { pages, awaited: AtomicBool::new(false) }))
    }

    /// Notes that a stream of this process waits for a word of the page.
    pub(super) fn note_awaited(&self) {
        // Mostly it says so already.
        if !self.awaited.load(Ordering::Relaxed) {
            self.awaited.store(true, Ordering::Release);
        }
    }

    /// Returns whether a stream of this process was made to wait for a word of the page.
    pub(crate) fn is_awaited(&self) -> bool {
        // Pairs with the fence of a wait: see `endpoint`.
        fence(Ordering::SeqCst);
        self.awaited.load(Ordering::Acquire)
    }

    /// Ends the counters that a side waits for, in all slots: the peer has terminated, and no new lease uses them.
    pub(crate) fn poison(&self, side: Side) {
        let word = if side == Side::Exporter { Word::FromImporter } else { Word::FromExporter };
        for slot in 0..SLOTS {
            self.word(slot, word).store(ENDED, Ordering::Release);
        }
    }

    /// Returns a word, for the host. The slot is below [`SLOTS`].
    pub(crate) fn word(&self, slot: u32, word: Word) -> &AtomicU64 {
        assert!(slot < SLOTS, "checked where slots are taken over");
        // SAFETY: inside the mapping, which lives as long as `self`; aligned; everybody uses words atomically.
        unsafe {
            let word = self.pages.base().byte_add(slot as usize * SLOT_BYTES + word as usize);
            AtomicU64::from_ptr(word.cast().as_ptr())
        }
    }

    /// Returns consecutive words from the beginning of a slot, for hosts only.
    pub(crate) fn words(&self, slot: u32, count: usize) -> &[AtomicU64] {
        let begin = slot as usize * SLOT_BYTES;
        assert!(begin + count * size_of::<AtomicU64>() <= BYTES, "they lie inside the page");
        // SAFETY: inside the mapping, which lives as long as `self`; aligned; everybody uses words atomically.
        unsafe { std::slice::from_raw_parts(self.pages.base().byte_add(begin).cast().as_ptr(), count) }
    }

    /// Returns the address of a word for streams of a device. Registers the page with the device first.
    pub(super) fn word_on(
        &self,
        backend: &Arc<dyn DeviceIpc>,
        device: DeviceOrdinal,
        slot: u32,
        word: Word,
    ) -> Result<DevicePtr> {
        assert!(slot < SLOTS, "checked where slots are taken over");
        let base = self.pages.known_to(backend, device, Use::Words)?;
        let offset = u64::from(slot) * SLOT_BYTES as u64 + word as u64;
        base.checked_add(offset).ok_or_else(|| {
            Error::InvalidRegion(format!("a page registered at {base} leaves the device's address space"))
        })
    }
}

/// Returns the backend's timelines, where the device supports them.
pub(crate) fn timelines_of(backend: &dyn DeviceIpc, device: DeviceOrdinal) -> Result<&dyn DeviceTimelines> {
    let usable = backend.capabilities(device)?.timelines;
    backend.timelines().filter(|_| usable).ok_or_else(|| Error::Unsupported {
        backend: backend.info().name,
        what: format!("let streams of device {device} write and wait on words"),
        why: "the device, or this driver, has no stream memory operations; order by events, or synchronise on the host"
            .into(),
    })
}

#[cfg(test)]
mod tests;
