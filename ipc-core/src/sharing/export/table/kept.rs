//! Which memory exports keep allocated, so that the driver need not be asked where it lies.

use std::sync::Arc;

use super::{Allocation, ExportTable, Shared, State};
use crate::backend::DeviceIpc;
use crate::model::address::{DeviceRange, Extent};
use crate::model::lease::LeaseId;
use crate::wire::descriptor::ExportId;

impl ExportTable {
    /// The allocation that this memory lies in, where an export keeps it allocated.
    pub(crate) fn kept_extent(&self, backend: &Arc<dyn DeviceIpc>, range: DeviceRange) -> Option<Extent> {
        let instance = Arc::as_ptr(backend).cast::<()>() as usize;
        let state = self.lock();
        let found = state.before(instance, range)?;
        // Not under the lock, where this may be the last to let go of it.
        drop(state);
        found.keeps(range).then(|| *found.extent())
    }

    /// The same of several, with their handles.
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
        // As above.
        found.into_iter().map(|(range, allocation)| allocation.filter(|one| one.keeps(range))).collect()
    }

    /// Is there such a lease, and are the allocations of its export these very ones?
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
    /// The allocation that begins at the range or before it, and behind all others that do.
    fn before(&self, backend: usize, range: DeviceRange) -> Option<Arc<Allocation>> {
        let until = ..=(backend, range.device, range.ptr);
        let ((instance, device, _), allocation) = self.by_address.range(until).next_back()?;
        if (*instance, *device) == (backend, range.device) { allocation.upgrade() } else { None }
    }
}
