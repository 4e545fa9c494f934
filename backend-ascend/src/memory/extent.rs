//! The allocations that a range lies in.
//!
//! `aclrtPointerGetAttributes` returns the device and the page size of an address ("Unified Addressing"); the base of
//! an allocation comes from `aclrtMemGetAddressRange`, which arrived with CANN 9.0, from the table of this backend's
//! allocations, or from the caller. `aclrtIpcMemGetExportKey` accepts only the base of an allocation, aligned to a
//! page: "IPC shared memory: page alignment" in the FAQ of the ACL manual.

use device_ipc_core::backend::{Extent, Remedy};
use device_ipc_core::{DeviceRange, Error, Result};

use super::imports;
use super::state::MemoryState;

impl MemoryState {
    /// Returns the allocations that `range` lies in, if they can be exported: one, or several adjacent blocks of
    /// physical memory, each of which is mapped separately.
    pub(crate) fn extents_of(&self, range: DeviceRange, stated: Option<DeviceRange>) -> Result<Vec<Extent>> {
        self.device(range.device)?;
        if range.ptr.is_null() {
            return Err(Error::NotDeviceMemory { ptr: range.ptr, why: "it is the null address".into() });
        }
        let _current = self.enter(range.device)?;
        let first = self.allocation_at(range, stated)?;
        let mut extents = vec![Extent { allocation: first, generation: None }];
        let mut reached = first;
        while !covers(reached, range) {
            let next = reached.end().filter(|_| self.is_physical(reached.ptr));
            let next = next.and_then(|next| self.next_block(DeviceRange { ptr: next, len: 1, ..range }));
            let Some(next) = next else {
                return Err(exceeds_allocation(range, reached));
            };
            extents.push(Extent { allocation: next, generation: None });
            reached = next;
        }
        Ok(extents)
    }

    /// Returns the block of physical memory whose base is the begin of `range`.
    fn next_block(&self, range: DeviceRange) -> Option<DeviceRange> {
        let block = self.allocation_at(range, None).ok()?;
        (block.ptr == range.ptr && self.is_physical(block.ptr)).then_some(block)
    }

    /// Returns the allocation that `range` begins in. The device's context must be current.
    fn allocation_at(&self, range: DeviceRange, stated: Option<DeviceRange>) -> Result<DeviceRange> {
        let ptr = range.ptr;
        if imports::contains(ptr) {
            return Err(Error::SharedOn { ptr });
        }
        let page = self.page_of(range)?;
        let known = match self.address_range(range)? {
            Some(reported) => Some(reported),
            None => self.allocations.at(ptr).map(|allocation| allocation.range),
        };
        let allocation = match (known, stated) {
            (Some(known), Some(stated)) if stated.ptr != known.ptr || stated.len > known.len => {
                return Err(Error::InvalidRegion(format!(
                    "the allocation was stated as {} bytes at {}, but it is {} bytes at {}",
                    stated.len, stated.ptr, known.len, known.ptr
                )));
            }
            (Some(known), _) => known,
            (None, Some(stated)) => self.check_stated(stated)?,
            (None, None) => {
                return Err(Error::InvalidRegion(format!(
                    "{} cannot return the base of the allocation of {ptr} (CANN 9.0 can), and only whole allocations \
                     can be shared: {}",
                    self.version(),
                    Remedy::StateAllocation
                )));
            }
        };
        if !contains_begin(allocation, range) {
            return Err(exceeds_allocation(range, allocation));
        }
        if !allocation.ptr.get().is_multiple_of(page) {
            return Err(Error::NotShareable {
                ptr,
                kind: format!(
                    "memory of an allocation at {}, which is not aligned to its pages of {page} bytes",
                    allocation.ptr
                ),
                remedy: format!(
                    "the driver shares only whole pages: allocate a multiple of 2 MiB with aclrtMalloc and \
                         ACL_MEM_MALLOC_HUGE_FIRST; share small blocks of a caching allocator (PyTorch's below 1 MiB) \
                         by their whole segment, or {}",
                    Remedy::ShareCopyOfMemory
                ),
            });
        }
        Ok(allocation)
    }

    /// Returns the allocation that its owner states. Only checks that its first and last byte are device memory.
    fn check_stated(&self, stated: DeviceRange) -> Result<DeviceRange> {
        self.page_of(stated)?;
        let last = stated.len.checked_sub(1).and_then(|last| stated.ptr.checked_add(last));
        match last {
            Some(last) => self.page_of(DeviceRange { ptr: last, len: 1, ..stated }).map(|_| stated),
            None => Err(Error::InvalidRegion(format!(
                "the allocation was stated as {} bytes at {}, which is not a valid range",
                stated.len, stated.ptr
            ))),
        }
    }
}

fn exceeds_allocation(range: DeviceRange, allocation: DeviceRange) -> Error {
    Error::InvalidRegion(format!(
        "{} bytes at {} exceed their allocation of {} bytes at {}",
        range.len, range.ptr, allocation.len, allocation.ptr
    ))
}

fn covers(allocation: DeviceRange, range: DeviceRange) -> bool {
    matches!((allocation.end(), range.end()), (Some(end), Some(range_end)) if range_end <= end)
}

fn contains_begin(allocation: DeviceRange, range: DeviceRange) -> bool {
    allocation.ptr <= range.ptr && allocation.end().is_some_and(|end| range.ptr < end)
}
