//! cudarc's streams as streams of this backend.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use device_ipc_core::{AsStream, BorrowedStream, DeviceOrdinal};

use crate::interop::marker::Cudarc;
use crate::library::NAME;

/// The stream's context should be the primary one. The default stream of a context of `CudaContext::new_non_primary` is
/// indistinguishable from the primary one's.
impl AsStream<Cudarc> for CudaStream {
    fn as_stream(&self) -> BorrowedStream<'_> {
        let device = ordinal(self);
        // SAFETY: the stream is of CUDA and of that device, and its owner is borrowed.
        unsafe { BorrowedStream::from_raw(NAME, device, self.cu_stream().addr() as u64) }
    }
}

impl AsStream<Cudarc> for Arc<CudaStream> {
    fn as_stream(&self) -> BorrowedStream<'_> {
        (**self).as_stream()
    }
}

pub(super) fn ordinal(stream: &CudaStream) -> DeviceOrdinal {
    // An ordinal out of range identifies no device, so every call refuses it.
    DeviceOrdinal::new(u32::try_from(stream.context().ordinal()).unwrap_or(u32::MAX))
}
