//! The keys of leases and of driver mappings.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::backend::{Access, DeviceIpc};
use crate::model::device::DeviceOrdinal;
use crate::os::process::ProcessIdentity;
use crate::wire::descriptor::{ExportId, NamedExport};
use crate::wire::{AllocationId, Token};

/// The key of a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::sharing::import) struct LeaseKey {
    pub(super) exporter: Arc<ProcessIdentity>,
    pub(super) export: ExportId,
    /// Distinguishes exports with the same number: of two programs that a process has executed one after the other (execve(2)),
    /// and of a wrong descriptor.
    pub(super) token: Token,
    pub(super) on: OnDevice,
    /// 0 for the shared lease; otherwise a unique number.
    pub(super) alone: u64,
}

/// Hashes the fields that differ between the keys of one process: every open of an export that this thread has not just opened
/// hashes a key.
impl Hash for LeaseKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.export.0);
        state.write_u64(u64::from(self.exporter.pid) << 32 | u64::from(self.on.device.get()));
        state.write_u64(self.alone);
    }
}

impl LeaseKey {
    /// Returns the key of the shared lease.
    pub(super) const fn shared(
        exporter: Arc<ProcessIdentity>,
        named: &NamedExport<'_>,
        on: OnDevice,
    ) -> Self {
        Self { exporter, export: named.part.export, token: named.part.token, on, alone: 0 }
    }

    /// Returns whether this is the key of the shared lease on this export, device and access.
    pub(super) fn is_shared(&self, named: &NamedExport<'_>, on: OnDevice) -> bool {
        self.export == named.part.export
            && self.token == named.part.token
            && self.on == on
            && self.alone == 0
            && *self.exporter == named.contents.exporter
    }
}

/// The key of a driver mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RangeKey {
    pub(super) exporter: Arc<ProcessIdentity>,
    pub(super) allocations: Box<[AllocationId]>,
    pub(super) on: OnDevice,
    /// 0 for a mapping that leases share; otherwise the number of the lease's key.
    pub(super) alone: u64,
}

/// Hashes the field that usually differs: named tensors hash one key for each allocation.
impl Hash for RangeKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.allocations.hash(state);
        state.write_u64(u64::from(self.exporter.pid) << 32 | u64::from(self.on.device.get()));
    }
}

/// The backend instance, the device and the access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct OnDevice {
    backend: usize,
    pub(super) device: DeviceOrdinal,
    access: Access,
}

impl OnDevice {
    pub(super) fn new(backend: &Arc<dyn DeviceIpc>, device: DeviceOrdinal, access: Access) -> Self {
        Self { backend: Arc::as_ptr(backend).cast::<()>() as usize, device, access }
    }
}
