//! Access of further devices to memory of this process.

use std::sync::PoisonError;

use device_ipc_core::{DeviceOrdinal, DevicePtr, DeviceRange, Result};

use super::allocations::{Allocation, Origin};
use super::attributes::address;
use super::state::MemoryState;
use crate::bindings::*;
use crate::library::call;

impl MemoryState {
    /// Gives work on `device` access to `range`, memory of this process.
    pub(crate) fn grant_access(&self, range: DeviceRange, device: DeviceOrdinal) -> Result<()> {
        if range.device == device {
            return Ok(());
        }
        self.enable_peers(device, range.device)?;
        match self.allocations.at(range.ptr) {
            Some(Allocation { range, origin: Origin::Physical(_) }) => self.set_access(range, device),
            _ => Ok(()),
        }
    }

    /// Gives a device access to a mapping of physical memory.
    ///
    /// Such a mapping is accessible to its home device only until `aclrtMemSetAccess` ("Virtual Memory Management")
    /// grants others access, if the runtime has that function. The driver grants access to memory of this process
    /// alone: imported memory has one import per device. The call takes the device's logic id, while
    /// `aclrtMallocPhysical` takes the user id.
    fn set_access(&self, mapping: DeviceRange, device: DeviceOrdinal) -> Result<()> {
        if self.acl.aclrtMemSetAccess.is_err() {
            return Ok(());
        }
        let mut granted = self.granted.lock().unwrap_or_else(PoisonError::into_inner);
        if granted.contains(&(mapping.ptr, device)) {
            return Ok(());
        }
        let user = self.device(device)?.number();
        let mut logic = user;
        // SAFETY: writes one number.
        let status = unsafe { call!(self, aclrtGetLogicDevIdByUserDevId(user, &raw mut logic)) };
        self.check("aclrtGetLogicDevIdByUserDevId", status)?;
        let mut access = aclrtMemAccessDesc {
            flags: aclrtMemAccessFlags::ACL_RT_MEM_ACCESS_FLAGS_READWRITE,
            location: aclrtMemLocation {
                id: logic.cast_unsigned(),
                type_: aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_DEVICE,
            },
            rsv: [0; 12],
        };
        let _current = self.enter(mapping.device)?;
        // SAFETY: the mapping is whole, as `allocate_physical` created it; reads one description.
        let status = unsafe {
            call!(self, aclrtMemSetAccess(address(mapping.ptr), mapping.len as usize, &raw mut access, 1))
        };
        self.check("aclrtMemSetAccess", status)?;
        granted.insert((mapping.ptr, device));
        Ok(())
    }

    /// Removes the grants for a mapping that is freed.
    pub(super) fn forget_grants(&self, base: DevicePtr) {
        self.granted.lock().unwrap_or_else(PoisonError::into_inner).retain(|(of, _)| *of != base);
    }
}
