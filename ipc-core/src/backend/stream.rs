//! Streams of whoever has them: ours, cudarc's, a raw vendor handle.

#![allow(unsafe_code, reason = "a vendor's handle is taken on trust")]

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
    /// A stream from the vendor's handle (`CUstream`, `aclrtStream`) as a number.
    ///
    /// # Safety
    ///
    /// `raw` is a stream of the backend called `backend`, on `device` of this process's numbering, and is not
    /// destroyed during the lifetime of the value.
    pub const unsafe fn from_raw(backend: &'static str, device: DeviceOrdinal, raw: u64) -> Self {
        Self { backend, device, raw, owner: PhantomData }
    }

    /// The name of the backend that the stream belongs to.
    pub const fn backend(&self) -> &'static str {
        self.backend
    }

    /// The device that the stream runs on.
    pub const fn device(&self) -> DeviceOrdinal {
        self.device
    }

    /// The vendor's handle as a number.
    pub const fn raw(&self) -> u64 {
        self.raw
    }
}

/// Something that is a stream: [`Stream`](crate::Stream), or a type of a vendor's crate.
///
/// `M` is a marker that lets a backend implement the trait for types that are not its own (cudarc's
/// `CudaStream`); callers never name it.
pub trait AsStream<M = ()> {
    /// The vendor's stream.
    fn as_stream(&self) -> BorrowedStream<'_>;
}

impl AsStream for BorrowedStream<'_> {
    fn as_stream(&self) -> BorrowedStream<'_> {
        *self
    }
}
