//! The state of a backend's memory.

use std::collections::HashSet;
use std::ops::Deref;
use std::sync::{Arc, Mutex};

use device_ipc_core::{DeviceOrdinal, DevicePtr};

use super::allocations::Allocations;
use super::options::PidValidation;
use super::shareable::table::ShareableTable;
use crate::objects::driver::Driver;

/// The memory of a backend: its allocations and exports. Dereferences to the driver, for its calls and errors.
#[derive(Debug)]
pub(crate) struct MemoryState {
    driver: Arc<Driver>,
    pub(super) validation: PidValidation,
    pub(super) allocations: Allocations,
    pub(super) shareables: ShareableTable,
    /// The devices with access to mappings of this process's physical memory, by the base of the mapping.
    pub(super) granted: Mutex<HashSet<(DevicePtr, DeviceOrdinal)>>,
}

impl MemoryState {
    pub(crate) fn new(driver: &Arc<Driver>, validation: PidValidation) -> Self {
        Self {
            driver: Arc::clone(driver),
            validation,
            allocations: Allocations::default(),
            shareables: ShareableTable::default(),
            granted: Mutex::default(),
        }
    }
}

impl Deref for MemoryState {
    type Target = Driver;

    fn deref(&self) -> &Driver {
        &self.driver
    }
}
