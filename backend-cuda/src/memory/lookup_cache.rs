//! A cache of the sources of recently inspected allocations.
//!
//! A first export is two calls: the extents of the region, and the handle. Both run in one entry of the device's
//! context ([`context`](crate::objects::context)); within it, the driver is asked once for the source of an allocation.

use std::cell::RefCell;

use device_ipc_core::DevicePtr;

use super::source::MemorySource;

thread_local! {
    /// The sources of allocations by address, while a [`LookupScope`] lives.
    static FOUND: RefCell<Option<Vec<(DevicePtr, MemorySource)>>> = const { RefCell::new(None) };
}

/// A guard: [`insert`] remembers sources until it is dropped. Holds the entries of the outer scope.
pub(crate) struct LookupScope(Option<Vec<(DevicePtr, MemorySource)>>);

impl LookupScope {
    pub(crate) fn begin() -> Self {
        Self(FOUND.replace(Some(Vec::new())))
    }
}

impl Drop for LookupScope {
    fn drop(&mut self) {
        FOUND.set(self.0.take());
    }
}

/// Remembers the source of the allocation at `base`, in the innermost scope of this thread.
pub(crate) fn insert(base: DevicePtr, source: MemorySource) {
    FOUND.with_borrow_mut(|found| found.iter_mut().for_each(|found| found.push((base, source))));
}

/// Returns the source of the allocation at `base`, if the innermost scope of this thread has it.
pub(crate) fn get(base: DevicePtr) -> Option<MemorySource> {
    let at_base =
        |found: &Vec<(DevicePtr, MemorySource)>| found.iter().rev().find(|(ptr, _)| *ptr == base).copied();
    FOUND.with_borrow(|found| found.as_ref().and_then(at_base)).map(|(_, source)| source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_end_with_their_scope() {
        let (first, second) = (DevicePtr::new(0x1000), DevicePtr::new(0x2000));
        insert(first, MemorySource::Plain);
        assert_eq!(get(first), None, "no scope");
        let outer = LookupScope::begin();
        insert(first, MemorySource::Plain);
        {
            let _inner = LookupScope::begin();
            assert_eq!(get(first), None);
            insert(second, MemorySource::Foreign);
        }
        assert_eq!((get(first), get(second)), (Some(MemorySource::Plain), None));
        drop(outer);
        assert_eq!(get(first), None);
    }
}
