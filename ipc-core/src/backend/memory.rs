//! Plain device memory and streams: what the suite, the program and the benchmarks stand on.

#![allow(unsafe_code, reason = "declares the vendor boundary; plain ranges keep no memory alive")]

use std::fmt;
use std::time::Duration;

use crate::address::DeviceRange;
use crate::backend::HandleKind;
use crate::device::DeviceOrdinal;
use crate::error::Result;
use crate::stream::BorrowedStream;

/// Plain memory and streams of a backend, for those who have no allocator of their own.
///
/// Work is submitted to a stream and runs later, in order, unless a method says that it waits.
pub trait DeviceMemory: fmt::Debug + Send + Sync {
    /// Allocates memory on `device` of a kind that this backend can share.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), [`Error::InvalidRegion`](crate::Error::InvalidRegion) for
    /// zero bytes, else the vendor's error.
    fn allocate(&self, device: DeviceOrdinal, bytes: u64) -> Result<DeviceRange>;

    /// Allocates memory that can be shared by a handle of this kind. The backend may round the size up to what the kind
    /// needs; the range has the bytes that were asked for.
    ///
    /// # Errors
    ///
    /// As [`allocate`](Self::allocate); [`Error::Unsupported`](crate::Error::Unsupported) for a kind that the backend
    /// does not know, or cannot use on this device.
    fn allocate_as(&self, device: DeviceOrdinal, bytes: u64, kind: HandleKind) -> Result<DeviceRange>;

    /// Frees what [`allocate`](Self::allocate) or [`allocate_as`](Self::allocate_as) gave. May wait until streams have finished with it.
    ///
    /// # Safety
    ///
    /// `range` came from one of them, is freed once, and nobody uses it any longer.
    ///
    /// # Errors
    ///
    /// The vendor's error.
    unsafe fn free(&self, range: DeviceRange) -> Result<()>;

    /// Copies `src` to `dst`, of the same length, between any two devices that can be copied between.
    ///
    /// # Safety
    ///
    /// Both ranges stay mapped until the work has finished; nobody else writes them meanwhile, nor reads `dst`,
    /// without being ordered.
    ///
    /// # Errors
    ///
    /// The vendor's error; [`Error::InvalidRegion`](crate::Error::InvalidRegion) for two lengths.
    unsafe fn copy(&self, dst: DeviceRange, src: DeviceRange, stream: BorrowedStream<'_>) -> Result<()>;

    /// Sets every byte of `dst`.
    ///
    /// # Safety
    ///
    /// As for [`copy`](Self::copy).
    ///
    /// # Errors
    ///
    /// The vendor's error.
    unsafe fn fill(&self, dst: DeviceRange, byte: u8, stream: BorrowedStream<'_>) -> Result<()>;

    /// Writes host bytes into `dst`, of the same length. The bytes may be re-used when the call returns.
    ///
    /// # Safety
    ///
    /// As for [`copy`](Self::copy).
    ///
    /// # Errors
    ///
    /// As for [`copy`](Self::copy).
    unsafe fn write(&self, dst: DeviceRange, bytes: &[u8], stream: BorrowedStream<'_>) -> Result<()>;

    /// Reads `src` into host bytes of the same length, after the work submitted before, and waits for it.
    ///
    /// # Safety
    ///
    /// As for [`copy`](Self::copy).
    ///
    /// # Errors
    ///
    /// As for [`copy`](Self::copy).
    unsafe fn read(&self, src: DeviceRange, bytes: &mut [u8], stream: BorrowedStream<'_>) -> Result<()>;

    /// Runs a kernel on the stream's device that adds `value` to every 32-bit float of `range`. The first call on a device may
    /// load the kernel, for which a driver may wait until all its streams are idle.
    ///
    /// # Safety
    ///
    /// As for [`copy`](Self::copy), and the stream's device can access the range.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRegion`](crate::Error::InvalidRegion) where the range does not hold whole, aligned floats;
    /// else the vendor's error.
    unsafe fn add_f32(&self, range: DeviceRange, value: f32, stream: BorrowedStream<'_>) -> Result<()>;

    /// Makes the stream idle for at least this long before it goes on.
    ///
    /// # Errors
    ///
    /// The vendor's error.
    fn delay(&self, time: Duration, stream: BorrowedStream<'_>) -> Result<()>;

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

    /// Free and total memory of `device`.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchDevice`](crate::Error::NoSuchDevice), else the vendor's error.
    fn memory_info(&self, device: DeviceOrdinal) -> Result<MemoryInfo>;
}

/// A stream that [`DeviceMemory::create_stream`] created. Dropping it destroys it; submitted work still runs.
pub trait DeviceStream: fmt::Debug + Send + Sync {
    /// The stream.
    fn as_borrowed(&self) -> BorrowedStream<'_>;
}

/// Free and total memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Free memory in bytes.
    pub free_bytes: u64,
    /// All memory in bytes.
    pub total_bytes: u64,
}
