//! Handles of this process's memory, of every kind, and the processes that may open them.
//!
//! For either kind the driver admits the processes that the exporter has listed, by their `aclrtDeviceGetBareTgid`,
//! which is the process id on the host, also in a container.

use device_ipc_core::backend::{Exported, Extent, HandleBytes, HandleKind, Remedy};
use device_ipc_core::{DevicePtr, DeviceRange, Error, Result};

use super::kind::{KEY, SHAREABLE};
use super::options::PidValidation;
use super::state::MemoryState;
use super::wire::parse_pids;
use crate::library::NAME;

impl MemoryState {
    /// Exports an allocation, as the requested kind or as the one that the memory supports.
    pub(crate) fn export(&self, extent: &Extent, requested: Option<HandleKind>) -> Result<Exported> {
        let base = extent.allocation.ptr;
        let _current = self.enter(extent.allocation.device)?;
        let physical = self.is_physical(base);
        let bytes = match requested.unwrap_or(if physical { SHAREABLE } else { KEY }) {
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
                    &format!(
                        "it has no shareable handle; share it by its key (kind 1), or {}",
                        Remedy::AllocateAs
                    ),
                ));
            }
            other => {
                return Err(Error::Unsupported {
                    backend: NAME,
                    what: format!("export a handle of kind {}", other.0),
                    why: format!(
                        "this version supports kinds {} (key) and {} (shareable handle)",
                        KEY.0, SHAREABLE.0
                    ),
                });
            }
        };
        let kind = if physical { SHAREABLE } else { KEY };
        Ok(Exported { extent: *extent, kind, bytes: HandleBytes::new(bytes), fds: Vec::new() })
    }

    /// Ends an export. All importers must have closed it: closing a key in its exporter revokes it for all of them.
    pub(crate) fn unexport(&self, exported: &Exported) -> Result<()> {
        let range = exported.extent.allocation;
        let _current = self.enter(range.device)?;
        if exported.kind == SHAREABLE {
            self.unexport_shareable(range.ptr);
            return Ok(());
        }
        self.unexport_key(exported)
    }

    /// Lists the processes in `peer` with the driver, which then admits them.
    pub(crate) fn authorize(&self, exported: &Exported, peer: &[u8]) -> Result<()> {
        let pids = parse_pids(peer)?;
        if self.validation == PidValidation::Off {
            return Ok(());
        }
        let device = exported.extent.allocation.device;
        if pids.contains(&self.bare_tgid(device)?) {
            return Err(Error::NotPermitted(
                "the importer has the exporter's process id, which the driver's list does not accept".into(),
            ));
        }
        let _current = self.enter(device)?;
        if exported.kind == SHAREABLE {
            self.list_for_shareable(exported, pids)
        } else {
            self.list_for_key(exported, pids)
        }
    }

    /// Returns the bytes that an importer can reach: the pages of the allocation, as the driver maps whole ones.
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

fn not_shareable(ptr: DevicePtr, kind: &str, remedy: &str) -> Error {
    Error::NotShareable { ptr, kind: kind.into(), remedy: remedy.into() }
}
