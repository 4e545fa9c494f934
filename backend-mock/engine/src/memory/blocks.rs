//! Blocks of physical memory, reserved address ranges, and the mappings of blocks in those ranges.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use super::arena::Reservation;
use super::mapping::Mapping;
use crate::model::{Address, BlockId, EngineError};
use crate::shared::{ExportEpoch, Identity};

/// A block of physical memory.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) file: Arc<OwnedFd>,
    pub(crate) identity: Identity,
    pub(crate) imported: bool,
    /// Whether the file was opened for writing.
    pub(crate) writable: bool,
    /// The pidfd of an exporter that can revoke the memory, and the epoch of the export.
    pub(crate) exporter: Option<(Arc<OwnedFd>, ExportEpoch)>,
    /// Handles of the block that callers hold.
    pub(crate) handles: u32,
    /// Mappings of the block. It exists until it has neither handles nor mappings.
    pub(crate) mappings: u32,
    /// Device and number of bytes that the block counts as used memory.
    pub(crate) counted: Option<(usize, u64)>,
}

/// A part of a block that is mapped in a reserved range.
#[derive(Debug)]
pub(crate) struct BlockMapping {
    pub(crate) mapping: Arc<Mapping>,
    pub(crate) block: u64,
    pub(crate) offset: u64,
}

/// A mapping that was removed. It is unmapped when no queued work refers to it.
#[derive(Debug)]
struct RetiredMapping {
    addresses: Range<u64>,
    until_unmapped: Weak<()>,
}

/// A reserved range of addresses.
#[derive(Debug)]
pub(crate) struct ReservedRange {
    pub(crate) space: Arc<Reservation>,
    /// The mappings in the range, by first address.
    pub(crate) mapped: BTreeMap<u64, BlockMapping>,
    retired: Vec<RetiredMapping>,
}

impl ReservedRange {
    pub(crate) fn new(space: Arc<Reservation>) -> Self {
        Self { space, mapped: BTreeMap::new(), retired: Vec::new() }
    }

    /// Returns the first address and the size in bytes.
    pub(crate) fn bounds(&self) -> (Address, u64) {
        (Address::new(self.space.base() as u64), self.space.len() as u64)
    }

    fn end(&self) -> u64 {
        (self.space.base() + self.space.len()) as u64
    }

    /// Records a mapping that was removed while queued work may still refer to it.
    pub(crate) fn retire(&mut self, mapping: &Mapping) {
        let (addresses, until_unmapped) = (mapping.addresses(), mapping.until_unmapped());
        self.retired.push(RetiredMapping { addresses, until_unmapped });
    }

    /// Returns whether a removed mapping at these addresses has yet to be unmapped.
    pub(crate) fn is_retiring(&mut self, addresses: &Range<u64>) -> bool {
        self.retired.retain(|old| old.until_unmapped.strong_count() > 0);
        let overlaps = |old: &Range<u64>| old.start < addresses.end && addresses.start < old.end;
        self.retired.iter().any(|old| overlaps(&old.addresses))
    }
}

/// The blocks and the reserved ranges of a process.
#[derive(Debug, Default)]
pub(crate) struct BlockTable {
    pub(crate) blocks: HashMap<u64, Block>,
    /// The reserved ranges, by first address.
    pub(crate) ranges: BTreeMap<u64, ReservedRange>,
}

impl BlockTable {
    /// Returns a block of which the caller holds a handle.
    pub(crate) fn block(&self, block: BlockId) -> Result<&Block, EngineError> {
        let found = self.blocks.get(&block.get()).filter(|found| found.handles > 0);
        found.ok_or(EngineError::InvalidBlock { block: block.get() })
    }

    /// Returns the reserved range that contains `address`.
    pub(crate) fn range_at(&self, address: Address) -> Option<&ReservedRange> {
        let (_, range) = self.ranges.range(..=address.get()).next_back()?;
        (address.get() < range.end()).then_some(range)
    }

    /// Returns the reserved range that contains `len` bytes from `address` on.
    pub(crate) fn range_mut(
        &mut self,
        address: Address,
        len: u64,
    ) -> Result<&mut ReservedRange, EngineError> {
        let found = self.ranges.range_mut(..=address.get()).next_back().map(|(_, range)| range);
        let end = address.get().checked_add(len).filter(|_| len > 0);
        let found = found.filter(|range| end.is_some_and(|end| end <= range.end()));
        found.ok_or(EngineError::UnknownAddress { address })
    }

    /// Returns the mapping that contains `address`, and its range.
    pub(crate) fn mapping_at(&self, address: Address) -> Option<(&ReservedRange, &BlockMapping)> {
        let range = self.range_at(address)?;
        let (base, found) = range.mapped.range(..=address.get()).next_back()?;
        (address.get() - base < found.mapping.size()).then_some((range, found))
    }

    /// Returns the first addresses of the mappings that cover exactly these bytes, without a gap.
    pub(crate) fn mappings_covering(
        &mut self,
        address: Address,
        len: u64,
    ) -> Result<(&mut ReservedRange, Vec<u64>), EngineError> {
        let range = self.range_mut(address, len)?;
        let mut reached = address.get();
        let mut found = Vec::new();
        for (&base, mapped) in range.mapped.range(address.get()..) {
            if base != reached || reached >= address.get() + len {
                break;
            }
            found.push(base);
            reached += mapped.mapping.size();
        }
        if reached != address.get() + len {
            return Err(EngineError::invalid_value(format!(
                "{len} bytes at {address} are not covered by whole mappings"
            )));
        }
        Ok((range, found))
    }

    /// Removes a block without handles and mappings, and returns the memory that it counted as used.
    pub(super) fn remove_if_unused(&mut self, block: u64) -> Option<(usize, u64)> {
        let found = self.blocks.get(&block)?;
        if found.handles > 0 || found.mappings > 0 {
            return None;
        }
        self.blocks.remove(&block)?.counted
    }
}
