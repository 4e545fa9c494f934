//! The memory that exports keep allocated, which needs no call of the driver to be located.

use std::sync::Arc;

use super::{Allocation, ExportTable, Shared, State};
use crate::backend::DeviceIpc;
use crate::model::address::{DeviceRange, Extent};
use crate::model::lease::LeaseId;
use crate::wire::descriptor::ExportId;

impl ExportTable {
    /// Returns the allocation of this memory, if an export keeps it allocated.
    pub(crate) fn kept_extent(&self, backend: &Arc<dyn DeviceIpc>, range: DeviceRange) -> Option<Extent> {
        let instance = Arc::as_ptr(backend).cast::<()>() as usize;
        let state = self.lock();
        let found = state.before(instance, range)?;
        // Not dropped under the lock: this may be the last reference.
        drop(state);
        found.keeps(range).then(|| *found.extent())
    }

    /// Returns the allocations of several memories with their handles.
    pub(crate) fn kept_allocations(
        &self,
        backend: &Arc<dyn DeviceIpc>,
        ranges: impl ExactSizeIterator<Item = DeviceRange>,
    ) -> Vec<Option<Arc<Allocation>>> {
        let backend = Arc::as_ptr(backend).cast::<()>() as usize;
        let mut found = Vec::with_capacity(ranges.len());
        let state = self.lock();
        found.extend(ranges.map(|range| (range, state.before(backend, range))));
        drop(state);
        // Not dropped under the lock, as above.
        found.into_iter().map(|(range, allocation)| allocation.filter(|one| one.keeps(range))).collect()
    }

    /// Returns whether there is such a lease, and its export has exactly these allocations.
    pub(crate) fn has_allocations_of(&self, export: ExportId, lease: LeaseId, of: &Shared) -> bool {
        let state = self.lock();
        let entry = state.exports.get(&export).filter(|entry| entry.leases.contains_key(&lease));
        let Some(known) = entry.and_then(|entry| entry.shared.as_deref()) else { return false };
        let (known, these) = (&known.allocations, &of.allocations);
        Arc::ptr_eq(known, these)
            || known.len() == these.len()
                && known.iter().zip(&**these).all(|(one, other)| Arc::ptr_eq(one, other))
    }
}

impl State {
    /// Returns the allocation with the greatest start address that is not after the range's.
    fn before(&self, backend: usize, range: DeviceRange) -> Option<Arc<Allocation>> {
        let until = ..=(backend, range.device, range.ptr);
        let ((instance, device, _), allocation) = self.by_address.range(until).next_back()?;
        if (*instance, *device) == (backend, range.device) { allocation.upgrade() } else { None }
    }
}
