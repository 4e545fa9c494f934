//! What an export keeps alive: the owner of the memory, the handles, the event that says when the bytes are written.

use std::fmt;
use std::sync::Arc;

use crate::address::{DeviceRange, Extent};
use crate::backend::{DeviceEvent, DeviceIpc, Exported, HandleBytes};
use crate::broker::AllocationId;
use crate::error::Result;
use crate::runtime::Runtime;

/// What an export keeps alive. Fields are dropped in this order: the memory goes last.
pub(crate) struct Shared {
    pub(crate) ready: Option<ReadyEvent>,
    pub(crate) allocations: Vec<Arc<Allocation>>,
    #[allow(dead_code, reason = "keeps the memory allocated")]
    pub(crate) owner: Option<Box<dyn std::any::Any + Send + Sync>>,
}

/// The event that says when the bytes have been written.
pub(crate) struct ReadyEvent {
    pub(crate) event: Box<dyn DeviceEvent>,
    pub(crate) handle: HandleBytes,
}

/// An allocation that has a handle; shared by all exports of regions in it.
pub(crate) struct Allocation {
    id: AllocationId,
    key: AllocationKey,
    backend: Arc<dyn DeviceIpc>,
    exported: Option<Exported>,
}

/// Tells allocations apart; two instances of a backend share nothing.
pub(super) type AllocationKey = (usize, DeviceRange, Option<u64>);

pub(super) fn allocation_key(backend: &Arc<dyn DeviceIpc>, extent: &Extent) -> AllocationKey {
    let backend = Arc::as_ptr(backend).cast::<()>() as usize;
    (backend, extent.allocation, extent.generation.map(|generation| generation.0))
}

impl Allocation {
    /// Has the backend make a handle.
    pub(super) fn export(id: AllocationId, backend: &Arc<dyn DeviceIpc>, extent: &Extent) -> Result<Self> {
        let exported = Some(backend.export(extent, None)?);
        Ok(Self { id, key: allocation_key(backend, extent), backend: Arc::clone(backend), exported })
    }

    pub(super) fn backend(&self) -> &dyn DeviceIpc {
        &*self.backend
    }

    pub(crate) const fn id(&self) -> AllocationId {
        self.id
    }

    pub(crate) fn exported(&self) -> &Exported {
        self.exported.as_ref().expect("taken by drop alone")
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.exported.take().map(|exported| self.backend.unexport(exported)) {
            tracing::warn!(%error, "an export could not be taken back");
        }
        if let Some(runtime) = Runtime::existing() {
            runtime.exports.forget_allocation(&self.key);
        }
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocation").field("id", &self.id).finish_non_exhaustive()
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("allocations", &self.allocations).finish_non_exhaustive()
    }
}
