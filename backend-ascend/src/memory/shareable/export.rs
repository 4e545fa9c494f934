//! Exports of physical memory by shareable handle.

use std::collections::HashSet;

use device_ipc_core::backend::Exported;
use device_ipc_core::{DevicePtr, DeviceRange, Error, Result};

use super::table::Shareable;
use crate::bindings::*;
use crate::library::call;
use crate::memory::allocations::{Allocation, Origin};
use crate::memory::listing::MAX_LISTED_AT_ONCE;
use crate::memory::options::PidValidation;
use crate::memory::state::MemoryState;
use crate::memory::wire::shareable_bytes;

impl MemoryState {
    /// Exports physical memory, or counts one more export of it. The device's context must be current.
    pub(in crate::memory) fn export_shareable(&self, allocation: DeviceRange) -> Result<Vec<u8>> {
        let base = allocation.ptr;
        let mut shareables = self.shareables.lock();
        if let Some(known) = shareables.get_mut(&base)
            && (known.exports > 0 || !known.retained)
        {
            known.exports += 1;
            return Ok(shareable_bytes(known.number, allocation.len));
        }
        let (physical, retained) = match self.allocations.at(base) {
            Some(Allocation { origin: Origin::Physical(handle), .. }) => (handle, false),
            _ => match self.retain_physical(base) {
                Ok(handle) => (handle.0 as usize, true),
                Err(status) => return Err(self.error("aclrtMemRetainAllocationHandle", status, "")),
            },
        };
        match (self.create_shareable(physical), shareables.get_mut(&base)) {
            (Ok(number), _) => {
                let listed = HashSet::new();
                shareables.insert(base, Shareable { number, physical, retained, exports: 1, listed });
                Ok(shareable_bytes(number, allocation.len))
            }
            // The block was exported before, and is still the same one.
            (Err(_), Some(known)) if known.physical == physical => {
                known.exports = 1;
                Ok(shareable_bytes(known.number, allocation.len))
            }
            (Err(error), _) => {
                if retained {
                    self.release_physical(aclrtDrvMemHandle(physical as *mut _));
                }
                Err(error)
            }
        }
    }

    fn create_shareable(&self, physical: usize) -> Result<u64> {
        let flags = match self.validation {
            PidValidation::On => ACL_RT_VMM_EXPORT_FLAG_DEFAULT,
            PidValidation::Off => ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION,
        };
        let (handle, mut number) = (aclrtDrvMemHandle(physical as *mut _), 0u64);
        // SAFETY: writes one number; the owner of the memory keeps the handle. The type is reserved.
        let status = unsafe {
            call!(
                self,
                aclrtMemExportToShareableHandle(
                    handle,
                    aclrtMemHandleType::ACL_MEM_HANDLE_TYPE_NONE,
                    flags,
                    &raw mut number
                )
            )
        };
        match status {
            ACL_SUCCESS => Ok(number),
            status => Err(self.error("aclrtMemExportToShareableHandle", status, "")),
        }
    }

    /// Ends an export. The driver counts no exports of a shareable handle: it is valid until the physical memory is
    /// freed.
    pub(in crate::memory) fn unexport_shareable(&self, base: DevicePtr) {
        let mut shareables = self.shareables.lock();
        let Some(known) = shareables.get_mut(&base) else { return };
        known.exports = known.exports.saturating_sub(1);
        if known.exports == 0 && known.retained {
            self.release_physical(aclrtDrvMemHandle(known.physical as *mut _));
        }
    }

    /// Lists processes for a shareable handle. The device's context must be current.
    pub(in crate::memory) fn list_for_shareable(
        &self,
        exported: &Exported,
        mut pids: Vec<i32>,
    ) -> Result<()> {
        let mut shareables = self.shareables.lock();
        let Some(known) = shareables.get_mut(&exported.extent.allocation.ptr) else {
            return Err(Error::InvalidRegion("the shareable handle was already unexported".into()));
        };
        pids.retain(|pid| !known.listed.contains(pid));
        for chunk in pids.chunks_mut(MAX_LISTED_AT_ONCE) {
            // SAFETY: reads the stated number of ids; the handle was created here.
            let status = unsafe {
                call!(self, aclrtMemSetPidToShareableHandle(known.number, chunk.as_mut_ptr(), chunk.len()))
            };
            self.check_listed("aclrtMemSetPidToShareableHandle", status)?;
            known.listed.extend(chunk.iter());
        }
        Ok(())
    }
}
