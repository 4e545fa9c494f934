//! Counter pages: words that two processes and their devices share, in slots.

#![allow(unsafe_code, reason = "words in shared memory")]

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use crate::backend::DeviceIpc;
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

/// The role of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Exporter,
    Importer,
}

/// The value of a word whose timeline has ended: it satisfies every wait, as words are compared by their signed difference
/// and a word is a base and a value, both below [`TIMELINE_END`].
pub(crate) const ENDED: u64 = i64::MAX as u64;

/// As [`Timeline::END`](super::Timeline::END).
pub(crate) const TIMELINE_END: u64 = 1 << 62;

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

/// A slot in one of its lives.
#[derive(Clone, Debug)]
pub(crate) struct TimelineSlot {
    pub(crate) page: Arc<WordPage>,
    pub(crate) slot: u32,
    /// Value of the words at which the counters of this life are 0. Below [`TIMELINE_END`].
    pub(crate) base: u64,
}

impl TimelineSlot {
    /// The slot of a page that is used for one life only.
    pub(crate) const fn first(page: Arc<WordPage>, slot: u32) -> Self {
        Self { page, slot, base: 0 }
    }

    /// Sets the words to the base.
    pub(super) fn begin_life(&self) {
        for word in [Word::Start, Word::Total] {
            self.page.word(self.slot, word).store(0, Ordering::Release);
        }
        for word in [Word::Ready, Word::FromExporter, Word::FromImporter] {
            self.page.word(self.slot, word).store(self.base, Ordering::Release);
        }
    }

    /// Satisfies every wait, also one that a stream has yet to reach.
    pub(super) fn end_life(&self) {
        for word in [Word::Ready, Word::FromExporter, Word::FromImporter] {
            self.page.word(self.slot, word).store(ENDED, Ordering::Release);
        }
    }
}

/// Checks a value of a counter.
pub(super) fn check_range(value: u64) -> Result<()> {
    if value < TIMELINE_END {
        return Ok(());
    }
    Err(Error::invalid_input(format!("timeline value {value}"), "values are below 2^62, which marks the end"))
}

#[cfg(test)]
mod tests;
