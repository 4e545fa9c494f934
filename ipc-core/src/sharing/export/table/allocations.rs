//! The allocations that exports lie in: each has its handle once, whatever the number of exports.

use std::sync::{Arc, PoisonError, Weak};

use super::super::shared::{Allocation, AllocationKey, allocation_key};
use super::ExportTable;
use crate::backend::DeviceIpc;
use crate::model::address::{DevicePtr, Extent};
use crate::model::device::DeviceOrdinal;
use crate::model::error::Result;
use crate::wire::{AllocationId, random_bytes};

/// The backend's instance, the device and the address there.
pub(super) type Address = (usize, DeviceOrdinal, DevicePtr);

fn address((backend, range, _): &AllocationKey) -> Address {
    (*backend, range.device, range.ptr)
}

impl ExportTable {
    /// The allocation with its handle: the one that another export made, or a new one. While a handle of it is being
    /// made or taken back, others wait: a vendor whose handles revoke takes the memory from whoever opened it meanwhile.
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
            // Another program that this process runs later is the same process (execve(2)) and has other allocations.
            state.last_allocation = u64::from(u32::from_ne_bytes(random_bytes()?)) << 24;
        }
        state.last_allocation += 1;
        let id = AllocationId(state.last_allocation);
        drop(state);
        let unfinished = Unfinished { table: self, key };
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
        // Not another one, which has taken its place.
        if state.by_address.get(&address(key)).is_some_and(|known| known.strong_count() == 0) {
            state.by_address.remove(&address(key));
        }
        drop(state);
        self.changed.notify_all();
    }
}

/// Lets others try where no handle could be made.
struct Unfinished<'a> {
    table: &'a ExportTable,
    key: AllocationKey,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.table.forget_allocation(&self.key);
    }
}
