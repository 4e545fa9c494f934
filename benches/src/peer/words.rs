//! A page of host memory that two processes map, for bare words.

#![allow(unsafe_code, reason = "shared memory")]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use anyhow::{Context, Result};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};

/// As large as a page is on any machine that runs accelerators.
const BYTES: usize = 64 * 1024;

/// The two words, in cache lines of their own: each has one writer.
pub(crate) const THERE: u64 = 0;
pub(crate) const BACK: u64 = 64;

/// Mapped until the process ends, as a device may know it.
pub(crate) struct Page {
    address: NonNull<u8>,
    file: File,
}

impl Page {
    /// A new page of zeros.
    pub(crate) fn create() -> Result<Self> {
        let file = memfd_create("device-ipc-bench-words", MemfdFlags::CLOEXEC).context("making a page")?;
        ftruncate(&file, BYTES as u64).context("making a page")?;
        Self::map(file.into())
    }

    /// The page that another process made.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let file = File::options().read(true).write(true).open(path);
        Self::map(file.with_context(|| format!("opening the page {}", path.display()))?)
    }

    /// Where other processes of this user find it.
    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()).into()
    }

    pub(crate) fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// A word, for the host.
    pub(crate) fn word(&self, offset: u64) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset < BYTES as u64, "a word of the page");
        // SAFETY: inside the page, which stays mapped until the process ends, and aligned; hosts use it atomically.
        unsafe { AtomicU64::from_ptr(self.address.byte_add(offset as usize).cast().as_ptr()) }
    }

    pub(crate) const fn bytes(&self) -> usize {
        BYTES
    }

    fn map(file: File) -> Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping wherever the kernel puts it.
        let address = unsafe { mmap(ptr::null_mut(), BYTES, protection, MapFlags::SHARED, &file, 0) };
        let address = NonNull::new(address.context("mapping a page")?.cast());
        Ok(Self { address: address.context("mapping a page")?, file })
    }
}
