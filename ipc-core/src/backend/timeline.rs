//! Stream operations on shared words in host memory.

#![allow(unsafe_code, reason = "declares the vendor boundary; plain addresses keep no memory alive")]

use std::fmt;
use std::ptr::NonNull;

use crate::backend::stream::BorrowedStream;
use crate::model::address::DevicePtr;
use crate::model::device::DeviceOrdinal;
use crate::model::error::Result;

/// Stream operations on 64-bit words in host memory that this process and others map.
///
/// The words are in host memory because the host must be able to write them without the driver: when a peer dies, a plain
/// store releases the waiting stream, also while another thread is inside a driver call that holds the driver's lock and waits
/// for the same stream (as `cuMemFree` does).
///
/// The host and streams of other processes write the words with plain atomic stores. A backend whose streams observe such a
/// store only after a driver call does not support timelines.
pub trait DeviceTimelines: fmt::Debug + Send + Sync {
    /// Registers whole pages of host memory with `device` and returns the device address of the first byte.
    ///
    /// `pages` is aligned to a page, and `len` is a multiple of the page size. Registrations of the same pages, for this or
    /// another device, are counted.
    ///
    /// # Safety
    ///
    /// The pages are shared memory, readable and writable, and stay mapped until [`unregister`](Self::unregister).
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`](crate::Error::Unsupported) if [`Capabilities::timelines`](super::Capabilities) is
    /// false; otherwise the vendor's error.
    unsafe fn register(&self, device: DeviceOrdinal, pages: NonNull<u8>, len: usize) -> Result<DevicePtr>;

    /// Reverts one [`register`](Self::register) for `device`. May wait for streams.
    ///
    /// # Safety
    ///
    /// No submitted work uses the pages any longer.
    ///
    /// # Errors
    ///
    /// The vendor's error; the pages are unregistered nevertheless.
    unsafe fn unregister(&self, device: DeviceOrdinal, pages: NonNull<u8>) -> Result<()>;

    /// Submits a write of `value` to the word.
    ///
    /// A reader in any process that observes the value also observes everything that the stream wrote before.
    ///
    /// # Safety
    ///
    /// `word` is an aligned word in pages that are [registered](Self::register) with the stream's device and stay registered
    /// until the stream has reached this point.
    ///
    /// # Errors
    ///
    /// [`Error::WrongBackend`](crate::Error::WrongBackend); [`Error::StreamCapturing`](crate::Error::StreamCapturing), and the
    /// capture stays valid; otherwise the vendor's error.
    unsafe fn write_value(&self, word: DevicePtr, value: u64, stream: BorrowedStream<'_>) -> Result<()>;

    /// Makes the stream wait until the word is at least `value` (unsigned). Does not wait on the host.
    ///
    /// # Safety
    ///
    /// As for [`write_value`](Self::write_value).
    ///
    /// # Errors
    ///
    /// As for [`write_value`](Self::write_value).
    unsafe fn wait_value(&self, word: DevicePtr, value: u64, stream: BorrowedStream<'_>) -> Result<()>;
}
