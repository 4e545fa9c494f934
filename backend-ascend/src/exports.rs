//! Handles of this process's memory, and who may open them.
//!
//! By key: "IPC Memory Sharing" (`aclrtIpcMemGetExportKey`, `aclrtIpcMemSetImportPid`, `aclrtIpcMemClose`) of the ACL
//! manual. By shareable handle: "Virtual Memory Management" (`aclrtMemExportToShareableHandle`,
//! `aclrtMemSetPidToShareableHandle`). Either way the driver admits the processes that the exporter has listed, by the
//! numbers that `aclrtDeviceGetBareTgid` gives them, which are those of the host also in a container.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use device_ipc_core::{
    DeviceOrdinal, DevicePtr, DeviceRange, Error, Exported, Extent, HandleBytes, HandleKind, Result,
};

use crate::NAME;
use crate::allocations::{Allocation, Origin};
use crate::bindings::*;
use crate::driver::{Driver, call};
use crate::extent::address;
use crate::keys;
use crate::kinds::{KEY, SHAREABLE};
use crate::options::PidValidation;
use crate::status::{NEEDED, is_unsupported};
use crate::wire::{KEY_BYTES, Key, parse_pids, shareable_bytes};

/// How many processes a call can list: the driver takes at most so many (`svm_shmem_interprocess.c`).
const LISTED_AT_ONCE: usize = 31;

/// What this process has exported, and to whom.
#[derive(Default)]
pub(crate) struct Exports {
    shareables: Mutex<HashMap<DevicePtr, Shareable>>,
}

/// The one shareable handle of a block of physical memory: the driver makes no second, and takes none back before the block
/// is gone.
struct Shareable {
    number: u64,
    /// The physical handle.
    physical: usize,
    /// Is a reference to it held, because it is not of our own allocation?
    retained: bool,
    exports: usize,
    listed: HashSet<i32>,
}

impl Exports {
    fn shareables(&self) -> MutexGuard<'_, HashMap<DevicePtr, Shareable>> {
        self.shareables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the handle of a block that is freed.
    pub(crate) fn forget(&self, base: DevicePtr) {
        self.shareables().remove(&base);
    }
}

impl Driver {
    /// Makes a handle of an allocation: of the stated kind, or of the one that fits.
    pub(crate) fn export(&self, extent: &Extent, kind: Option<HandleKind>) -> Result<Exported> {
        let base = extent.allocation.ptr;
        let _current = self.enter(extent.allocation.device)?;
        let physical = self.is_physical(base);
        let bytes = match kind.unwrap_or(if physical { SHAREABLE } else { KEY }) {
            KEY if physical => {
                return Err(not_shareable(
                    base,
                    "physical memory mapped with aclrtMapMem",
                    "it has no key; share it by its shareable handle (kind 2), or in PyTorch set \
                     PYTORCH_NPU_ALLOC_CONF=expandable_segments:False",
                ));
            }
            KEY => self.export_key(extent.allocation)?,
            SHAREABLE if physical => self.export_shareable(extent.allocation)?,
            SHAREABLE => {
                return Err(not_shareable(
                    base,
                    "memory of aclrtMalloc",
                    "it has no shareable handle; share it by its key (kind 1), or allocate it for kind 2 \
                     (DeviceMemory::allocate_as)",
                ));
            }
            other => {
                return Err(Error::Unsupported {
                    backend: NAME,
                    what: format!("make a handle of kind {}", other.0),
                    why: format!("it knows kinds {} (key) and {} (shareable handle)", KEY.0, SHAREABLE.0),
                });
            }
        };
        let kind = if physical { SHAREABLE } else { KEY };
        Ok(Exported { extent: *extent, kind, bytes: HandleBytes::new(bytes), fds: Vec::new() })
    }

