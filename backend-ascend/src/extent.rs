//! Which allocation an address lies in, and whether it can be shared.
//!
//! `aclrtPointerGetAttributes` tells where memory lives and in which pages ("Unified Addressing"); where an allocation
//! begins is told by `aclrtMemGetAddressRange`, which came with CANN 9.0, by the table of what was allocated here,
//! or by the caller. `aclrtIpcMemGetExportKey` takes an allocation's base only, which begins at a page's begin:
//! "IPC shared memory: page alignment" in the FAQ of the ACL manual.

use std::ffi::c_void;

use device_ipc_core::{DevicePtr, DeviceRange, Error, Extent, Result};

use crate::allocations::{Allocation, Origin, range_at};
use crate::bindings::*;
use crate::driver::{Driver, call};
use crate::imports;
use crate::status::MISSING;

impl Driver {
    /// The allocations that `range` lies in, if handles can be made of them: one, or several neighbours of physical
    /// memory, each of which is mapped by itself.
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
                return Err(Error::InvalidRegion(format!(
                    "{} bytes from {} on leave their allocation of {} bytes at {}",
                    range.len, range.ptr, reached.len, reached.ptr
                )));
            };
            extents.push(Extent { allocation: next, generation: None });
            reached = next;
        }
        Ok(extents)
    }

    /// The block of physical memory that begins exactly where `range` does.
    fn next_block(&self, range: DeviceRange) -> Option<DeviceRange> {
        let block = self.allocation_at(range, None).ok()?;
        (block.ptr == range.ptr && self.is_physical(block.ptr)).then_some(block)
    }

    /// The allocation that `range` begins in. The device's context is current.
    fn allocation_at(&self, range: DeviceRange, stated: Option<DeviceRange>) -> Result<DeviceRange> {
        let ptr = range.ptr;
        if imports::contains(ptr) {
            return Err(Error::SharedOn { ptr });
        }
        let page = self.page_of(range)?;
        let known = match self.address_range(range)? {
            Some(told) => Some(told),
            None => self.allocations.at(ptr).map(|allocation| allocation.range),
        };
        let allocation = match (known, stated) {
            (Some(known), Some(stated)) if stated.ptr != known.ptr || stated.len > known.len => {
                return Err(Error::InvalidRegion(format!(
                    "the allocation was stated to be {} bytes at {}, and it is {} bytes at {}",
                    stated.len, stated.ptr, known.len, known.ptr
                )));
            }
            (Some(known), _) => known,
            (None, Some(stated)) => self.believed(stated)?,
            (None, None) => {
                return Err(Error::InvalidRegion(format!(
                    "{} cannot tell where the allocation of {ptr} begins (CANN 9.0 can), and only whole allocations \
                     are shared: state it, with Region::new(..).with_allocation(range)",
                    self.version()
                )));
            }
        };
        if !contains_begin(allocation, range) {
            return Err(Error::InvalidRegion(format!(
                "{} bytes from {ptr} on leave their allocation of {} bytes at {}",
                range.len, allocation.len, allocation.ptr
            )));
        }
        if !allocation.ptr.get().is_multiple_of(page) {
            return Err(Error::NotShareable {
                ptr,
                kind: format!("memory whose allocation begins at {}, inside a page of {page} bytes", allocation.ptr),
                remedy: "the driver shares whole pages from their begin: allocate at least 2 MiB, a multiple of \
                         2 MiB, with aclrtMalloc and ACL_MEM_MALLOC_HUGE_FIRST; a caching allocator's small blocks \
                         (PyTorch's below 1 MiB) are shared by their whole segment, or copied (Ipc::share_copy)"
                    .into(),
            });
        }
        Ok(allocation)
    }

    /// The allocation as its owner states it, where all that can be checked is that both its ends are device memory.
    fn believed(&self, stated: DeviceRange) -> Result<DeviceRange> {
        self.page_of(stated)?;
        let last = stated.len.checked_sub(1).and_then(|last| stated.ptr.checked_add(last));
        match last {
            Some(last) => self.page_of(DeviceRange { ptr: last, len: 1, ..stated }).map(|_| stated),
            None => Err(Error::InvalidRegion(format!(
                "the allocation was stated to be {} bytes at {}, which is no range",
                stated.len, stated.ptr
            ))),
        }
    }

    /// The size of the pages of device memory, or what the address is instead.
    fn page_of(&self, range: DeviceRange) -> Result<u64> {
        let ptr = range.ptr;
        let Some(attributes) = self.attributes(ptr) else {
            return Err(Error::NotDeviceMemory {
                ptr,
                why: "ACL does not know the address in this process: it is ordinary host memory, was freed, or came \
                      from another process as a number"
                    .into(),
            });
        };
        let why = match attributes.location.type_ {
            aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_DEVICE => {
                let home = attributes.location.id;
                if home != range.device.get() {
                    return Err(Error::InvalidRegion(format!(
                        "{ptr} is memory of device {home}, and device {} was stated",
                        range.device
                    )));
                }
                return Ok(u64::from(attributes.pageSize).max(1));
            }
            aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_HOST
            | aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_HOST_NUMA => "it is page-locked host memory".to_owned(),
            aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_UNREGISTERED => {
                "ACL has not allocated it in this process: it is ordinary host memory, was freed, or came from another \
                 process as a number"
                    .to_owned()
            }
            other => format!("it is memory of kind {} of ACL's, which cannot be shared", other.0),
        };
        Err(Error::NotDeviceMemory { ptr, why })
    }

    /// What ACL says of an address; nothing for what it does not know, which it calls an error.
    pub(crate) fn attributes(&self, ptr: DevicePtr) -> Option<aclrtPtrAttributes> {
        let mut attributes = aclrtPtrAttributes {
            location: aclrtMemLocation {
                id: 0,
                type_: aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_UNREGISTERED,
            },
            pageSize: 0,
            rsv: [0; 4],
        };
        // SAFETY: writes one structure; the address is not followed.
        let status = unsafe { call!(self, aclrtPointerGetAttributes(address(ptr), &raw mut attributes)) };
        (status == ACL_SUCCESS).then_some(attributes)
    }

    /// The whole allocation or mapping that `inside` begins in, where ACL can tell.
    pub(crate) fn address_range(&self, inside: DeviceRange) -> Result<Option<DeviceRange>> {
        let (mut base, mut size) = (std::ptr::null_mut(), 0);
        // SAFETY: writes an address and a size; an address that is no allocation's is an error.
        let status = unsafe {
            call!(self, aclrtMemGetAddressRange(address(inside.ptr), &raw mut base, &raw mut size))
        };
        match status {
            ACL_SUCCESS => Ok(Some(range_at(inside.device, base, size as u64))),
            // Absent before CANN 9.0; with a driver that is older than the runtime it is there and says 207000.
            MISSING | ACL_ERROR_RT_FEATURE_NOT_SUPPORT => Ok(None),
            status => Err(Error::NotDeviceMemory {
                ptr: inside.ptr,
                why: format!(
                    "no allocation of this process holds the address ({})",
                    self.error("aclrtMemGetAddressRange", status, "")
                ),
            }),
        }
    }

    /// Is a handle of physical memory mapped at this base?
    pub(crate) fn is_physical(&self, base: DevicePtr) -> bool {
        match self.allocations.at(base) {
            Some(Allocation { origin: Origin::Physical(_), .. }) => true,
            Some(Allocation { origin: Origin::Malloc, .. }) => false,
            None => match self.retain_physical(base) {
                Ok(handle) => {
                    self.release_physical(handle);
                    true
                }
                Err(_) => false,
            },
        }
    }

    /// A reference of our own to the physical memory that is mapped at a base, or the status of the refusal.
    pub(crate) fn retain_physical(&self, base: DevicePtr) -> Result<aclrtDrvMemHandle, aclError> {
        let mut handle = aclrtDrvMemHandle(std::ptr::null_mut());
        // SAFETY: writes one handle; an address at which nothing is mapped is an error.
        let status = unsafe { call!(self, aclrtMemRetainAllocationHandle(address(base), &raw mut handle)) };
        if status == ACL_SUCCESS && !handle.0.is_null() { Ok(handle) } else { Err(status) }
    }

    /// Gives such a reference back.
    pub(crate) fn release_physical(&self, handle: aclrtDrvMemHandle) {
        // SAFETY: the reference is ours; memory that is mapped stays until it is unmapped.
        let status = unsafe { call!(self, aclrtFreePhysical(handle)) };
        if status != ACL_SUCCESS {
            tracing::warn!(status, "aclrtFreePhysical failed");
        }
    }
}

/// The address as a call takes it.
pub(crate) fn address(ptr: DevicePtr) -> *mut c_void {
    ptr.get() as usize as *mut c_void
}

fn covers(allocation: DeviceRange, range: DeviceRange) -> bool {
    matches!((allocation.end(), range.end()), (Some(end), Some(range_end)) if range_end <= end)
}

fn contains_begin(allocation: DeviceRange, range: DeviceRange) -> bool {
    allocation.ptr <= range.ptr && allocation.end().is_some_and(|end| range.ptr < end)
}
