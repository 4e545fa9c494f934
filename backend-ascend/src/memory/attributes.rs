//! The runtime's knowledge about addresses ("Unified Addressing").

use std::ffi::c_void;

use device_ipc_core::{DevicePtr, DeviceRange, Error, Result};

use super::allocations::range_at;
use crate::bindings::*;
use crate::library::status::MISSING;
use crate::library::{AclLibrary, call};

impl AclLibrary {
    /// Returns the size of the pages of device memory, or an error that describes the memory at this address.
    pub(super) fn page_of(&self, range: DeviceRange) -> Result<u64> {
        let ptr = range.ptr;
        let Some(attributes) = self.attributes(ptr) else {
            return Err(Error::NotDeviceMemory {
                ptr,
                why: "ACL does not know the address in this process: it is ordinary host memory, was freed, or is an \
                      address of another process"
                    .into(),
            });
        };
        let why = match attributes.location.type_ {
            aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_DEVICE => {
                let home = attributes.location.id;
                if home != range.device.get() {
                    return Err(Error::InvalidRegion(format!(
                        "{ptr} is memory of device {home}, but device {} was stated",
                        range.device
                    )));
                }
                return Ok(u64::from(attributes.pageSize).max(1));
            }
            aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_HOST
            | aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_HOST_NUMA => "it is page-locked host memory".to_owned(),
            aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_UNREGISTERED => {
                "ACL did not allocate it in this process: it is ordinary host memory, was freed, or is an address of \
                 another process"
                    .to_owned()
            }
            other => format!("it is memory of ACL's location type {}, which cannot be shared", other.0),
        };
        Err(Error::NotDeviceMemory { ptr, why })
    }

    /// Returns the attributes of an address, or `None` for an unknown one, for which ACL returns an error.
    pub(super) fn attributes(&self, ptr: DevicePtr) -> Option<aclrtPtrAttributes> {
        let mut attributes = aclrtPtrAttributes {
            location: aclrtMemLocation {
                id: 0,
                type_: aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_UNREGISTERED,
            },
            pageSize: 0,
            rsv: [0; 4],
        };
        // SAFETY: writes one structure; the address is not dereferenced.
        let status = unsafe { call!(self, aclrtPointerGetAttributes(address(ptr), &raw mut attributes)) };
        (status == ACL_SUCCESS).then_some(attributes)
    }

    /// Returns the whole allocation or mapping that `inside` begins in, or `None` if ACL has no query for it.
    pub(super) fn address_range(&self, inside: DeviceRange) -> Result<Option<DeviceRange>> {
        let (mut base, mut size) = (std::ptr::null_mut(), 0);
        // SAFETY: writes an address and a size; an address outside allocations is an error.
        let status = unsafe {
            call!(self, aclrtMemGetAddressRange(address(inside.ptr), &raw mut base, &raw mut size))
        };
        match status {
            ACL_SUCCESS => Ok(Some(range_at(inside.device, base, size as u64))),
            // Absent before CANN 9.0; with a driver that is older than the runtime it exists and returns 207000.
            MISSING | ACL_ERROR_RT_FEATURE_NOT_SUPPORT => Ok(None),
            status => Err(Error::NotDeviceMemory {
                ptr: inside.ptr,
                why: format!(
                    "no allocation of this process contains the address ({})",
                    self.error("aclrtMemGetAddressRange", status, "")
                ),
            }),
        }
    }
}

/// Returns the address as an argument of a call.
pub(crate) fn address(ptr: DevicePtr) -> *mut c_void {
    ptr.get() as usize as *mut c_void
}
