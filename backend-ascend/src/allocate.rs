//! Memory of our own: in whole pages, so that it can be shared and shares none.
//!
//! "Device Memory Malloc and Free" of the ACL manual for what travels by key; "Virtual Memory Management" for what travels
//! by shareable handle: physical memory, and addresses that it is mapped at.

use std::ffi::c_void;

use device_ipc_core::{DeviceOrdinal, DeviceRange, Error, Result};

use crate::allocations::{Allocation, Origin, range_at, whole_pages};
use crate::bindings::*;
use crate::driver::{Driver, call};
use crate::extent::address;
use crate::status::is_out_of_memory;

/// A huge page. Memory is allocated in whole ones: the driver shares whole pages from their begin, and blocks of up to 1 MiB
/// lie in small ones.
const HUGE_PAGE: u64 = 2 << 20;

impl Driver {
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
        // aclrtMalloc would add 32 bytes on A2 and A3, and with them a page.
        // SAFETY: writes one address.
        let status = unsafe { call!(self, aclrtMallocAlign32(&raw mut base, size as usize, policy)) };
        self.allocated("aclrtMallocAlign32", status, device, bytes)?;
        let range = range_at(device, base, size);
        self.allocations.insert(Allocation { range, origin: Origin::Malloc });
        Ok(DeviceRange { len: bytes, ..range })
    }

    pub(crate) fn allocate_physical(&self, device: DeviceOrdinal, bytes: u64) -> Result<DeviceRange> {
        let number = self.device(device)?.info.ordinal.get();
        let needs_peer_pages = self.device(device)?.chip.needs_peer_pages();
        let _current = self.enter(device)?;
        let memory = if needs_peer_pages {
            aclrtMemAttr::ACL_HBM_MEM_P2P_HUGE
        } else {
            aclrtMemAttr::ACL_HBM_MEM_HUGE
        };
        let mut properties = aclrtPhysicalMemProp {
            handleType: aclrtMemHandleType::ACL_MEM_HANDLE_TYPE_NONE,
            allocationType: aclrtMemAllocationType::ACL_MEM_ALLOCATION_TYPE_PINNED,
            memAttr: memory,
            location: aclrtMemLocation {
                id: number,
                type_: aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_DEVICE,
            },
            reserve: 0,
        };
        let size = size_of_pages(device, bytes, self.granularity(&mut properties))?;
        let mut physical = aclrtDrvMemHandle(std::ptr::null_mut());
        // SAFETY: writes one handle; reads the properties.
        let status = unsafe {
            call!(self, aclrtMallocPhysical(&raw mut physical, size as usize, &raw const properties, 0))
        };
        self.allocated("aclrtMallocPhysical", status, device, bytes)?;
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

    /// In what sizes physical memory comes; huge pages where the runtime does not say.
    fn granularity(&self, properties: &mut aclrtPhysicalMemProp) -> u64 {
        let option = aclrtMemGranularityOptions::ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut granularity = 0;
        // SAFETY: writes one size.
        let status = unsafe {
            call!(self, aclrtMemGetAllocationGranularity(&raw mut *properties, option, &raw mut granularity))
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
        // SAFETY: writes one address; alignment, wish and flags are reserved.
        let status = unsafe {
            call!(self, aclrtReserveMemAddress(&raw mut base, size as usize, 0, std::ptr::null_mut(), 0))
        };
        self.check("aclrtReserveMemAddress", status)?;
        // SAFETY: the addresses were reserved above, and the size is the whole of the physical memory's.
        let status = unsafe { call!(self, aclrtMapMem(base, size as usize, 0, physical, 0)) };
        if let Err(error) = self.check("aclrtMapMem", status) {
            // SAFETY: reserved above, and nothing is mapped there.
            unsafe { call!(self, aclrtReleaseMemAddress(base)) };
            return Err(error);
        }
        Ok(range_at(device, base, size))
    }

    /// Frees what was allocated here.
    ///
    /// # Safety
    ///
    /// Nobody uses it any longer. The device's context is current.
    pub(crate) unsafe fn free(&self, allocation: Allocation) -> Result<()> {
        let base = allocation.range.ptr;
        match allocation.origin {
            Origin::Malloc => {
                self.destroy_keys_of(base)?;
                // SAFETY: of `allocate_pages`; as the caller promised.
                self.check("aclrtFree", unsafe { call!(self, aclrtFree(address(base))) })
            }
            Origin::Physical(handle) => {
                self.exports.forget(base);
                self.peers.forget(base);
                // SAFETY: of `allocate_physical`; as the caller promised.
                unsafe { self.free_physical(allocation.range, handle) }
            }
        }
    }

    /// Unmaps and gives back what `allocate_physical` made.
    ///
    /// # Safety
    ///
    /// Nobody uses the range any longer.
    unsafe fn free_physical(&self, range: DeviceRange, handle: usize) -> Result<()> {
        // SAFETY: mapped by `map_physical`; as the caller promised.
        let unmapped = unsafe { call!(self, aclrtUnmapMem(address(range.ptr))) };
        let unmapped = self.check("aclrtUnmapMem", unmapped);
        // SAFETY: the handle is of `allocate_physical`, given back once.
        let freed = unsafe { call!(self, aclrtFreePhysical(aclrtDrvMemHandle(handle as *mut c_void))) };
        let freed = self.check("aclrtFreePhysical", freed);
        // SAFETY: reserved by `map_physical`; nothing is mapped there any longer.
        let released = unsafe { call!(self, aclrtReleaseMemAddress(address(range.ptr))) };
        unmapped.and(freed).and(self.check("aclrtReleaseMemAddress", released))
    }

    fn allocated(
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
        detail: "they are more than there are addresses".into(),
    })
}