    fn export_key(&self, allocation: DeviceRange) -> Result<Vec<u8>> {
        // Held over the call: the table has the keys of a block in the order of the driver's list.
        let mut table = keys::table();
        let mut bytes = [0u8; KEY_BYTES];
        let flags = match self.validation {
            PidValidation::On => ACL_RT_IPC_MEM_EXPORT_FLAG_DEFAULT,
            PidValidation::Off => ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION,
        };
        // SAFETY: writes a key into as many bytes as are stated; an address that cannot be shared is an error.
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
            return Err(self.export_refused("aclrtIpcMemGetExportKey", status));
        }
        let Some(key) = Key::new(bytes) else {
            return Err(self.error(
                "aclrtIpcMemGetExportKey",
                ACL_ERROR_INTERNAL_ERROR,
                "The key has no end",
            ));
        };
        table.add(allocation.ptr, key);
        tracing::debug!(device = %allocation.device, bytes = allocation.len, "made an IPC key");
        Ok(key.with_size(allocation.len))
    }

    fn export_refused(&self, call: &'static str, status: aclError) -> Error {
        let unvalidated = self.validation == PidValidation::Off;
        let hint = match status {
            status if is_unsupported(status) && unvalidated => {
                "This driver cannot do without its list of importers: update the Ascend HDK to 25.3.RC1 or newer, or \
                 set DEVICE_IPC_ASCEND_PID_VALIDATION=on"
                    .to_owned()
            }
            status if is_unsupported(status) => {
                format!("This chip or driver does not share memory: {NEEDED}, on 910, A2, A3, 310P or 950")
            }
            ACL_ERROR_RT_PARAM_INVALID | ACL_ERROR_RT_ADDR_UNALIGNED | ACL_ERROR_RT_DRV_INTERNAL_ERROR => {
                "The memory has to be of aclrtMalloc, whole, from its base on: not mapped with aclrtMapMem (in PyTorch \
                 set PYTORCH_NPU_ALLOC_CONF=expandable_segments:False), not opened from another process"
                    .to_owned()
            }
            _ => String::new(),
        };
        self.error(call, status, &hint)
    }

    fn export_shareable(&self, allocation: DeviceRange) -> Result<Vec<u8>> {
        let base = allocation.ptr;
        let mut shareables = self.exports.shareables();
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
        match (self.shareable_of(physical), shareables.get_mut(&base)) {
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

    fn shareable_of(&self, physical: usize) -> Result<u64> {
        let flags = match self.validation {
            PidValidation::On => ACL_RT_VMM_EXPORT_FLAG_DEFAULT,
            PidValidation::Off => ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION,
        };
        let (handle, mut number) = (aclrtDrvMemHandle(physical as *mut _), 0u64);
        // SAFETY: writes one number; the handle is kept by whoever keeps the memory allocated. The type is reserved.
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

    /// Takes a handle back. Importers have closed: the close of a key in its exporter ends it for all of them.
    pub(crate) fn unexport(&self, exported: &Exported) -> Result<()> {
        let range = exported.extent.allocation;
        let _current = self.enter(range.device)?;
        if exported.kind == SHAREABLE {
            self.unexport_shareable(range.ptr);
            return Ok(());
        }
        let key = key_of(exported)?;
        let mut table = keys::table();
        match table.release(range.ptr, &key) {
            None => Err(Error::InvalidRegion("the key was taken back before".into())),
            Some(keys) => self.destroy_keys(keys),
        }
    }

    /// Destroys the keys of memory that is freed, if any are left. The device's context is current.
    pub(crate) fn destroy_keys_of(&self, base: DevicePtr) -> Result<()> {
        let mut table = keys::table();
        self.destroy_keys(table.take(base))
    }

    /// Destroys all keys of a block, in the order of their making, whatever becomes of one of them. The table is locked.
    fn destroy_keys(&self, keys: Vec<Key>) -> Result<()> {
        let mut outcome = Ok(());
        for key in keys {
            // SAFETY: the key ends with a NUL, and was made here.
            let status = unsafe { call!(self, aclrtIpcMemClose(key.as_ptr())) };
            tracing::debug!(status, "destroyed an IPC key");
            outcome = outcome.and(self.check("aclrtIpcMemClose", status));
        }
        outcome
    }

    /// The driver counts no exports of a shareable handle: it ends with the physical memory.
    fn unexport_shareable(&self, base: DevicePtr) {
        let mut shareables = self.exports.shareables();
        let Some(known) = shareables.get_mut(&base) else { return };
        known.exports = known.exports.saturating_sub(1);
        if known.exports == 0 && known.retained {
            self.release_physical(aclrtDrvMemHandle(known.physical as *mut _));
        }
    }

    /// Lists the processes in `peer` as those that may open the handle.
    pub(crate) fn authorize(&self, exported: &Exported, peer: &[u8]) -> Result<()> {
        let mut pids = parse_pids(peer)?;
        if self.validation == PidValidation::Off {
            return Ok(());
        }
        let device = exported.extent.allocation.device;
        if pids.contains(&self.bare_tgid(device)?) {
            return Err(Error::NotPermitted(
                "the importer goes by the exporter's own process id, which the driver's list does not take"
                    .into(),
            ));
        }
        let _current = self.enter(device)?;
        if exported.kind == SHAREABLE {
            let mut shareables = self.exports.shareables();
            let Some(known) = shareables.get_mut(&exported.extent.allocation.ptr) else {
                return Err(Error::InvalidRegion("the shareable handle was taken back before".into()));
            };
            pids.retain(|pid| !known.listed.contains(pid));
            for some in pids.chunks_mut(LISTED_AT_ONCE) {
                // SAFETY: reads as many numbers as are stated; the handle was made here.
                let status = unsafe {
                    call!(self, aclrtMemSetPidToShareableHandle(known.number, some.as_mut_ptr(), some.len()))
                };
                self.listed("aclrtMemSetPidToShareableHandle", status)?;
                known.listed.extend(some.iter());
            }
            return Ok(());
        }
        let key = key_of(exported)?;
        let mut table = keys::table();
        let Some(listed) = table.listed(exported.extent.allocation.ptr, &key) else {
            return Err(Error::InvalidRegion("the key was taken back before".into()));
        };
        pids.retain(|pid| !listed.contains(pid));
        for some in pids.chunks_mut(LISTED_AT_ONCE) {
            // SAFETY: reads as many numbers as are stated; the key ends with a NUL, and was made here.
            let status =
                unsafe { call!(self, aclrtIpcMemSetImportPid(key.as_ptr(), some.as_mut_ptr(), some.len())) };
            self.listed("aclrtIpcMemSetImportPid", status)?;
            listed.extend(some.iter());
        }
        Ok(())
    }

    fn listed(&self, call: &'static str, status: aclError) -> Result<()> {
        match status {
            ACL_SUCCESS => Ok(()),
            status => Err(self.error(
                call,
                status,
                "The driver lists processes that run already, by the number that aclrtDeviceGetBareTgid tells there; \
                 where its list does not work in these containers, set DEVICE_IPC_ASCEND_PID_VALIDATION=off in the \
                 exporter",
            )),
        }
    }

    /// The number by which the driver knows this process.
    pub(crate) fn bare_tgid(&self, device: DeviceOrdinal) -> Result<i32> {
        let _current = self.enter(device)?;
        let mut pid = 0;
        // SAFETY: writes one number.
        let status = unsafe { call!(self, aclrtDeviceGetBareTgid(&raw mut pid)) };
        self.check("aclrtDeviceGetBareTgid", status)?;
        Ok(pid)
    }

    /// The pages that the allocation lies in: the driver maps whole ones.
    pub(crate) fn reach(&self, exported: &Exported) -> Option<DeviceRange> {
        let allocation = exported.extent.allocation;
        if exported.kind == SHAREABLE {
            return Some(allocation);
        }
        let _current = self.enter(allocation.device).ok()?;
        let page = u64::from(self.attributes(allocation.ptr)?.pageSize).max(1);
        Some(DeviceRange { len: allocation.len.checked_next_multiple_of(page)?, ..allocation })
    }
}

fn key_of(exported: &Exported) -> Result<Key> {
    Key::parse(exported.bytes.as_slice(), exported.extent.allocation.len).map(|(key, _)| key)
}

fn not_shareable(ptr: DevicePtr, kind: &str, remedy: &str) -> Error {
    Error::NotShareable { ptr, kind: kind.into(), remedy: remedy.into() }
}
