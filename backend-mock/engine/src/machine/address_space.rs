//! Virtual memory management: reserved addresses, mappings of blocks, and access by device.
//!
//! Both vendors let a program create blocks of physical memory, reserve addresses, and map the blocks there. A
//! block is shared as a file descriptor or as a number, exists while any process has a handle or a mapping of it,
//! and each device gets access separately.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::blocks::BlockInfo;
use super::state::Machine;
use crate::memory::{
    AddressSource, BlockMapping, DeviceAccess, Lease, MappedObject, MappedPart, Mapping, Reservation,
    ReservedRange,
};
use crate::model::{Access, Address, BlockId, EngineError, Operation};
use crate::shared::Page;
use crate::system::{duplicate, lock, page_size, whole_pages};

/// How long a new mapping waits for queued work that uses the previous mapping at its addresses.
const RETIRED_MAPPING_TIMEOUT: Duration = Duration::from_secs(1);

/// A mapping of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappedBlock {
    /// The block.
    pub block: BlockInfo,
    /// First address of the mapping.
    pub base: Address,
    /// Size of the mapping in bytes.
    pub size: u64,
    /// Offset of the mapping in the block, in bytes.
    pub offset: u64,
    /// The reserved range that contains the mapping: first address and size in bytes.
    pub reservation: (Address, u64),
}

impl Machine {
    /// Reserves `size` bytes of addresses, whole pages, at a multiple of `alignment` (a power of two, rounded up to
    /// a page). Uses no memory.
    ///
    /// # Errors
    /// `InvalidValue`, `System`.
    pub fn reserve(&self, size: u64, alignment: u64) -> Result<Address, EngineError> {
        self.enter(Operation::Reserve)?;
        let whole = size > 0 && whole_pages(size) == Some(size);
        let alignment = alignment.max(page_size() as u64);
        let (Ok(len), Ok(alignment)) = (usize::try_from(size), usize::try_from(alignment)) else {
            return Err(EngineError::invalid_value("a range this large"));
        };
        if !whole || !alignment.is_power_of_two() {
            return Err(EngineError::invalid_value(
                "a size that is not whole pages, or an alignment that is not a power of two",
            ));
        }
        Ok(self.add_range(Reservation::aligned(len, alignment)?))
    }

    /// Reserves `size` bytes of addresses from `address` on, both whole pages. Returns whether they were free.
    ///
    /// # Errors
    /// `InvalidValue`, `System`.
    pub fn reserve_at(&self, address: Address, size: u64) -> Result<bool, EngineError> {
        self.enter(Operation::Reserve)?;
        let whole = |bytes| bytes > 0 && whole_pages(bytes) == Some(bytes);
        let (Ok(base), Ok(len)) = (usize::try_from(address.get()), usize::try_from(size)) else {
            return Err(EngineError::invalid_value("a range this large"));
        };
        if !whole(address.get()) || !whole(size) {
            return Err(EngineError::invalid_value("an address or a size that is not whole pages"));
        }
        Ok(Reservation::at(base, len)?.map(|space| self.add_range(space)).is_some())
    }

    fn add_range(&self, space: Reservation) -> Address {
        let base = space.base() as u64;
        lock(&self.memory).blocks.ranges.insert(base, ReservedRange::new(Arc::new(space)));
        Address::new(base)
    }

    /// Releases a reserved range.
    ///
    /// # Errors
    /// `UnknownAddress`; `InvalidValue` for a part of a range, and while a block is mapped in it.
    pub fn unreserve(&self, address: Address, size: u64) -> Result<(), EngineError> {
        self.enter(Operation::Unreserve)?;
        let mut memory = lock(&self.memory);
        let range = memory.blocks.range_mut(address, size)?;
        if range.space.base() as u64 != address.get() || range.space.len() as u64 != size {
            return Err(EngineError::invalid_value(
                "a part of a reserved range: only the whole range can be released",
            ));
        }
        if !range.mapped.is_empty() {
            return Err(EngineError::invalid_value("a reserved range in which a block is mapped"));
        }
        // Queued work keeps its mappings alive, and those the addresses.
        memory.blocks.ranges.remove(&address.get());
        Ok(())
    }

