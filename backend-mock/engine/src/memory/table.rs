//! The device memory of a process: own allocations, imports and blocks.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::blocks::BlockTable;
use super::imports::ImportTable;
use super::lease::wait_for_importers;
use super::mapping::Mapping;
use super::ranges::RangeTable;
use crate::model::{Address, EngineError, Lifetime};

/// An allocation of this process.
#[derive(Debug)]
pub(crate) struct OwnedAllocation {
    /// The memory file. It stays open so that importers can open it.
    pub(crate) file: OwnedFd,
    /// Size in bytes, rounded up to whole pages.
    pub(crate) rounded: u64,
    /// Numbers of the separate exports in use.
    pub(crate) separate: HashSet<u32>,
}

/// All device memory of a process, own and opened.
#[derive(Debug)]
pub(crate) struct MemoryTable {
    pub(crate) ranges: RangeTable,
    pub(crate) owned: HashMap<u64, OwnedAllocation>,
    pub(crate) imports: ImportTable,
    pub(crate) blocks: BlockTable,
    /// Used bytes by device ordinal.
    pub(crate) used: Vec<u64>,
}

impl MemoryTable {
    pub(crate) fn new(devices: usize) -> Self {
        Self {
            ranges: RangeTable::default(),
            owned: HashMap::new(),
            imports: ImportTable::default(),
            blocks: BlockTable::default(),
            used: vec![0; devices],
        }
    }

    /// Returns the allocation of this process that begins at `address`.
    ///
    /// # Errors
    /// `UnknownAddress`, `NotBase`, `Imported`.
    pub(crate) fn own(&self, address: Address) -> Result<(&Arc<Mapping>, &OwnedAllocation), EngineError> {
        let mapping = self.ranges.at_base(address)?;
        if mapping.imported {
            return Err(EngineError::Imported { address });
        }
        let owned = self.owned.get(&address.get()).ok_or(EngineError::UnknownAddress { address })?;
        Ok((mapping, owned))
    }

    /// Removes a block that has neither handles nor mappings.
    pub(crate) fn remove_block_if_unused(&mut self, block: u64) {
        if let Some((device, bytes)) = self.blocks.remove_if_unused(block) {
            self.used[device] -= bytes;
        }
    }

    /// Marks all memory as freed or closed, when the machine is dropped.
    pub(crate) fn retire_all(&self) {
        for mapping in self.ranges.all() {
            mapping.mark_closed();
            if let Some(owned) = self.owned.get(&mapping.base()) {
                mapping.page.mark_freed();
                if mapping.identity.lifetime == Lifetime::Revoking {
                    wait_for_importers(&owned.file);
                }
            }
        }
    }
}
