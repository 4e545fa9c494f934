//! Words in host memory that streams write and wait for.

#![allow(unsafe_code, reason = "declares the vendor boundary; plain addresses keep no memory alive")]

use std::fmt;
use std::ptr::NonNull;

use crate::backend::stream::BorrowedStream;
use crate::model::address::DevicePtr;
use crate::model::device::DeviceOrdinal;
use crate::model::error::Result;

/// Operations of streams on 64-bit words in host memory of this process, which other processes map too.
///
/// Host memory, because a word must be writable without the driver: a stream whose peer has died is released by a plain
/// store, also while another thread of the process is inside a call that holds the driver's lock and waits for the same
/// stream (`cuMemFree` does).
///
/// The host and streams of other processes write the words with plain atomic stores. A backend whose streams see such a
/// store only after a call of the driver has no timelines.
pub trait DeviceTimelines: fmt::Debug + Send + Sync {
    /// Makes whole pages of host memory reachable for streams of `device`, and returns the address of the first byte there.
    /// `pages` is aligned to a page, and `len` is a multiple of the page size. Registering the same pages again, for this or
    /// another device, is counted.
    ///
    /// # Safety
    ///
    /// The pages are shared memory, readable and writable, and stay mapped until [`unregister`](Self::unregister).
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`](crate::Error::Unsupported) where [`Capabilities::timelines`](super::Capabilities) is
    /// false, else the vendor's.
    unsafe fn register(&self, device: DeviceOrdinal, pages: NonNull<u8>, len: usize) -> Result<DevicePtr>;

    /// Takes back one [`register`](Self::register) for `device`. May wait for streams.
    ///
    /// # Safety
    ///
    /// No submitted work uses the pages any longer.
    ///
    /// # Errors
    ///
    /// The vendor's; they count as unregistered all the same.
    unsafe fn unregister(&self, device: DeviceOrdinal, pages: NonNull<u8>) -> Result<()>;

    /// Submits a write of `value` to the word. A reader that sees the value, in whichever process, sees all that the stream
    /// wrote before.
    ///
    /// # Safety
    ///
    /// `word` is an aligned word in pages that [`register`](Self::register) gave an address for on the stream's device,
    /// and they stay registered until the stream has reached this point.
    ///
    /// # Errors
    ///
    /// [`Error::WrongBackend`](crate::Error::WrongBackend); [`Error::StreamCapturing`](crate::Error::StreamCapturing), and the
    /// capture goes on; else the vendor's error.
    unsafe fn write_value(&self, word: DevicePtr, value: u64, stream: BorrowedStream<'_>) -> Result<()>;

    /// Makes the stream wait until the word is at least `value`, as unsigned numbers. Does not wait on the host.
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