    /// Maps `size` bytes of a block from `offset` on at an address of a reserved range, all in whole pages; of an imported
    /// allocation all its bytes. No device has access to the mapping yet.
    ///
    /// # Errors
    /// `InvalidBlock`; `UnknownAddress` outside of reserved ranges; `InvalidValue` for bytes beyond the block,
    /// parts of pages, addresses with another mapping, and while queued work uses the previous mapping; `System`.
    pub fn map_block(
        &self,
        address: Address,
        size: u64,
        offset: u64,
        block: BlockId,
    ) -> Result<(), EngineError> {
        self.enter(Operation::MapBlock)?;
        self.wait_for_retired(address, size)?;
        let mut memory = lock(&self.memory);
        let found = memory.blocks.block(block)?;
        let (file, identity, imported) = (found.file.clone(), found.identity, found.imported);
        let (writable, exporter) = (found.writable, found.exporter.clone());
        let inside = offset.checked_add(size).is_some_and(|end| end <= identity.size);
        let whole = |bytes| whole_pages(bytes) == Some(bytes);
        let is_all = offset == 0 && size == identity.size;
        if !inside || !whole(offset) || !(whole(size) || is_all) || !whole(address.get()) {
            return Err(EngineError::invalid_value("a mapping that is not whole pages of the block"));
        }
        let bytes = whole_pages(size).ok_or_else(|| EngineError::invalid_value("a mapping this large"))?;
        let device = self.describe(block.get(), found).device.unwrap_or(0);
        let range = memory.blocks.range_mut(address, bytes)?;
        let overlaps = range.mapped.range(..address.get() + bytes).next_back();
        if overlaps.is_some_and(|(base, placed)| base + placed.mapping.size() > address.get()) {
            return Err(EngineError::invalid_value("addresses at which a block is mapped"));
        }
        let at = (address.get() - range.space.base() as u64) as usize;
        let slice =
            MappedPart { start: offset, size, grants: Some(DeviceAccess::new(self.devices.len(), None)) };
        let page = Page::map(&*file, false)?;
        let content = MappedObject { file: &file, page, identity, device, writable, imported };
        let place = AddressSource::Window { space: range.space.clone(), until_unmapped: Arc::default() };
        let lease = match exporter {
            Some((exporter, epoch)) => Some(Lease::new(duplicate(&*file)?, duplicate(&*exporter)?, epoch)),
            None => None,
        };
        let mapping = Mapping::of_slice(place, at, bytes as usize, slice, content)?.with_lease(lease);
        let mapping = Arc::new(mapping);
        let placed = BlockMapping { mapping: mapping.clone(), block: block.get(), offset };
        range.mapped.insert(address.get(), placed);
        memory.blocks.blocks.entry(block.get()).and_modify(|found| found.mappings += 1);
        memory.ranges.insert(mapping);
        Ok(())
    }

