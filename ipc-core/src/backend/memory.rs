//! Plain device memory and streams, for staged copies, the conformance suite, the command line and the benchmarks.

#![allow(unsafe_code, reason = "declares the vendor boundary; plain ranges keep no memory alive")]

use std::fmt;
use std::ptr::NonNull;

use crate::backend::HandleKind;
use crate::backend::blocks::{BlockedTensors, check_blocks, single_copies};
use crate::backend::stream::BorrowedStream;
use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};

/// Plain memory and streams of a backend, for programs that have no allocator of their own.
///
/// Work is submitted to a stream and runs later, in the order of submission; streams run independently of each other.
/// Submitting does not wait for earlier work unless the method says so. [`synchronize`](Self::synchronize),
/// [`read`](Self::read) or a later call on the stream reports errors of the work itself. The [module
/// documentation](super#checks) lists the input that each call refuses.
pub trait DeviceMemory: fmt::Debug + Send + Sync {
    /// Allocates memory on `device` for the first kind of [`handle_kinds`](super::DeviceIpc::handle_kinds).
    ///
    /// The range has exactly `bytes` bytes; its allocation may be larger. It is aligned to at least 256 B, and its contents are
    /// undefined. The call does not wait for streams.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::InvalidRegion`](crate::Error::InvalidRegion) for
    /// 0 B; otherwise the vendor's error.
    fn allocate(&self, device: DeviceOrdinal, bytes: u64) -> Result<DeviceRange>;

    /// Allocates memory that can be shared by a handle of this kind. Everything else is as for [`allocate`](Self::allocate).
    ///
    /// # Errors
    ///
    /// As [`allocate`](Self::allocate); [`Error::Unsupported`](crate::Error::Unsupported) for a kind that is
    /// unknown to the backend or not supported on this device.
    fn allocate_as(&self, device: DeviceOrdinal, bytes: u64, kind: HandleKind) -> Result<DeviceRange>;

    /// Frees memory of [`allocate`](Self::allocate) or [`allocate_as`](Self::allocate_as).
    ///
    /// **Submitted work may still use the memory**: dropping a [`Buffer`](crate::Buffer) frees it, and safe code may drop it
    /// while its copies are pending. The backend therefore waits for all work that this process submitted before the call, on
    /// every stream of every device that can access the memory, or it defers the deallocation until that work has finished.
    /// Until then it neither unmaps the memory nor reuses it for another allocation. A vendor whose free waits for the whole
    /// device (`cuMemFree`) needs no further synchronisation for the streams of that device; a vendor whose free does not wait
    /// (`cuMemUnmap`, `aclrtFree`) needs a synchronisation before it. A failure of that work is not a failure of `free`.
    ///
    /// The call does not wait for importers in other processes: the [`Lifetime`](super::Lifetime) of the kind of handle defines
    /// the effect on their mappings.
    ///
    /// # Safety
    ///
    /// `range` is exactly a range that one of the two returned; it is freed once; and no work that uses it is submitted during
    /// or after the call.
    ///
    /// # Errors
    ///
    /// The vendor's error; [`Error::InvalidRegion`](crate::Error::InvalidRegion) if the backend detects that the range
    /// is not one of its allocations.
    unsafe fn free(&self, range: DeviceRange) -> Result<()>;

