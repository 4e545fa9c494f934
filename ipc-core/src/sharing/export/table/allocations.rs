//! The allocations of exports: each has one handle for all exports.

use std::sync::{Arc, PoisonError, Weak};

use super::super::shared::{Allocation, AllocationKey, allocation_key};
use super::ExportTable;
use crate::backend::DeviceIpc;
use crate::model::address::{DevicePtr, Extent};
use crate::model::device::DeviceOrdinal;
use crate::model::error::Result;
use crate::wire::{AllocationId, random_bytes};

/// The backend instance, the device and the address.
pub(super) type Address = (usize, DeviceOrdinal, DevicePtr);

fn address((backend, range, _): &AllocationKey) -> Address {
    (*backend, range.device, range.ptr)
}

impl ExportTable {
    /// Returns the allocation with its handle: an existing one, or a new one. Other callers wait while a handle of it is
    /// created or closed: closing a handle of a vendor whose handles revoke ends the mappings of processes that opened it
    /// meanwhile.
    pub(crate) fn allocation(
        &self,
        backend: &Arc<dyn DeviceIpc>,
        extent: &Extent,
    ) -> Result<Arc<Allocation>> {
        let key = allocation_key(backend, extent);
        let mut state = self.lock();
        while let Some(known) = state.allocations.get(&key) {
            if let Some(known) = known.upgrade() {
                return Ok(known);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.allocations.insert(key, Weak::new());
        if state.last_allocation == 0 {
            // A program that this process executes later has the same identity (execve(2)) and other allocations.
            state.last_allocation = u64::from(u32::from_ne_bytes(random_bytes()?)) << 24;
        }
        state.last_allocation += 1;
        let id = AllocationId(state.last_allocation);
        drop(state);
        let unfinished = UnfinishedExport { table: self, key };
        let made = Arc::new(Allocation::export(id, backend, extent)?);
        std::mem::forget(unfinished);
        let mut state = self.lock();
        state.allocations.insert(key, Arc::downgrade(&made));
        state.by_address.insert(address(&key), Arc::downgrade(&made));
        drop(state);
        self.changed.notify_all();
        Ok(made)
    }

    pub(in crate::sharing::export) fn forget_allocation(&self, key: &AllocationKey) {
        let mut state = self.lock();
        state.allocations.remove(key);
        // Not a newer allocation at the same address.
        if state.by_address.get(&address(key)).is_some_and(|known| known.strong_count() == 0) {
            state.by_address.remove(&address(key));
        }
        drop(state);
        self.changed.notify_all();
    }
}

/// Lets other callers try after a handle could not be created.
struct UnfinishedExport<'a> {
    table: &'a ExportTable,
    key: AllocationKey,
}

impl Drop for UnfinishedExport<'_> {
    fn drop(&mut self) {
        self.table.forget_allocation(&self.key);
    }
}
