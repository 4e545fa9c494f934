//! A page of host memory that two processes map, for raw words.

#![allow(unsafe_code, reason = "shared memory")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use anyhow::{Context, Result};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};

/// Length in bytes: a multiple of the page size of every supported machine.
const BYTES: usize = 64 * 1024;

/// Offsets of the two words, which are in separate cache lines because each has one writer.
pub(crate) const REQUEST: u64 = 0;
pub(crate) const RESPONSE: u64 = 64;

/// A page that stays mapped until the process exits, because a device may access it.
pub(crate) struct Page {
    address: NonNull<u8>,
    file: File,
}

impl Page {
    /// Creates a page of zeros.
    pub(crate) fn create() -> Result<Self> {
        let file =
            memfd_create("device-ipc-bench-words", MemfdFlags::CLOEXEC).context("cannot create a page")?;
        ftruncate(&file, BYTES as u64).context("cannot create a page")?;
        Self::map(file.into())
    }

    /// Maps the page that another process created.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = File::options().read(true).write(true).open(path);
        Self::map(file.with_context(|| format!("cannot open the page {}", path.display()))?)
    }

    /// Returns the path under which other processes of this user can open it.
    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()).into()
    }

    pub(crate) fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// Returns a word for host access.
    pub(crate) fn word(&self, offset: u64) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset < BYTES as u64, "the offset is within the page");
        // SAFETY: the word is within the page, which stays mapped until the process exits, and aligned; hosts access it atomically.
        unsafe { AtomicU64::from_ptr(self.address.byte_add(offset as usize).cast().as_ptr()) }
    }

    pub(crate) const fn bytes(&self) -> usize {
        BYTES
    }

    fn map(file: File) -> Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel selects.
        let address = unsafe { mmap(ptr::null_mut(), BYTES, protection, MapFlags::SHARED, &file, 0) };
        let address = NonNull::new(address.context("cannot map a page")?.cast());
        Ok(Self { address: address.context("cannot map a page")?, file })
    }
}
