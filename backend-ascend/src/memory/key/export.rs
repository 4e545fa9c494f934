//! Exports of memory by key.

use device_ipc_core::backend::Exported;
use device_ipc_core::{DevicePtr, DeviceRange, Error, Result};

use super::table;
use crate::bindings::*;
use crate::library::status::{NEEDED, is_unsupported};
use crate::library::{AclLibrary, call};
use crate::memory::attributes::address;
use crate::memory::listing::MAX_LISTED_AT_ONCE;
use crate::memory::options::PidValidation;
use crate::memory::state::MemoryState;
use crate::memory::wire::{KEY_BYTES, Key};

impl MemoryState {
    /// Creates a key of an allocation. The device's context must be current.
    pub(in crate::memory) fn export_key(&self, allocation: DeviceRange) -> Result<Vec<u8>> {
        // Locked during the call: the table has the keys of a block in the order of the driver's list.
        let mut table = table::lock();
        let mut bytes = [0u8; KEY_BYTES];
        let flags = match self.validation {
            PidValidation::On => ACL_RT_IPC_MEM_EXPORT_FLAG_DEFAULT,
            PidValidation::Off => ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION,
        };
        // SAFETY: writes a key of the stated number of bytes; an address that cannot be shared is an error.
        let status = unsafe {
            call!(
                self,
                aclrtIpcMemGetExportKey(
                    address(allocation.ptr),
                    allocation.len as usize,
                    bytes.as_mut_ptr().cast(),
                    KEY_BYTES,
                    flags
                )
            )
        };
        if status != ACL_SUCCESS {
            return Err(self.export_error("aclrtIpcMemGetExportKey", status));
        }
        let Some(key) = Key::new(bytes) else {
            return Err(self.error(
                "aclrtIpcMemGetExportKey",
                ACL_ERROR_INTERNAL_ERROR,
                "The key has no final NUL",
            ));
        };
        table.add(allocation.ptr, key);
        tracing::debug!(target: crate::LOG, device = %allocation.device, bytes = allocation.len, "created an IPC key");
        Ok(key.with_size(allocation.len))
    }

    fn export_error(&self, call: &'static str, status: aclError) -> Error {
        let unvalidated = self.validation == PidValidation::Off;
        let hint = match status {
            status if is_unsupported(status) && unvalidated => {
                "This driver requires its list of importers: update the Ascend HDK to 25.3.RC1 or newer, or set \
                 DEVICE_IPC_ASCEND_PID_VALIDATION=on"
                    .to_owned()
            }
            status if is_unsupported(status) => {
                format!(
                    "This chip or driver cannot share memory: it requires {NEEDED}, on 910, A2, A3, 310P or 950"
                )
            }
            ACL_ERROR_RT_PARAM_INVALID | ACL_ERROR_RT_ADDR_UNALIGNED | ACL_ERROR_RT_DRV_INTERNAL_ERROR => {
                "The memory must be a whole allocation of aclrtMalloc: not mapped with aclrtMapMem (in PyTorch set \
                 PYTORCH_NPU_ALLOC_CONF=expandable_segments:False), not opened from another process"
                    .to_owned()
            }
            _ => String::new(),
        };
        self.error(call, status, &hint)
    }

    /// Ends the use of a key. The device's context must be current.
    pub(in crate::memory) fn unexport_key(&self, exported: &Exported) -> Result<()> {
        let key = key_of(exported)?;
        let mut table = table::lock();
        match table.release(exported.extent.allocation.ptr, &key) {
            None => Err(Error::InvalidRegion("the key was already unexported".into())),
            Some(keys) => destroy(self, keys),
        }
    }

    /// Destroys the remaining keys of memory that is freed. The device's context must be current.
    pub(in crate::memory) fn destroy_keys_of(&self, base: DevicePtr) -> Result<()> {
        let mut table = table::lock();
        destroy(self, table.take(base))
    }

    /// Lists processes for a key. The device's context must be current.
    pub(in crate::memory) fn list_for_key(&self, exported: &Exported, mut pids: Vec<i32>) -> Result<()> {
        let key = key_of(exported)?;
        let mut table = table::lock();
        let Some(listed) = table.listed(exported.extent.allocation.ptr, &key) else {
            return Err(Error::InvalidRegion("the key was already unexported".into()));
        };
        pids.retain(|pid| !listed.contains(pid));
        for chunk in pids.chunks_mut(MAX_LISTED_AT_ONCE) {
            // SAFETY: reads the stated number of ids; the key ends with a NUL, and was created here.
            let status = unsafe {
                call!(self, aclrtIpcMemSetImportPid(key.as_ptr(), chunk.as_mut_ptr(), chunk.len()))
            };
            self.check_listed("aclrtIpcMemSetImportPid", status)?;
            listed.extend(chunk.iter());
        }
        Ok(())
    }
}

/// Destroys all keys of a block in the order of their creation, also after a failure. The table is locked.
fn destroy(library: &AclLibrary, keys: Vec<Key>) -> Result<()> {
    let mut outcome = Ok(());
    for key in keys {
        // SAFETY: the key ends with a NUL, and was created here.
        let status = unsafe { call!(library, aclrtIpcMemClose(key.as_ptr())) };
        tracing::debug!(target: crate::LOG, status, "destroyed an IPC key");
        outcome = outcome.and(library.check("aclrtIpcMemClose", status));
    }
    outcome
}

fn key_of(exported: &Exported) -> Result<Key> {
    Key::parse(exported.bytes.as_slice(), exported.extent.allocation.len).map(|(key, _)| key)
}
