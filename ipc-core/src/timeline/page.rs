//! Pages of words that two processes and their devices share.

#![allow(unsafe_code, reason = "words in shared memory")]

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::address::DevicePtr;
use crate::backend::{DeviceIpc, DeviceTimelines};
use crate::device::DeviceOrdinal;
use crate::error::{Error, Result};
use crate::host_pages::{GRANULE, HostPages, Use};

/// Bytes of a page.
const BYTES: usize = GRANULE;

/// Bytes of a slot: its words lie in cache lines of their own.
const SLOT_BYTES: usize = 256;

/// How many slots a page has.
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
    /// The exporter's host's, for a ring: where the reader begins.
    Start = 192,
    /// The exporter's host's, for a ring: how many publications there have been, once there will be no more.
    Total = 200,
}

/// A page in shared memory, mapped here, and known to the devices whose streams have used it.
#[derive(Debug)]
pub(crate) struct WordPage {
    pages: HostPages,
}

impl WordPage {
    /// A new page of zeros.
    pub(crate) fn create() -> Result<Arc<Self>> {
        Ok(Arc::new(Self { pages: HostPages::create("device-ipc-words", BYTES)? }))
    }

    /// The page that another process made.
    pub(crate) fn open(file: OwnedFd) -> Result<Arc<Self>> {
        Ok(Arc::new(Self { pages: HostPages::open(file, BYTES, "its page of words")? }))
    }

    /// What the other process maps.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.pages.file()
    }

    /// A word, for the host. The slot is below [`SLOTS`].
    pub(crate) fn word(&self, slot: u32, word: Word) -> &AtomicU64 {
        assert!(slot < SLOTS, "checked where slots are taken over");
        // SAFETY: inside the mapping, which lives as long as `self`; aligned; everybody uses words atomically.
        unsafe {
            let word = self.pages.base().byte_add(slot as usize * SLOT_BYTES + word as usize);
            AtomicU64::from_ptr(word.cast().as_ptr())
        }
    }

    /// Words that lie one behind the other, for hosts alone, from the beginning of this slot.
    pub(crate) fn words(&self, slot: u32, count: usize) -> &[AtomicU64] {
        let begin = slot as usize * SLOT_BYTES;
        assert!(begin + count * size_of::<AtomicU64>() <= BYTES, "they lie inside the page");
        // SAFETY: inside the mapping, which lives as long as `self`; aligned; everybody uses words atomically.
        unsafe { std::slice::from_raw_parts(self.pages.base().byte_add(begin).cast().as_ptr(), count) }
    }

    /// A word, for streams of a device. The page is registered with the device first.
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

/// The backend's words, where the device has them.
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
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn words_written_here_are_read_through_the_file_and_do_not_overlap() {
        let page = WordPage::create().unwrap();
        let far = WordPage::open(page.file().try_clone_to_owned().unwrap()).unwrap();
        let words = [Word::Ready, Word::FromExporter, Word::FromImporter, Word::Start, Word::Total];
        for slot in [0, 7, SLOTS - 1] {
            for word in words {
                page.word(slot, word).store(u64::from(slot) * 10 + word as u64, Ordering::Release);
            }
        }
        for slot in [0, 7, SLOTS - 1] {
            for word in words {
                assert_eq!(far.word(slot, word).load(Ordering::Acquire), u64::from(slot) * 10 + word as u64);
            }
        }
    }

    #[test]
    fn a_file_that_could_be_cut_short_is_no_page() {
        use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

        let unsealed = memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&unsealed, BYTES as u64).unwrap();
        assert!(matches!(WordPage::open(unsealed), Err(Error::Protocol(_))));
    }
}
