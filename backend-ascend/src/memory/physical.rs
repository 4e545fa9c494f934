//! References to physical memory.

use device_ipc_core::DevicePtr;

use super::allocations::{Allocation, Origin};
use super::attributes::address;
use super::state::MemoryState;
use crate::bindings::*;
use crate::library::{AclLibrary, call};

impl MemoryState {
    /// Returns whether physical memory is mapped at this base.
    pub(super) fn is_physical(&self, base: DevicePtr) -> bool {
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
}

impl AclLibrary {
    /// Returns a new reference to the physical memory that is mapped at a base, or the status of the failure.
    pub(super) fn retain_physical(&self, base: DevicePtr) -> Result<aclrtDrvMemHandle, aclError> {
        let mut handle = aclrtDrvMemHandle(std::ptr::null_mut());
        // SAFETY: writes one handle; an address without mapped memory is an error.
        let status = unsafe { call!(self, aclrtMemRetainAllocationHandle(address(base), &raw mut handle)) };
        if status == ACL_SUCCESS && !handle.0.is_null() { Ok(handle) } else { Err(status) }
    }

    /// Releases a reference to physical memory.
    pub(super) fn release_physical(&self, handle: aclrtDrvMemHandle) {
        // SAFETY: this process owns the reference; mapped memory stays until it is unmapped.
        let status = unsafe { call!(self, aclrtFreePhysical(handle)) };
        if status != ACL_SUCCESS {
            tracing::warn!(target: crate::LOG, status, "aclrtFreePhysical failed");
        }
    }
}
