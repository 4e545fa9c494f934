//! Test kernels: work with a visible effect, for programs that have no kernels of their own.

#![allow(unsafe_code, reason = "declares the vendor boundary; plain ranges keep no memory alive")]

use std::fmt;

use crate::backend::stream::BorrowedStream;
use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};

/// Test kernels of a backend: an addition, and a host function where a [`Gate`](super::Gate) needs one.
///
/// They are not part of the contract of a backend: sharing never runs them. The conformance suite, the `device-ipc` program,
/// the benchmarks, [`ViewMut::add`](crate::ViewMut::add) and [`Stream::gate`](crate::Stream::gate) do. Both follow the rules
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

    /// Loads the kernel on a device, so that no later [`add_f32`](Self::add_f32) does: it would wait for a stream that a
    /// [`Gate`](super::Gate) blocks. The default implementation is for backends that load nothing.
    ///
    /// # Errors
    ///
    /// The vendor's error.
    fn load(&self, device: DeviceOrdinal) -> Result<()> {
        let _ = device;
        Ok(())
    }

    /// Submits a host function, for a [`Gate`](super::Gate) on a device without timelines.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`], as the default implementation; else the vendor's error.
    fn host_function(&self, function: Box<dyn FnOnce() + Send>, stream: BorrowedStream<'_>) -> Result<()> {
        drop(function);
        Err(Error::Unsupported {
            backend: stream.backend(),
            what: format!("block a stream of device {}", stream.device()),
            why: "the device has no timelines".into(),
        })
    }
}
