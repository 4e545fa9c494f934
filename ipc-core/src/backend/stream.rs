//! Streams of any owner: this library, cudarc, or a raw vendor handle.

#![allow(unsafe_code, reason = "a raw vendor handle cannot be validated")]

use std::marker::PhantomData;

use crate::model::device::DeviceOrdinal;

/// A vendor's stream, borrowed from its owner for `'a`.
#[derive(Clone, Copy, Debug)]
pub struct BorrowedStream<'a> {
    backend: &'static str,
    device: DeviceOrdinal,
    raw: u64,
    owner: PhantomData<&'a ()>,
}

impl BorrowedStream<'_> {
    /// Borrows a stream by the vendor's handle (`CUstream`, `aclrtStream`) as a number.
    ///
    /// # Safety
    ///
    /// `raw` is a stream of the backend called `backend` on the device with this ordinal in this process, and the stream is not
    /// destroyed during the lifetime `'a`.
    pub const unsafe fn from_raw(backend: &'static str, device: DeviceOrdinal, raw: u64) -> Self {
        Self { backend, device, raw, owner: PhantomData }
    }

    /// Returns the name of the stream's backend.
    pub const fn backend(&self) -> &'static str {
        self.backend
    }

    /// Returns the device that the stream runs on.
    pub const fn device(&self) -> DeviceOrdinal {
        self.device
    }

    /// Returns the vendor's handle as a number.
    pub const fn raw(&self) -> u64 {
        self.raw
    }
}

/// A type that is a stream: [`Stream`](crate::Stream), or a stream type of a vendor's crate.
///
/// The marker `M` lets a backend crate implement the trait for foreign types (cudarc's `CudaStream`); callers never name it.
pub trait AsStream<M = ()> {
    /// Borrows the vendor's stream.
    fn as_stream(&self) -> BorrowedStream<'_>;
}

impl AsStream for BorrowedStream<'_> {
    fn as_stream(&self) -> BorrowedStream<'_> {
        *self
    }
}
