//! Allocations in whole pages, so that they can be shared and share no page.
//!
//! "Device Memory Malloc and Free" of the ACL manual for memory that travels by key; "Virtual Memory Management" for
//! memory that travels by shareable handle: physical memory, and addresses that it is mapped at.

use std::ffi::c_void;

use device_ipc_core::{DeviceOrdinal, DeviceRange, Error, Result};

use super::allocations::{Allocation, Origin, range_at, whole_pages};
use super::attributes::address;
use super::state::MemoryState;
use crate::bindings::*;
use crate::library::status::is_out_of_memory;
use crate::library::{AclLibrary, call};

/// The size of a huge page. Allocations are multiples of it: the driver shares whole pages, and blocks of up to 1 MiB
/// lie in small pages.
const HUGE_PAGE: u64 = 2 << 20;

impl MemoryState {
    /// Allocates memory of `aclrtMalloc`.
    pub(crate) fn allocate_pages(&self, device: DeviceOrdinal, bytes: u64) -> Result<DeviceRange> {
        let chip = self.device(device)?.chip;
        let size = size_of_pages(device, bytes, HUGE_PAGE)?;
        let _current = self.enter(device)?;
        let policy = if chip.needs_peer_pages() {
            aclrtMemMallocPolicy::ACL_MEM_MALLOC_HUGE_FIRST_P2P
        } else {
            aclrtMemMallocPolicy::ACL_MEM_MALLOC_HUGE_FIRST
        };
        let mut base = std::ptr::null_mut();
        // aclrtMalloc would add 32 bytes on A2 and A3, and thus a page.
        // SAFETY: writes one address.
        let status = unsafe { call!(self, aclrtMallocAlign32(&raw mut base, size as usize, policy)) };
        self.check_allocated("aclrtMallocAlign32", status, device, bytes)?;
        let range = range_at(device, base, size);
        self.allocations.insert(Allocation { range, origin: Origin::Malloc });
        Ok(DeviceRange { len: bytes, ..range })
    }

    /// Allocates physical memory and maps it.
    pub(crate) fn allocate_physical(&self, device: DeviceOrdinal, bytes: u64) -> Result<DeviceRange> {
        let properties = self.physical_properties(device)?;
        let _current = self.enter(device)?;
        let size = size_of_pages(device, bytes, self.granularity(properties))?;
        let mut physical = aclrtDrvMemHandle(std::ptr::null_mut());
        // SAFETY: writes one handle; reads the properties.
        let status = unsafe {
            call!(self, aclrtMallocPhysical(&raw mut physical, size as usize, &raw const properties, 0))
        };
        self.check_allocated("aclrtMallocPhysical", status, device, bytes)?;
        match self.map_physical(physical, size, device) {
            Ok(range) => {
                let origin = Origin::Physical(physical.0 as usize);
                self.allocations.insert(Allocation { range, origin });
                Ok(DeviceRange { len: bytes, ..range })
            }
            Err(error) => {
                self.release_physical(physical);
                Err(error)
            }
        }
    }

    /// Returns the granularity of physical memory of a device in bytes.
    pub(crate) fn granularity_of(&self, device: DeviceOrdinal) -> Result<u64> {
        let _current = self.enter(device)?;
        Ok(self.granularity(self.physical_properties(device)?))
    }

    fn physical_properties(&self, device: DeviceOrdinal) -> Result<aclrtPhysicalMemProp> {
        let device = self.device(device)?;
        let memory = if device.chip.needs_peer_pages() {
            aclrtMemAttr::ACL_HBM_MEM_P2P_HUGE
        } else {
            aclrtMemAttr::ACL_HBM_MEM_HUGE
        };
        Ok(aclrtPhysicalMemProp {
            handleType: aclrtMemHandleType::ACL_MEM_HANDLE_TYPE_NONE,
            allocationType: aclrtMemAllocationType::ACL_MEM_ALLOCATION_TYPE_PINNED,
            memAttr: memory,
            location: aclrtMemLocation {
                id: device.info.ordinal.get(),
                type_: aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_DEVICE,
            },
            reserve: 0,
        })
    }

