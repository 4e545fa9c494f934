//! Plain device memory and streams: for staged copies, the conformance suite, the program and the benchmarks.

#![allow(unsafe_code, reason = "declares the vendor boundary; plain ranges keep no memory alive")]

use std::fmt;
use std::ptr::NonNull;

use crate::backend::HandleKind;
use crate::backend::stream::BorrowedStream;
use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};

/// Plain memory and streams of a backend, for programs that have no allocator of their own.
///
/// Work is submitted to a stream and runs later, in the order of submission; streams run independently of each other.
/// Submitting does not wait for earlier work, unless the method says so. Errors of the work itself are reported by
/// [`synchronize`](Self::synchronize), [`read`](Self::read) or a later call on the stream. The input that each call has to
/// refuse is in the [module documentation](super#who-checks-what).
pub trait DeviceMemory: fmt::Debug + Send + Sync {
    /// Allocates memory on `device` for the first kind of [`handle_kinds`](super::DeviceIpc::handle_kinds).
    ///
    /// The range has exactly `bytes` bytes; the allocation behind it may be larger. It is aligned to at least 256 bytes. Its
    /// contents are undefined. It does not wait for streams.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::InvalidRegion`](crate::Error::InvalidRegion) for
    /// zero bytes, else the vendor's error.
    fn allocate(&self, device: DeviceOrdinal, bytes: u64) -> Result<DeviceRange>;

    /// Allocates memory that can be shared by a handle of this kind; else as [`allocate`](Self::allocate).
    ///
    /// # Errors
    ///
    /// As [`allocate`](Self::allocate); [`Error::Unsupported`](crate::Error::Unsupported) for a kind that the backend
    /// does not know, or cannot use on this device.
    fn allocate_as(&self, device: DeviceOrdinal, bytes: u64, kind: HandleKind) -> Result<DeviceRange>;

    /// Frees memory of [`allocate`](Self::allocate) or [`allocate_as`](Self::allocate_as).
    ///
    /// **Submitted work may still use the memory**: [`Buffer`](crate::Buffer) is freed when it is dropped, and safe code
    /// drops it while its copies are pending. The backend therefore waits for all work that this process submitted before
    /// the call, on every stream of every device that can reach the memory, or it defers the deallocation until that
    /// work has finished. Until then it neither unmaps the memory nor gives it to another allocation. A vendor whose free
    /// waits for the whole device (`cuMemFree`) needs nothing more for the streams of that device; one whose free waits
    /// for nothing (`cuMemUnmap`, `aclrtFree`) needs a synchronisation before it. A failure of that work is not a failure
    /// of `free`.
    ///
    /// Importers in other processes are not waited for: what happens to their mappings is the
    /// [`Lifetime`](super::Lifetime) of the kind of handle.
    ///
    /// # Safety
    ///
    /// `range` is exactly a range that one of them returned, it is freed once, and no work that uses it is submitted
    /// during or after the call.
    ///
    /// # Errors
    ///
    /// The vendor's error; [`Error::InvalidRegion`](crate::Error::InvalidRegion) where the backend can tell that the range
    /// is not one of its allocations.
    unsafe fn free(&self, range: DeviceRange) -> Result<()>;

