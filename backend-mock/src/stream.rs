//! Streams of the engine.

#![allow(unsafe_code, reason = "wraps the engine's stream numbers, which live until the stream is dropped")]

use std::fmt;
use std::sync::Arc;

use device_ipc_core::backend::{DeviceStream, check_backend};
use device_ipc_core::{BorrowedStream, DeviceOrdinal, Result};
use device_ipc_mock_engine::{Machine, StreamId};

use crate::kinds::NAME;

/// Returns the engine's stream of a borrowed one.
pub(crate) fn stream_of(stream: BorrowedStream<'_>) -> Result<StreamId> {
    check_backend("the stream", stream.backend(), NAME)?;
    Ok(StreamId::new(stream.raw()))
}

/// A stream of the engine.
pub(crate) struct MockStream {
    pub(crate) machine: Arc<Machine>,
    pub(crate) stream: StreamId,
    pub(crate) device: DeviceOrdinal,
}

impl fmt::Debug for MockStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MockStream")
            .field("device", &self.device)
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}

impl DeviceStream for MockStream {
    fn as_borrowed(&self) -> BorrowedStream<'_> {
        // SAFETY: the stream is the engine's, on this device, and is destroyed by drop alone.
        unsafe { BorrowedStream::from_raw(NAME, self.device, self.stream.get()) }
    }
}

impl Drop for MockStream {
    fn drop(&mut self) {
        // Fails only in a forked child; the streams belong to the parent.
        let _ = self.machine.destroy_stream(self.stream);
    }
}
