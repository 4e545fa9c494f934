//! The resources of an export: the owner of the memory, the handles, and the ready event.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use super::remote_memory::RemoteMemory;
use crate::backend::{DeviceEvent, DeviceIpc, Exported, HandleBytes, HandleKind, HandleKindInfo};
use crate::model::address::{DeviceRange, Extent};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::sharing::Runtime;
use crate::wire::AllocationId;

/// The resources of an export. Fields are dropped in this order: the memory last.
pub(crate) struct Shared {
    pub(crate) ready: Option<ReadyEvent>,
    /// The allocations of all regions, in order.
    pub(crate) allocations: Handles,
    /// The regions in the address space of this process.
    pub(crate) regions: Arc<[DeviceRange]>,
    /// Present if importers of other hosts may pull the memory. Dropped before the owner.
    pub(crate) remote: Option<RemoteMemory>,
    #[allow(dead_code, reason = "keeps the memory allocated")]
    pub(crate) owner: Option<Box<dyn std::any::Any + Send + Sync>>,
    /// Whether the allocations are counted as kept.
    pub(crate) keeps: bool,
}

/// The handles of several allocations.
pub(crate) type Handles = Arc<[Arc<Allocation>]>;

/// The ready event.
pub(crate) struct ReadyEvent {
    pub(crate) event: Box<dyn DeviceEvent>,
    pub(crate) handle: HandleBytes,
}

/// An allocation with a handle, which all exports of regions in it share.
pub(crate) struct Allocation {
    id: AllocationId,
    key: AllocationKey,
    backend: Arc<dyn DeviceIpc>,
    extent: Extent,
    kind: HandleKindInfo,
    /// The number of exports whose owner keeps it allocated.
    kept: AtomicUsize,
    /// The handles: one, or several if each importer may open a handle on one device only. The poller reads them, so the lock
    /// is never held during a call of the driver.
    handles: RwLock<Vec<Arc<Exported>>>,
    /// Held while the driver creates a further handle, so that each is created once.
    exporting: Mutex<()>,
}

/// Distinguishes allocations of different instances of a backend.
pub(super) type AllocationKey = (usize, DeviceRange, Option<u64>);

pub(super) fn allocation_key(backend: &Arc<dyn DeviceIpc>, extent: &Extent) -> AllocationKey {
    let backend = Arc::as_ptr(backend).cast::<()>() as usize;
    (backend, extent.allocation, extent.generation.map(|generation| generation.0))
}

impl Allocation {
    /// Asks the backend for a handle.
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

    /// Returns the properties of the handles.
    pub(crate) fn kind(&self) -> &HandleKindInfo {
        &self.kind
    }

    /// Returns whether an export keeps it allocated. Memory at these addresses is then in this allocation.
    pub(crate) fn is_kept(&self) -> bool {
        self.kept.load(Ordering::Acquire) > 0
    }

    /// Returns whether it contains this memory, and an export keeps it allocated.
    pub(super) fn keeps(&self, range: DeviceRange) -> bool {
        self.is_kept() && self.extent.allocation.contains(&range)
    }

    pub(crate) const fn extent(&self) -> &Extent {
        &self.extent
    }

    /// Returns whether it belongs to this instance of a backend.
    pub(crate) fn is_of(&self, backend: &Arc<dyn DeviceIpc>) -> bool {
        self.key == allocation_key(backend, &self.extent)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.extent.allocation.len
    }

    /// Returns the range that device work of importers can access, if it is known.
    pub(super) fn reach(&self) -> Option<DeviceRange> {
        self.handle(0).and_then(|handle| self.backend.reach(&handle))
    }

    /// Returns the handle for the nth device of an importer, if it exists.
    pub(crate) fn handle(&self, device: usize) -> Option<Arc<Exported>> {
        let index = if self.kind.one_open_per_process { device } else { 0 };
        self.handles.read().unwrap_or_else(PoisonError::into_inner).get(index).cloned()
    }

    /// Creates the handles up to that of the importer's device, and permits the importer with the vendor. Calls the driver.
    pub(crate) fn prepare(&self, device: usize, peer: &[u8]) -> Result<()> {
        let handle = self.handle(device).map_or_else(|| self.export_for(device), Ok)?;
        if self.kind.whitelist { self.backend.authorize(&handle, peer) } else { Ok(()) }
    }

    /// Asks the driver for the handles up to that of the importer's device.
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

    /// Registers the regions for importers of other hosts, unless they are registered. Returns the metadata of each.
    pub(crate) fn register(&self) -> Result<Vec<Vec<u8>>> {
        match (&self.remote, self.place()) {
            (Some(remote), Some((backend, device))) => remote.register(&**backend, device, &self.regions),
            _ => Ok(Vec::new()),
        }
    }

    /// Counts the allocations as kept until this is dropped.
    pub(super) fn keep(&mut self) {
        self.keeps = true;
        for allocation in self.allocations.iter() {
            allocation.kept.fetch_add(1, Ordering::AcqRel);
        }
    }
}

/// Runs before the owner is dropped.
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
            // The last reference: others are borrowed from holders of the allocation while a reply is written.
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