    /// Waits until no queued work uses previous mappings at these addresses.
    fn wait_for_retired(&self, address: Address, size: u64) -> Result<(), EngineError> {
        let deadline = Instant::now() + RETIRED_MAPPING_TIMEOUT;
        let addresses = address.get()..address.get().saturating_add(size);
        while lock(&self.memory).blocks.range_mut(address, size)?.is_retiring(&addresses) {
            if Instant::now() >= deadline {
                return Err(EngineError::invalid_value("addresses that queued work uses"));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }

    /// Removes the whole mappings that cover these bytes, without waiting for streams. Queued work that uses them
    /// fails.
    ///
    /// # Errors
    /// `UnknownAddress`; `InvalidValue` for parts of mappings, and gaps.
    pub fn unmap_blocks(&self, address: Address, size: u64) -> Result<(), EngineError> {
        self.enter(Operation::UnmapBlocks)?;
        let mut memory = lock(&self.memory);
        let (range, bases) = memory.blocks.mappings_covering(address, size)?;
        let mut blocks = Vec::new();
        for base in &bases {
            if let Some(placed) = range.mapped.remove(base) {
                placed.mapping.mark_closed();
                range.retire(&placed.mapping);
                blocks.push(placed.block);
            }
        }
        for base in bases {
            memory.ranges.remove(base);
        }
        for block in blocks {
            memory.blocks.blocks.entry(block).and_modify(|found| found.mappings -= 1);
            memory.remove_block_if_unused(block);
        }
        Ok(())
    }

    /// Sets the access of a device to the whole mappings that cover these bytes. It also applies to queued work.
    ///
    /// # Errors
    /// `InvalidDevice`; `UnknownAddress`; `InvalidValue` for parts of mappings, and gaps; `NoPeerAccess`.
    pub fn set_access(
        &self,
        address: Address,
        size: u64,
        device: usize,
        access: Option<Access>,
    ) -> Result<(), EngineError> {
        self.change_access(address, size, device, access, true)
    }

    /// Sets the access of a device that may have no peer access, for simulators of drivers that stage copies and
    /// check the access of kernels themselves.
    ///
    /// # Errors
    /// As [`set_access`](Self::set_access), without `NoPeerAccess`.
    pub fn grant_access(
        &self,
        address: Address,
        size: u64,
        device: usize,
        access: Option<Access>,
    ) -> Result<(), EngineError> {
        self.change_access(address, size, device, access, false)
    }

    fn change_access(
        &self,
        address: Address,
        size: u64,
        device: usize,
        access: Option<Access>,
        check_peers: bool,
    ) -> Result<(), EngineError> {
        self.enter(Operation::SetAccess)?;
        let physical = self.device(device)?.physical;
        let mut memory = lock(&self.memory);
        let (range, bases) = memory.blocks.mappings_covering(address, size)?;
        let homes = || bases.iter().filter_map(|base| range.mapped.get(base));
        for home in homes().map(|placed| placed.mapping.identity.physical as usize) {
            if check_peers && access.is_some() && !self.config.peers.allows(physical, home) {
                return Err(EngineError::NoPeerAccess { from: physical, to: home });
            }
        }
        for placed in homes() {
            if let Some(grants) = &placed.mapping.grants {
                grants.set(device, access);
            }
        }
        Ok(())
    }

    /// Returns the access of a device to the block that is mapped at an address.
    ///
    /// # Errors
    /// `InvalidDevice`; `UnknownAddress` where no block is mapped.
    pub fn access_of(&self, address: Address, device: usize) -> Result<Option<Access>, EngineError> {
        self.device(device)?;
        let memory = lock(&self.memory);
        let (_, placed) = memory.blocks.mapping_at(address).ok_or(EngineError::UnknownAddress { address })?;
        Ok(placed.mapping.grants.as_ref().and_then(|grants| grants.of(device)))
    }

    /// Returns the mapping of a block at an address; `None` for other memory and other addresses.
    pub fn mapped_block(&self, address: Address) -> Option<MappedBlock> {
        let memory = lock(&self.memory);
        let (range, placed) = memory.blocks.mapping_at(address)?;
        let block = memory.blocks.blocks.get(&placed.block)?;
        Some(MappedBlock {
            block: self.describe(placed.block, block),
            base: Address::new(placed.mapping.base()),
            size: placed.mapping.size(),
            offset: placed.offset,
            reservation: range.bounds(),
        })
    }

    /// Returns the reserved range that contains an address: first address and size in bytes.
    pub fn reservation_of(&self, address: Address) -> Option<(Address, u64)> {
        let memory = lock(&self.memory);
        memory.blocks.range_at(address).map(ReservedRange::bounds)
    }
}