    /// Returns the granularity of physical memory in bytes; a huge page if the runtime does not return it.
    fn granularity(&self, mut properties: aclrtPhysicalMemProp) -> u64 {
        let option = aclrtMemGranularityOptions::ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut granularity = 0;
        // SAFETY: writes one size.
        let status = unsafe {
            call!(self, aclrtMemGetAllocationGranularity(&raw mut properties, option, &raw mut granularity))
        };
        if status == ACL_SUCCESS && granularity > 0 { granularity as u64 } else { HUGE_PAGE }
    }

    fn map_physical(
        &self,
        physical: aclrtDrvMemHandle,
        size: u64,
        device: DeviceOrdinal,
    ) -> Result<DeviceRange> {
        let mut base = std::ptr::null_mut();
        // SAFETY: writes one address; alignment, address hint and flags are reserved.
        let status = unsafe {
            call!(self, aclrtReserveMemAddress(&raw mut base, size as usize, 0, std::ptr::null_mut(), 0))
        };
        self.check("aclrtReserveMemAddress", status)?;
        // SAFETY: the addresses were reserved above, and the size is that of the physical memory.
        let status = unsafe { call!(self, aclrtMapMem(base, size as usize, 0, physical, 0)) };
        if let Err(error) = self.check("aclrtMapMem", status) {
            // SAFETY: reserved above, and no memory is mapped there.
            unsafe { call!(self, aclrtReleaseMemAddress(base)) };
            return Err(error);
        }
        Ok(range_at(device, base, size))
    }

    /// Removes the allocation with this base from the table, for [`free_allocation`](Self::free_allocation).
    pub(crate) fn take_allocation(&self, range: DeviceRange) -> Result<Allocation> {
        self.allocations.remove(range.ptr).ok_or_else(|| {
            Error::InvalidRegion(format!("{} is not the base of an allocation of this backend", range.ptr))
        })
    }

    /// Frees an allocation.
    ///
    /// # Safety
    ///
    /// No work uses it any longer. The device's context is current.
    pub(crate) unsafe fn free_allocation(&self, allocation: Allocation) -> Result<()> {
        let base = allocation.range.ptr;
        match allocation.origin {
            Origin::Malloc => {
                self.destroy_keys_of(base)?;
                // SAFETY: of `allocate_pages`; as the caller promised.
                self.check("aclrtFree", unsafe { call!(self, aclrtFree(address(base))) })
            }
            Origin::Physical(handle) => {
                self.shareables.remove(base);
                self.forget_grants(base);
                // SAFETY: of `allocate_physical`; as the caller promised.
                unsafe { self.free_physical(allocation.range, handle) }
            }
        }
    }
}

impl AclLibrary {
    /// Unmaps and frees memory of `allocate_physical`.
    ///
    /// # Safety
    ///
    /// No work uses the range any longer.
    unsafe fn free_physical(&self, range: DeviceRange, handle: usize) -> Result<()> {
        // SAFETY: mapped by `map_physical`; as the caller promised.
        let unmapped = unsafe { call!(self, aclrtUnmapMem(address(range.ptr))) };
        let unmapped = self.check("aclrtUnmapMem", unmapped);
        // SAFETY: the handle is of `allocate_physical`, and is freed once.
        let freed = unsafe { call!(self, aclrtFreePhysical(aclrtDrvMemHandle(handle as *mut c_void))) };
        let freed = self.check("aclrtFreePhysical", freed);
        // SAFETY: reserved by `map_physical`; no memory is mapped there any longer.
        let released = unsafe { call!(self, aclrtReleaseMemAddress(address(range.ptr))) };
        unmapped.and(freed).and(self.check("aclrtReleaseMemAddress", released))
    }

    fn check_allocated(
        &self,
        call: &'static str,
        status: aclError,
        device: DeviceOrdinal,
        bytes: u64,
    ) -> Result<()> {
        if is_out_of_memory(status) {
            let detail = self.error(call, status, "").to_string();
            return Err(Error::OutOfMemory { device, bytes, detail });
        }
        self.check(call, status)
    }
}

fn size_of_pages(device: DeviceOrdinal, bytes: u64, page: u64) -> Result<u64> {
    if bytes == 0 {
        return Err(Error::InvalidRegion("an allocation has at least one byte".into()));
    }
    whole_pages(bytes, page).ok_or_else(|| Error::OutOfMemory {
        device,
        bytes,
        detail: "the size exceeds the address space".into(),
    })
}
