//! The shareable handles of this process's physical memory.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use device_ipc_core::DevicePtr;

/// The shareable handles, by the base of the mapping.
#[derive(Debug, Default)]
pub(crate) struct ShareableTable {
    shareables: Mutex<HashMap<DevicePtr, Shareable>>,
}

/// The shareable handle of a block of physical memory. A block has one: the driver creates no second one, and revokes
/// none before the block is freed.
#[derive(Debug)]
pub(super) struct Shareable {
    pub(super) number: u64,
    /// The physical handle.
    pub(super) physical: usize,
    /// Whether this process holds an extra reference to it, because the block is not an allocation of this backend.
    pub(super) retained: bool,
    pub(super) exports: usize,
    /// The processes that the driver admits.
    pub(super) listed: HashSet<i32>,
}

impl ShareableTable {
    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<DevicePtr, Shareable>> {
        self.shareables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes the handle of a block that is freed.
    pub(crate) fn remove(&self, base: DevicePtr) {
        self.lock().remove(&base);
    }
}
