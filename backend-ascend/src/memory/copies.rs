//! Copies, which also work on imported memory of other cards.
//!
//! For memory that was imported from another card, "IPC Memory Sharing" of the ACL manual (`aclrtIpcMemGetExportKey`,
//! "Restrictions") excludes: deriving the direction from the addresses, any copy between it and the host, and the
//! synchronous copy within a device; it allows the asynchronous one, `ACL_MEMCPY_DEVICE_TO_DEVICE`. So every copy here
//! is asynchronous with a stated direction, and copies between such memory and the host pass through a buffer on the
//! stream's card. The page does not mention fills; they take the same path.

use device_ipc_core::{BorrowedStream, DeviceRange, Result};

use super::imports;
use crate::bindings::*;
use crate::library::call;
use crate::objects::driver::Driver;
use crate::objects::staging::{Buffer, MAX_STAGED_BYTES};

/// The device memory of a copy from or to the host.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub(crate) address: u64,
    /// Whether it is imported memory of another card than the stream's.
    remote: bool,
}

impl Target {
    pub(crate) fn of(range: DeviceRange, stream: BorrowedStream<'_>) -> Self {
        Self { address: range.ptr.get(), remote: imports::is_remote(range.ptr, stream.device()) }
    }

    pub(crate) fn is_remote(self) -> bool {
        self.remote
    }

    pub(crate) fn offset(self, bytes: usize) -> Self {
        Self { address: self.address + bytes as u64, ..self }
    }
}

/// The staging buffers of one copy, to be returned together.
pub(crate) struct CopyBuffers {
    pub(crate) host: Buffer,
    card: Option<Buffer>,
}

impl Driver {
    /// Takes buffers for `len` bytes, at most [`MAX_STAGED_BYTES`]: one in host memory, and one on the stream's card if
    /// `target` is on another card.
    pub(crate) fn stage(
        &self,
        target: Target,
        len: usize,
        stream: BorrowedStream<'_>,
    ) -> Result<CopyBuffers> {
        let staging = &self.device(stream.device())?.staging;
        let host = staging.host.take(self, len)?;
        let card = match target.remote {
            true => match staging.card.take(self, len) {
                Ok(card) => Some(card),
                Err(error) => {
                    staging.host.put_back(host);
                    return Err(error);
                }
            },
            false => None,
        };
        Ok(CopyBuffers { host, card })
    }

    /// Submits a copy of `len` staged bytes to the target.
    ///
    /// # Safety
    ///
    /// The target stays mapped for `len` bytes until the copy has finished; the stream is of the current device.
    pub(crate) unsafe fn copy_from_host(
        &self,
        target: Target,
        staged: &CopyBuffers,
        len: usize,
        stream: aclrtStream,
    ) -> Result<()> {
        let to_device = aclrtMemcpyKind::ACL_MEMCPY_HOST_TO_DEVICE;
        // SAFETY: the buffers hold `len` bytes, and are reused only after the stream's work; the rest as the caller
        // promised.
        unsafe {
            let Some(card) = &staged.card else {
                return self.copy_async(target.address, staged.host.address(), len, to_device, stream);
            };
            self.copy_async(card.address(), staged.host.address(), len, to_device, stream)?;
            self.copy_between(target.address, card.address(), len, stream)
        }
    }

    /// Submits a copy of `len` bytes of the target to the staging buffers.
    ///
    /// # Safety
    ///
    /// As for [`copy_from_host`](Self::copy_from_host).
    pub(crate) unsafe fn copy_to_host(
        &self,
        target: Target,
        staged: &CopyBuffers,
        len: usize,
        stream: aclrtStream,
    ) -> Result<()> {
        let to_host = aclrtMemcpyKind::ACL_MEMCPY_DEVICE_TO_HOST;
        // SAFETY: as in `copy_from_host`.
        unsafe {
            let Some(card) = &staged.card else {
                return self.copy_async(staged.host.address(), target.address, len, to_host, stream);
            };
            self.copy_between(card.address(), target.address, len, stream)?;
            self.copy_async(staged.host.address(), card.address(), len, to_host, stream)
        }
    }

    /// Returns the buffers; they are reused after all work submitted to the stream so far.
    pub(crate) fn unstage(
        &self,
        staged: CopyBuffers,
        stream: BorrowedStream<'_>,
        raw: aclrtStream,
    ) -> Result<()> {
        let staging = &self.device(stream.device())?.staging;
        let host = staging.host.put_back_after(self, staged.host, raw);
        let card = match staged.card {
            Some(card) => staging.card.put_back_after(self, card, raw),
            None => Ok(()),
        };
        host.and(card)
    }

    /// Submits a fill of another card's memory: fills a buffer on the stream's card and copies it.
    ///
    /// # Safety
    ///
    /// As for [`copy_from_host`](Self::copy_from_host).
    pub(crate) unsafe fn fill_remote(
        &self,
        dst: DeviceRange,
        byte: u8,
        stream: BorrowedStream<'_>,
        raw: aclrtStream,
    ) -> Result<()> {
        let staging = &self.device(stream.device())?.staging.card;
        let most = dst.len.min(MAX_STAGED_BYTES as u64);
        let buffer = staging.take(self, most as usize)?;
        // SAFETY: the buffer holds that many bytes, and is reused only after the stream's work.
        let mut outcome = unsafe { self.set_async(buffer.address(), byte, most as usize, raw) };
        let mut done = 0;
        while outcome.is_ok() && done < dst.len {
            let len = (dst.len - done).min(most);
            // SAFETY: as above; the target as the caller promised.
            outcome = unsafe { self.copy_between(dst.ptr.get() + done, buffer.address(), len as usize, raw) };
            done += len;
        }
        let returned = staging.put_back_after(self, buffer, raw);
        outcome.and(returned)
    }

    /// Submits a copy between two ranges of device memory.
    ///
    /// # Safety
    ///
    /// Both ranges stay mapped until the copy has finished; the stream is of the current device.
    pub(crate) unsafe fn copy_between(
        &self,
        dst: u64,
        src: u64,
        len: usize,
        stream: aclrtStream,
    ) -> Result<()> {
        // SAFETY: as the caller promised.
        unsafe { self.copy_async(dst, src, len, aclrtMemcpyKind::ACL_MEMCPY_DEVICE_TO_DEVICE, stream) }
    }

    /// Submits a fill of memory of the stream's card.
    ///
    /// # Safety
    ///
    /// As for [`copy_between`](Self::copy_between).
    pub(crate) unsafe fn set_async(&self, dst: u64, byte: u8, len: usize, stream: aclrtStream) -> Result<()> {
        // SAFETY: as the caller promised.
        let status = unsafe {
            call!(self, aclrtMemsetAsync(dst as usize as *mut _, len, i32::from(byte), len, stream))
        };
        self.check("aclrtMemsetAsync", status)
    }

    unsafe fn copy_async(
        &self,
        dst: u64,
        src: u64,
        len: usize,
        kind: aclrtMemcpyKind,
        stream: aclrtStream,
    ) -> Result<()> {
        let (dst, src) = (dst as usize as *mut _, src as usize as *const _);
        // SAFETY: as the caller promised.
        let status = unsafe { call!(self, aclrtMemcpyAsync(dst, len, src, len, kind, stream)) };
        self.check("aclrtMemcpyAsync", status)
    }
}
