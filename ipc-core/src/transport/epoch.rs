//! An exporter's count of drops, in shared memory.
//!
//! A repeated open takes no message. The importer still has to notice that the export has been dropped in the meantime, from the
//! moment at which the exporter's call returned: the notification may still be in flight. So the exporter counts its drops in a
//! page that all its importers map read-only; where the count has changed, they ask. The page also shows whether the exporter is
//! alive ([`alive`]). Another export of a keeper counts as a drop: mappings that follow the keeper ask only where the count has changed.

#![allow(unsafe_code, reason = "shared memory")]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::alive;
use crate::os::received_file;

/// Bytes of the page. The count is the first eight bytes, in native order; the word of [`alive`] is the next four.
const BYTES: usize = 4096;
const ALIVE: usize = 8;

/// The exporter's page.
#[derive(Debug)]
pub(crate) struct Epoch {
    page: EpochPage,
    file: OwnedFd,
}

impl Epoch {
    /// Creates a page, with the count 0.
    pub(crate) fn create() -> rustix::io::Result<Self> {
        let file = memfd_create("device-ipc-epoch", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, BYTES as u64)?;
        let page = EpochPage::map(file.as_fd(), ProtFlags::READ | ProtFlags::WRITE)?;
        // Importers cannot write, and no process can cut the file short.
        fcntl_add_seals(
            &file,
            SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL,
        )?;
        Ok(Self { page, file })
    }

    /// Counts a drop.
    pub(crate) fn advance(&self) {
        self.page.number().fetch_add(1, Ordering::Release);
    }

    /// Ties the page to the calling thread, the poller's: importers see its termination. The page is kept until the process
    /// terminates.
    pub(crate) fn tie_to_this_thread(&'static self) {
        alive::tie_to_this_thread(self.page.alive());
    }

    /// Returns the file that importers map.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// An importer's view of an exporter's page.
#[derive(Debug)]
pub(crate) struct EpochView {
    page: EpochPage,
}

impl EpochView {
    /// Maps the file of an exporter. `None` for a file whose use could fail later: one that is too short, or that can be cut short.
    pub(super) fn open(file: &OwnedFd) -> Option<Self> {
        received_file::check(file, SealFlags::empty(), BYTES as u64, "the page of the exporter").ok()?;
        Some(Self { page: EpochPage::map(file.as_fd(), ProtFlags::READ).ok()? })
    }

    /// Returns the count.
    pub(crate) fn read(&self) -> u64 {
        // The mapping is read-only, where std promises relaxed loads alone.
        let number = self.page.number().load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        number
    }

    /// Returns whether the exporter is alive. `None` where that is unknown.
    pub(super) fn exporter_lives(&self) -> Option<bool> {
        alive::runs(self.page.alive())
    }
}

/// A mapped page.
#[derive(Debug)]
struct EpochPage(ptr::NonNull<AtomicU64>);

// SAFETY: the page is only touched through an atomic number, and unmapped by drop alone.
unsafe impl Send for EpochPage {}
// SAFETY: as above.
unsafe impl Sync for EpochPage {}

impl EpochPage {
    fn map(file: BorrowedFd<'_>, protection: ProtFlags) -> rustix::io::Result<Self> {
        // SAFETY: a new mapping wherever the kernel puts it.
        let address = unsafe { mmap(ptr::null_mut(), BYTES, protection, MapFlags::SHARED, file, 0)? };
        let page = ptr::NonNull::new(address.cast::<AtomicU64>());
        page.map(Self).ok_or(rustix::io::Errno::NOMEM)
    }

    fn number(&self) -> &AtomicU64 {
        // SAFETY: the page is mapped as long as `self`, its start is aligned, and all processes use it as an atomic number.
        // A view is only loaded from.
        unsafe { self.0.as_ref() }
    }

    fn alive(&self) -> &AtomicU32 {
        // SAFETY: as above; inside the page, and aligned.
        unsafe { self.0.byte_add(ALIVE).cast().as_ref() }
    }
}

impl Drop for EpochPage {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this size, and nothing refers to it any longer.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), BYTES) };
    }
}

#[cfg(test)]
mod tests;
