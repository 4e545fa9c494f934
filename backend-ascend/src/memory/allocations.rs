//! The allocations of this backend. ACL before CANN 9.0 has no query for the base of an allocation.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use device_ipc_core::{DeviceOrdinal, DevicePtr, DeviceRange};

/// The allocations of this backend, by base.
#[derive(Debug, Default)]
pub(crate) struct Allocations {
    by_base: Mutex<BTreeMap<DevicePtr, Allocation>>,
}

/// An allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allocation {
    /// The whole allocation, including the bytes that its size was rounded up by.
    pub(crate) range: DeviceRange,
    /// The function that allocated it.
    pub(crate) origin: Origin,
}

/// The function that allocated memory, which determines how it is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// `aclrtMallocAlign32`.
    Malloc,
    /// `aclrtMallocPhysical`, mapped with `aclrtMapMem`; the number is the physical handle.
    Physical(usize),
}

impl Allocations {
    pub(crate) fn insert(&self, allocation: Allocation) {
        self.lock().insert(allocation.range.ptr, allocation);
    }

    pub(crate) fn remove(&self, base: DevicePtr) -> Option<Allocation> {
        self.lock().remove(&base)
    }

    /// Returns the allocation that the address lies in.
    pub(crate) fn at(&self, ptr: DevicePtr) -> Option<Allocation> {
        let allocations = self.lock();
        let (_, allocation) = allocations.range(..=ptr).next_back()?;
        (allocation.range.end()? > ptr).then_some(*allocation)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<DevicePtr, Allocation>> {
        self.by_base.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Rounds a size up to whole pages, so that the allocation is aligned to pages and shares none. Returns `None` if the
/// result exceeds the address space.
pub(crate) fn whole_pages(bytes: u64, page: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(page).filter(|size| i64::try_from(*size).is_ok())
}

/// Returns the range of `len` bytes at an address that the vendor returned.
pub(crate) fn range_at(device: DeviceOrdinal, address: *mut std::ffi::c_void, len: u64) -> DeviceRange {
    DeviceRange::new(device, DevicePtr::new(address as usize as u64), len)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocation(base: u64, len: u64) -> Allocation {
        let range = DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::new(base), len);
        Allocation { range, origin: Origin::Malloc }
    }

    #[test]
    fn lookup_finds_the_allocation_of_an_address() {
        let all = Allocations::default();
        let (first, second) = (allocation(0x1000, 0x1000), allocation(0x4000, 0x1000));
        all.insert(first);
        all.insert(second);
        for (address, found) in [
            (0xfff, None),
            (0x1000, Some(first)),
            (0x1fff, Some(first)),
            (0x2000, None),
            (0x4000, Some(second)),
            (0x5000, None),
            (u64::MAX, None),
        ] {
            assert_eq!(all.at(DevicePtr::new(address)), found, "{address:#x}");
        }
        assert_eq!(all.remove(first.range.ptr), Some(first));
        assert_eq!(all.at(first.range.ptr), None);
        assert_eq!(all.remove(DevicePtr::new(0x4001)), None);
    }

    #[test]
    fn sizes_are_rounded_up_to_pages_without_overflow() {
        const PAGE: u64 = 2 << 20;
        assert_eq!(whole_pages(1, PAGE), Some(PAGE));
        assert_eq!(whole_pages(PAGE, PAGE), Some(PAGE));
        assert_eq!(whole_pages(PAGE + 1, PAGE), Some(2 * PAGE));
        assert_eq!(whole_pages(u64::MAX, PAGE), None);
        assert_eq!(whole_pages(1 << 63, PAGE), None);
    }
}