    /// Submits a copy of `src` to `dst`, which have the same length, between any two devices that the vendor can copy between.
    ///
    /// Either range may be memory that was opened from another process. The ranges must not overlap.
    ///
    /// # Safety
    ///
    /// Both ranges stay mapped until the work has finished, except that memory of this backend may be
    /// [freed](Self::free). No other unordered work, in any process, writes the ranges or reads `dst` meanwhile.
    ///
    /// # Errors
    ///
    /// The vendor's error; [`Error::InvalidRegion`](crate::Error::InvalidRegion) for different lengths.
    unsafe fn copy(&self, dst: DeviceRange, src: DeviceRange, stream: BorrowedStream<'_>) -> Result<()>;

    /// Submits copies of block `sources[i]` to block `destinations[i]` in all tensors, of `block_bytes` each, by as few kernels as
    /// the backend can. The default implementation copies every block with [`copy`](Self::copy).
    ///
    /// The stream's device can access all tensors. The first call on a device may load a kernel, for which a driver may wait
    /// until all its streams are idle; a call without blocks only loads it.
    ///
    /// # Safety
    ///
    /// As for [`copy`](Self::copy).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRegion`](crate::Error::InvalidRegion) where a tensor lacks a block, for blocks of 0 bytes, where a block
    /// is a destination twice, and where there are not as many destinations as sources: then nothing is copied. Otherwise the
    /// vendor's error.
    unsafe fn copy_blocks(
        &self,
        tensors: &[BlockedTensors],
        block_bytes: u64,
        sources: &[u32],
        destinations: &[u32],
        stream: BorrowedStream<'_>,
    ) -> Result<()> {
        check_blocks(tensors, block_bytes, sources, destinations)?;
        for (dst, src) in single_copies(tensors, block_bytes, sources, destinations) {
            // SAFETY: as the caller promised; the blocks lie in their tensors.
            unsafe { self.copy(dst, src, stream) }?;
        }
        Ok(())
    }

    /// Submits a fill of every byte of `dst` with `byte`.
    ///
    /// # Safety
    ///
    /// As for [`copy`](Self::copy).
    ///
    /// # Errors
    ///
    /// The vendor's error.
    unsafe fn fill(&self, dst: DeviceRange, byte: u8, stream: BorrowedStream<'_>) -> Result<()>;

    /// Submits a write of host bytes to `dst`, which has the same length.
    ///
    /// **The caller may change or free the bytes as soon as the call returns**, before the stream reaches the write. The
    /// backend copies them first, or waits for the stream if there are too many bytes to copy.
    ///
    /// # Safety
    ///
    /// As for [`copy`](Self::copy).
    ///
    /// # Errors
    ///
    /// As for [`copy`](Self::copy).
    unsafe fn write(&self, dst: DeviceRange, bytes: &[u8], stream: BorrowedStream<'_>) -> Result<()>;

    /// Reads `src` into host bytes of the same length, after all earlier work of the stream, and waits for completion.
    ///
    /// # Safety
    ///
    /// As for [`copy`](Self::copy).
    ///
    /// # Errors
    ///
    /// As for [`copy`](Self::copy).
    unsafe fn read(&self, src: DeviceRange, bytes: &mut [u8], stream: BorrowedStream<'_>) -> Result<()>;

    /// Waits on the host until all work submitted to the stream has finished.
    ///
    /// # Errors
    ///
    /// The vendor's error, including errors of the work itself.
    fn synchronize(&self, stream: BorrowedStream<'_>) -> Result<()>;

    /// Returns whether all work submitted to the stream has completed. Does not wait.
    ///
    /// An export that is made behind a stream without work needs no event. The default, for vendors without such a query, returns
    /// false.
    ///
    /// # Errors
    ///
    /// The vendor's error, including errors of the work itself.
    fn is_complete(&self, stream: BorrowedStream<'_>) -> Result<bool> {
        let _ = stream;
        Ok(false)
    }

    /// Creates a stream on `device`.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`](crate::Error::NoSuchDevice); otherwise the vendor's error.
    fn create_stream(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceStream>>;

    /// Returns the free and the total memory **of the whole device**, including all processes, as the driver reports it.
    ///
    /// Memory that an importer still maps is in use, also after its owner has freed it. Tests detect leaks with this call.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`](crate::Error::NoSuchDevice); otherwise the vendor's error.
    fn memory_info(&self, device: DeviceOrdinal) -> Result<MemoryInfo>;

    /// Page-locks whole pages of host memory and registers them with `device`.
    ///
    /// [`copy_to_host`](Self::copy_to_host) and [`copy_from_host`](Self::copy_from_host) of these pages run asynchronously on
    /// their stream. Registrations of the same pages, for this or another device, are counted. The call may take as long as
    /// locking the pages takes. For a backend without pinned memory, the library copies by [`read`](Self::read) and
    /// [`write`](Self::write).
    ///
    /// # Safety
    ///
    /// The pages are shared memory, readable and writable, and stay mapped until [`unpin_host`](Self::unpin_host).
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`](crate::Error::Unsupported) if the vendor does not document such copies; otherwise the vendor's
    /// error.
    unsafe fn pin_host(&self, device: DeviceOrdinal, pages: NonNull<u8>, len: usize) -> Result<()> {
        let _ = (pages, len);
        Err(no_pinned_memory(device))
    }

    /// Reverts one [`pin_host`](Self::pin_host). May wait for streams.
    ///
    /// # Safety
    ///
    /// No submitted work uses the pages any longer.
    ///
    /// # Errors
    ///
    /// The vendor's error; the pages are unpinned nevertheless.
    unsafe fn unpin_host(&self, device: DeviceOrdinal, pages: NonNull<u8>) -> Result<()> {
        let _ = (device, pages);
        Ok(())
    }

    /// Submits a copy of `src` to the same number of bytes of pinned host memory. Does not wait.
    ///
    /// # Safety
    ///
    /// The bytes at `dst` lie in pages that [`pin_host`](Self::pin_host) registered with the stream's device, and stay pinned
    /// until the copy has finished. Everything else is as for [`copy`](Self::copy).
    ///
    /// # Errors
    ///
    /// As for [`pin_host`](Self::pin_host).
    unsafe fn copy_to_host(
        &self,
        dst: NonNull<u8>,
        src: DeviceRange,
        stream: BorrowedStream<'_>,
    ) -> Result<()> {
        let _ = (dst, src);
        Err(no_pinned_memory(stream.device()))
    }

    /// Submits a copy of the same number of bytes of pinned host memory to `dst`. Does not wait.
    ///
    /// # Safety
    ///
    /// As for [`copy_to_host`](Self::copy_to_host).
    ///
    /// # Errors
    ///
    /// As for [`pin_host`](Self::pin_host).
    unsafe fn copy_from_host(
        &self,
        dst: DeviceRange,
        src: NonNull<u8>,
        stream: BorrowedStream<'_>,
    ) -> Result<()> {
        let _ = (dst, src);
        Err(no_pinned_memory(stream.device()))
    }
}

fn no_pinned_memory(device: DeviceOrdinal) -> Error {
    Error::Unsupported {
        backend: "this backend",
        what: format!("copy asynchronously between device {device} and host memory of another allocator"),
        why: "the vendor documents no such copy; copy with a call that waits".into(),
    }
}

/// A stream created by [`DeviceMemory::create_stream`]. Dropping it destroys the stream; submitted work still runs.
pub trait DeviceStream: fmt::Debug + Send + Sync {
    /// Borrows the stream.
    fn as_borrowed(&self) -> BorrowedStream<'_>;
}

/// Free and total memory of a device, including all processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Free memory in bytes.
    pub free_bytes: u64,
    /// Total memory in bytes.
    pub total_bytes: u64,
}