    /// Submits a copy of `src` to `dst`, of the same length, between any two devices that the vendor can copy between. Either
    /// may be memory that was opened from another process. The two may not overlap.
    ///
    /// # Safety
    ///
    /// Both ranges stay mapped until the work has finished, except that memory of this backend may be
    /// [freed](Self::free). No other work or process writes them meanwhile, or reads `dst`, without being ordered.
    ///
    /// # Errors
    ///
    /// The vendor's error; [`Error::InvalidRegion`](crate::Error::InvalidRegion) for two lengths.
    unsafe fn copy(&self, dst: DeviceRange, src: DeviceRange, stream: BorrowedStream<'_>) -> Result<()>;

    /// Submits setting every byte of `dst`.
    ///
    /// # Safety
    ///
    /// As for [`copy`](Self::copy).
    ///
    /// # Errors
    ///
    /// The vendor's error.
    unsafe fn fill(&self, dst: DeviceRange, byte: u8, stream: BorrowedStream<'_>) -> Result<()>;

    /// Submits writing host bytes to `dst`, of the same length.
    ///
    /// **The caller may change or free the bytes as soon as the call returns**, while the stream has yet to reach the write.
    /// The backend copies them first, or waits for the stream where there are too many to copy.
    ///
    /// # Safety
    ///
    /// As for [`copy`](Self::copy).
    ///
    /// # Errors
    ///
    /// As for [`copy`](Self::copy).
    unsafe fn write(&self, dst: DeviceRange, bytes: &[u8], stream: BorrowedStream<'_>) -> Result<()>;

    /// Reads `src` into host bytes of the same length, after the work that was submitted before, and waits until it is done.
    ///
    /// # Safety
    ///
    /// As for [`copy`](Self::copy).
    ///
    /// # Errors
    ///
    /// As for [`copy`](Self::copy).
    unsafe fn read(&self, src: DeviceRange, bytes: &mut [u8], stream: BorrowedStream<'_>) -> Result<()>;

    /// Waits on the host until everything submitted to the stream has finished.
    ///
    /// # Errors
    ///
    /// The vendor's error, also one of the work itself.
    fn synchronize(&self, stream: BorrowedStream<'_>) -> Result<()>;

    /// Creates a stream on `device`.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`](crate::Error::NoSuchDevice), else the vendor's error.
    fn create_stream(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceStream>>;

    /// Returns the free and the total memory of `device`: **of the whole device**, all processes included, as the driver
    /// counts it. Memory that an importer still maps is in use, also when its owner has freed it. Tests find leaks by it.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`](crate::Error::NoSuchDevice), else the vendor's error.
    fn memory_info(&self, device: DeviceOrdinal) -> Result<MemoryInfo>;

    /// Makes whole pages of host memory known to `device`, page-locked, so that [`copy_to_host`](Self::copy_to_host) and
    /// [`copy_from_host`](Self::copy_from_host) run later, on their stream. Making the same pages known again, for this or
    /// another device, is counted. May take as long as locking the pages does.
    ///
    /// A backend without it copies by [`read`](Self::read) and [`write`](Self::write).
    ///
    /// # Safety
    ///
    /// The pages are shared memory, readable and writable, and stay mapped until [`unpin_host`](Self::unpin_host).
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`](crate::Error::Unsupported) where the vendor does not document such copies, else its error.
    unsafe fn pin_host(&self, device: DeviceOrdinal, pages: NonNull<u8>, len: usize) -> Result<()> {
        let _ = (pages, len);
        Err(no_pinned_memory(device))
    }

    /// Takes back one [`pin_host`](Self::pin_host). May wait for streams.
    ///
    /// # Safety
    ///
    /// No submitted work uses the pages any longer.
    ///
    /// # Errors
    ///
    /// The vendor's; they count as taken back all the same.
    unsafe fn unpin_host(&self, device: DeviceOrdinal, pages: NonNull<u8>) -> Result<()> {
        let _ = (device, pages);
        Ok(())
    }

    /// Submits a copy of `src` to as many bytes of pinned host memory. Does not wait.
    ///
    /// # Safety
    ///
    /// The bytes at `dst` lie in pages that [`pin_host`](Self::pin_host) made known to the stream's device, and stay so until
    /// the copy has finished; else as for [`copy`](Self::copy).
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

    /// Submits a copy of as many bytes of pinned host memory to `dst`. Does not wait.
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
        what: format!("copy between device {device} and host memory that others allocated, without waiting"),
        why: "it has no documented way to; use DeviceMemory::read and DeviceMemory::write, which wait".into(),
    }
}

/// A stream that [`DeviceMemory::create_stream`] created. Dropping it destroys it; submitted work still runs.
pub trait DeviceStream: fmt::Debug + Send + Sync {
    /// The stream.
    fn as_borrowed(&self) -> BorrowedStream<'_>;
}

/// Free and total memory of a device, all processes included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Free memory in bytes.
    pub free_bytes: u64,
    /// All memory in bytes.
    pub total_bytes: u64,
}
