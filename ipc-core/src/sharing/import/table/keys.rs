//! What leases and the driver's mappings are found by.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::backend::{Access, DeviceIpc};
use crate::model::device::DeviceOrdinal;
use crate::os::process::ProcessIdentity;
use crate::wire::descriptor::{ExportId, NamedExport};
use crate::wire::{AllocationId, Token};

/// What a lease is found by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::sharing::import) struct LeaseKey {
    pub(super) exporter: Arc<ProcessIdentity>,
    pub(super) export: ExportId,
    /// Tells exports of one number apart: those of two programs that the process has run one after the other (execve(2)),
    /// and those that a wrong descriptor names.
    pub(super) token: Token,
    pub(super) on: OnDevice,
    /// 0 for the lease that mappings share; else a number that no other lease has.
    pub(super) alone: u64,
}

/// By what differs between the keys of one process: every open of what this thread has not just opened hashes one.
impl Hash for LeaseKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.export.0);
        state.write_u64(u64::from(self.exporter.pid) << 32 | u64::from(self.on.device.get()));
        state.write_u64(self.alone);
    }
}

impl LeaseKey {
    /// Of the lease that mappings share.
    pub(super) const fn shared(
        exporter: Arc<ProcessIdentity>,
        named: &NamedExport<'_>,
        on: OnDevice,
    ) -> Self {
        Self { exporter, export: named.export, token: named.token, on, alone: 0 }
    }

    /// Is it that of the lease that mappings of this export share there?
    pub(super) fn is_shared(&self, named: &NamedExport<'_>, on: OnDevice) -> bool {
        self.export == named.export
            && self.token == named.token
            && self.on == on
            && self.alone == 0
            && *self.exporter == *named.exporter
    }
}

/// What a driver's mapping is found by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RangeKey {
    pub(super) exporter: Arc<ProcessIdentity>,
    pub(super) allocations: Box<[AllocationId]>,
    pub(super) on: OnDevice,
}

/// By what mostly differs: a bundle hashes one for each of its allocations.
impl Hash for RangeKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.allocations.hash(state);
        state.write_u64(u64::from(self.exporter.pid) << 32 | u64::from(self.on.device.get()));
    }
}

/// Where and how something is open. Two instances of a backend share nothing.
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
