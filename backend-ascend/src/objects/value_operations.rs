//! Stream memory operations: streams that write a word, and wait for its value ("Stream Memory Operation").

use std::ffi::c_void;

use device_ipc_core::{DevicePtr, Result};

use crate::bindings::*;
use crate::library::{AclLibrary, call};

impl AclLibrary {
    /// Returns whether the library has the functions for timelines.
    pub(crate) fn has_value_operations(&self) -> bool {
        let acl = &self.acl;
        acl.aclrtValueWrite.is_ok()
            && acl.aclrtValueWait.is_ok()
            && acl.aclrtHostRegister.is_ok()
            && acl.aclrtHostUnregister.is_ok()
    }

    /// Submits a write of `value` to `word`.
    ///
    /// # Safety
    ///
    /// The word stays registered until the stream has executed the write, and the stream lives.
    pub(crate) unsafe fn write_value(&self, word: DevicePtr, value: u64, stream: aclrtStream) -> Result<()> {
        // SAFETY: as the caller promised.
        let status = unsafe { call!(self, aclrtValueWrite(address(word), value, 0, stream)) };
        self.check("aclrtValueWrite", status)
    }

    /// Submits a wait until `word` is at least `value`.
    ///
    /// # Safety
    ///
    /// As for [`write_value`](Self::write_value).
    pub(crate) unsafe fn wait_value(&self, word: DevicePtr, value: u64, stream: aclrtStream) -> Result<()> {
        // SAFETY: as the caller promised.
        let status =
            unsafe { call!(self, aclrtValueWait(address(word), value, ACL_STREAM_WAIT_VALUE_GEQ, stream)) };
        self.check("aclrtValueWait", status)
    }
}

fn address(word: DevicePtr) -> *mut c_void {
    word.get() as usize as *mut c_void
}
