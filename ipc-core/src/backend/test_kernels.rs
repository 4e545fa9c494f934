//! Test kernels: work with a visible effect and a known duration, for programs that have no kernels of their own.

#![allow(unsafe_code, reason = "declares the vendor boundary; plain ranges keep no memory alive")]

use std::fmt;
use std::time::Duration;

use crate::backend::stream::BorrowedStream;
use crate::model::address::DeviceRange;
use crate::model::error::Result;

/// Test kernels of a backend: an addition and a delay.
///
/// They are not part of the contract of a backend: sharing never runs them. The conformance suite, the `device-ipc` program,
/// the benchmarks, [`ViewMut::add`](crate::ViewMut::add) and [`Stream::delay`](crate::Stream::delay) do. Both follow the rules
/// of [`DeviceMemory`](super::DeviceMemory) for streams, ranges and errors.
pub trait TestKernels: fmt::Debug + Send + Sync {
    /// Submits a kernel that adds `value` to every 32-bit float of `range`, on the stream's device. The first call on a device
    /// may load the kernel, for which a driver may wait until all its streams are idle.
    ///
    /// # Safety
    ///
    /// As for [`DeviceMemory::copy`](super::DeviceMemory::copy), and the stream's device can access the range.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRegion`](crate::Error::InvalidRegion) where the range does not hold whole, aligned floats;
    /// else the vendor's error.
    unsafe fn add_f32(&self, range: DeviceRange, value: f32, stream: BorrowedStream<'_>) -> Result<()>;

    /// Submits a pause of at least `time`.
    ///
    /// # Errors
    ///
    /// The vendor's error.
    fn delay(&self, time: Duration, stream: BorrowedStream<'_>) -> Result<()>;
}
