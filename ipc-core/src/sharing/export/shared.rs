//! What an export keeps alive: the owner of the memory, the handles, the event that says when the bytes are written.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::backend::{DeviceEvent, DeviceIpc, Exported, HandleBytes, HandleKind, HandleKindInfo};
use crate::model::address::{DeviceRange, Extent};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::sharing::Runtime;
use crate::wire::AllocationId;

/// What an export keeps alive. Fields are dropped in this order: the memory goes last.
pub(crate) struct Shared {
    pub(crate) ready: Option<ReadyEvent>,
    /// Those of all regions, one region after the other.
    pub(crate) allocations: Handles,
    /// The regions in this process's address space.
    pub(crate) regions: Arc<[DeviceRange]>,
    #[allow(dead_code, reason = "keeps the memory allocated")]
    pub(crate) owner: Option<Box<dyn std::any::Any + Send + Sync>>,
    /// Are the allocations counted as kept?
    pub(crate) keeps: bool,
}

/// The handles of several allocations.
pub(crate) type Handles = Arc<[Arc<Allocation>]>;

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
    extent: Extent,
    kind: HandleKindInfo,
    /// How many exports keep it allocated, by an owner.
    kept: AtomicUsize,
    /// The handles: one, and further ones where a process may open each on one device only. The poller reads them, so the lock is
    /// not held over a call of the driver.
    handles: RwLock<Vec<Arc<Exported>>>,
    /// Held while the driver makes a further handle, so that each is made once.
    exporting: Mutex<()>,
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
        let exported = backend.export(extent, None)?;
        let kind = kind_info(backend, exported.kind)?;
        Ok(Self {
            id,
            key: allocation_key(backend, extent),
            backend: Arc::clone(backend),
            extent: *extent,
            kind,
            kept: AtomicUsize::new(0),
            handles: RwLock::new(vec![Arc::new(exported)]),
            exporting: Mutex::default(),
        })
    }

    pub(crate) fn backend(&self) -> &Arc<dyn DeviceIpc> {
        &self.backend
    }

    pub(crate) const fn id(&self) -> AllocationId {
        self.id
    }

    /// What is true of the handles.
    pub(crate) fn kind(&self) -> &HandleKindInfo {
        &self.kind
    }

    /// Does an export keep it allocated? What lies there and is allocated now lies in it, then.
    pub(crate) fn is_kept(&self) -> bool {
        self.kept.load(Ordering::Acquire) > 0
    }

    /// Does this memory lie in it, and an export keep it allocated?
    pub(super) fn keeps(&self, range: DeviceRange) -> bool {
        self.is_kept() && self.extent.allocation.contains(&range)
    }

    pub(crate) const fn extent(&self) -> &Extent {
        &self.extent
    }

    /// Is it memory of this instance of a backend?
    pub(crate) fn is_of(&self, backend: &Arc<dyn DeviceIpc>) -> bool {
        self.key == allocation_key(backend, &self.extent)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.extent.allocation.len
    }

    /// What device work of importers can reach, where that can be told.
    pub(super) fn reach(&self) -> Option<DeviceRange> {
        self.handle(0).and_then(|handle| self.backend.reach(&handle))
    }

    /// The handle for an importer's first, second, … device, once it has been made.
    pub(crate) fn handle(&self, device: usize) -> Option<Arc<Exported>> {
        let index = if self.kind.one_open_per_process { device } else { 0 };
        self.handles.read().unwrap_or_else(PoisonError::into_inner).get(index).cloned()
    }

    /// Makes the handles up to that of the importer's device, and has the vendor let the importer in. Calls the driver.
    pub(crate) fn prepare(&self, device: usize, peer: &[u8]) -> Result<()> {
        let handle = self.handle(device).map_or_else(|| self.export_for(device), Ok)?;
        if self.kind.whitelist { self.backend.authorize(&handle, peer) } else { Ok(()) }
    }

    /// Has the driver make the handles up to that of the importer's device.
    fn export_for(&self, device: usize) -> Result<Arc<Exported>> {
        let _exporting = self.exporting.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(handle) = self.handle(device) {
                return Ok(handle);
            }
            let further = Arc::new(self.backend.export(&self.extent, Some(self.kind.kind))?);
            self.handles.write().unwrap_or_else(PoisonError::into_inner).push(further);
        }
    }
}

impl Shared {
    /// Returns the backend and the device of the memory, which is one for all regions.
    pub(super) fn place(&self) -> Option<(&Arc<dyn DeviceIpc>, DeviceOrdinal)> {
        let allocation = self.allocations.first()?;
        Some((&allocation.backend, allocation.extent.allocation.device))
    }

    /// From now on, until this is dropped, the owner keeps the allocations.
    pub(super) fn keep(&mut self) {
        self.keeps = true;
        for allocation in self.allocations.iter() {
            allocation.kept.fetch_add(1, Ordering::AcqRel);
        }
    }
}

/// Before the owner is dropped.
impl Drop for Shared {
    fn drop(&mut self) {
        if self.keeps {
            for allocation in self.allocations.iter() {
                allocation.kept.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }
}

fn kind_info(backend: &Arc<dyn DeviceIpc>, kind: HandleKind) -> Result<HandleKindInfo> {
    backend.handle_kinds().into_iter().find(|info| info.kind == kind).ok_or_else(|| Error::Unsupported {
        backend: backend.info().name,
        what: format!("say what is true of handles of kind {}", kind.0),
        why: "the backend makes them, and does not list them; that is a fault of the backend".into(),
    })
}

impl Drop for Allocation {
    fn drop(&mut self) {
        for handle in self.handles.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // Nobody else has it: it is lent while an answer is written, by those who hold the allocation.
            let Some(exported) = Arc::into_inner(handle) else { continue };
            if let Err(error) = self.backend.unexport(exported) {
                tracing::warn!(target: crate::os::log::EXPORT, %error, "an export could not be taken back");
            }
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
