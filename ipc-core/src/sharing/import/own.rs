//! Memory of this process in a guard.

use std::sync::Arc;

use crate::backend::stream::BorrowedStream;
use crate::backend::{DeviceIpc, check_stream_of};
use crate::model::device::DeviceOrdinal;
use crate::model::error::Result;
use crate::os::process::Owner;

/// Memory that this process allocated and its owner keeps allocated. It is always ready and writable.
pub(crate) struct OwnMemory {
    backend: Arc<dyn DeviceIpc>,
    device: DeviceOrdinal,
    /// The name of the owner for errors.
    what: &'static str,
    owner: Owner,
}

impl OwnMemory {
    pub(crate) fn new(backend: Arc<dyn DeviceIpc>, device: DeviceOrdinal, what: &'static str) -> Self {
        Self { backend, device, what, owner: Owner::current() }
    }

    pub(super) fn backend(&self) -> &Arc<dyn DeviceIpc> {
        &self.backend
    }

    /// Checks that work on this stream may use the memory now.
    pub(super) fn check_usable_on(&self, stream: BorrowedStream<'_>) -> Result<()> {
        self.owner.check()?;
        check_stream_of(stream, &*self.backend, self.device, self.what)
    }
}

impl std::fmt::Debug for OwnMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OwnMemory")
            .field("of", &self.what)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}
