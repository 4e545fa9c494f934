//! Memory of this very process, that a guard keeps.

use std::sync::Arc;

use super::view_owner::check_stream_of;
use crate::backend::DeviceIpc;
use crate::backend::stream::BorrowedStream;
use crate::model::device::DeviceOrdinal;
use crate::model::error::Result;
use crate::os::process::Owner;

/// Memory that this process allocated, and that whoever has this keeps. It is always ready, and may be written.
pub(crate) struct OwnMemory {
    backend: Arc<dyn DeviceIpc>,
    device: DeviceOrdinal,
    /// Who keeps it, for an error.
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

    /// May work on this stream use the memory now?
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
