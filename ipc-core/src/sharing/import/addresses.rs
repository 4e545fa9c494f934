//! The address ranges of imported memory in this process, which every share checks.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::model::address::{DevicePtr, DeviceRange};

/// Ranges by start and end, each with the number of times that it is open: one allocation may be mapped at one address with two
/// accesses. Different ranges do not overlap, because a driver maps whole allocations.
#[derive(Debug, Default)]
pub(super) struct Addresses(Mutex<BTreeMap<(DevicePtr, DevicePtr), usize>>);

impl Addresses {
    pub(super) fn add(&self, range: DeviceRange) {
        if let Some(end) = range.end() {
            *self.lock().entry((range.ptr, end)).or_default() += 1;
        }
    }

    pub(super) fn remove(&self, range: DeviceRange) {
        let Some(end) = range.end() else { return };
        let mut ranges = self.lock();
        if let Some(count) = ranges.get_mut(&(range.ptr, end)) {
            *count -= 1;
            if *count == 0 {
                ranges.remove(&(range.ptr, end));
            }
        }
    }

    /// Returns whether any range overlaps this one.
    pub(super) fn overlap(&self, range: DeviceRange) -> bool {
        let Some(end) = range.end() else { return false };
        let ranges = self.lock();
        // Of the ranges that begin before its end, only the last can overlap it.
        let before = ranges.range(..(end, DevicePtr::new(0))).next_back();
        before.is_some_and(|((_, open_end), _)| range.ptr < *open_end)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(DevicePtr, DevicePtr), usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
