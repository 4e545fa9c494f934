//! The driver's list of processes that may open a handle.

use device_ipc_core::{DeviceOrdinal, Result};

use crate::bindings::*;
use crate::library::{AclLibrary, call};
use crate::objects::driver::Driver;

/// Maximum number of processes that one call lists: the limit of the driver (`svm_shmem_interprocess.c`).
pub(super) const MAX_LISTED_AT_ONCE: usize = 31;

impl AclLibrary {
    /// Returns the error of a call that lists processes, unless `status` is success.
    pub(super) fn check_listed(&self, call: &'static str, status: aclError) -> Result<()> {
        match status {
            ACL_SUCCESS => Ok(()),
            status => Err(self.error(
                call,
                status,
                "The driver lists only running processes, by the number that aclrtDeviceGetBareTgid returns in them; \
                 if its list does not work in these containers, set DEVICE_IPC_ASCEND_PID_VALIDATION=off in the \
                 exporter",
            )),
        }
    }
}

impl Driver {
    /// Returns the driver's id of this process.
    pub(crate) fn bare_tgid(&self, device: DeviceOrdinal) -> Result<i32> {
        let _current = self.enter(device)?;
        let mut pid = 0;
        // SAFETY: writes one number.
        let status = unsafe { call!(self, aclrtDeviceGetBareTgid(&raw mut pid)) };
        self.check("aclrtDeviceGetBareTgid", status)?;
        Ok(pid)
    }
}
