//! Physical memory and addresses, managed apart from each other.
//!
//! Why: both vendors let a program make blocks of physical memory, set addresses aside, and put the one into
//! the other. Such memory has rules of its own: a block travels as a file descriptor or as a number, lives as
//! long as anybody has a handle or a mapping of it, and each device gets its access separately, or none.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::blocks::BlockInfo;
use super::state::Machine;
use crate::memory::{
    AddressSource, BlockMapping, DeviceAccess, MappedObject, MappedPart, Mapping, Reservation, ReservedRange,
};
use crate::model::{Access, Address, BlockId, EngineError, Operation};
use crate::shared::Page;
use crate::system::{lock, page_size, whole_pages};

/// How long a new mapping waits for work that was queued for the one before it at its addresses.
const PATIENCE: Duration = Duration::from_secs(1);

/// A block that is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappedBlock {
    /// The block.
    pub block: BlockInfo,
    /// First address of the mapping.
    pub base: Address,
    /// Size of the mapping in bytes.
    pub size: u64,
    /// First byte of the block that is mapped.
    pub offset: u64,
    /// The reservation in which the mapping lies: first address and size.
    pub reservation: (Address, u64),
}

impl Machine {
    /// Sets `size` bytes of addresses aside, whole pages, from a multiple of `alignment` on (a power of two; less
    /// than a page is a page). Uses no memory.
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
                "a range of whole pages has an alignment of a power of two",
            ));
        }
        let space = Arc::new(Reservation::aligned(len, alignment)?);
        let base = space.base() as u64;
        let range = ReservedRange::new(space);
        lock(&self.memory).blocks.ranges.insert(base, range);
        Ok(Address::new(base))
    }

    /// Gives a whole reservation back.
    ///
    /// # Errors
    /// `UnknownAddress`; `InvalidValue` for a part of one, and while something is mapped in it.
    pub fn unreserve(&self, address: Address, size: u64) -> Result<(), EngineError> {
        self.enter(Operation::Unreserve)?;
        let mut memory = lock(&self.memory);
        let range = memory.blocks.range_mut(address, size)?;
        if range.space.base() as u64 != address.get() || range.space.len() as u64 != size {
            return Err(EngineError::invalid_value("a part of a reservation cannot be given back"));
        }
        if !range.mapped.is_empty() {
            return Err(EngineError::invalid_value("something is mapped in the reservation"));
        }
        // Work that is queued keeps what it was queued for, and that the addresses.
        memory.blocks.ranges.remove(&address.get());
        Ok(())
    }

    /// Maps `size` bytes of a block, from `offset` on, at an address of a reservation; all are whole pages. No
    /// device may access it yet.
    ///
    /// # Errors
    /// `InvalidBlock`; `UnknownAddress` outside a reservation; `InvalidValue` for bytes that the block does not have,
    /// parts of pages, and where something is mapped, or work queued that will still access it; `System`.
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
        let inside = offset.checked_add(size).is_some_and(|end| end <= identity.size);
        let whole = |bytes| whole_pages(bytes) == Some(bytes);
        if !inside || !whole(offset) || !whole(size) || !whole(address.get()) {
            return Err(EngineError::invalid_value("a mapping is of whole pages that the block has"));
        }
        let device = self.describe(block.get(), found).device.unwrap_or(0);
        let range = memory.blocks.range_mut(address, size)?;
        let overlaps = range.mapped.range(..address.get() + size).next_back();
        if overlaps.is_some_and(|(base, placed)| base + placed.mapping.size() > address.get()) {
            return Err(EngineError::invalid_value("something is mapped there"));
        }
        let at = (address.get() - range.space.base() as u64) as usize;
        let slice =
            MappedPart { start: offset, size, grants: Some(DeviceAccess::new(self.devices.len(), None)) };
        let page = Page::map(&*file, false)?;
        let content = MappedObject { file: &file, page, identity, device, writable: true, imported };
        let place = AddressSource::Window(range.space.clone());
        let mapping = Arc::new(Mapping::of_slice(place, at, size as usize, slice, content)?);
        let placed = BlockMapping { mapping: mapping.clone(), block: block.get(), offset };
        range.mapped.insert(address.get(), placed);
        memory.blocks.blocks.entry(block.get()).and_modify(|found| found.mappings += 1);
        memory.ranges.insert(mapping);
        Ok(())
    }

    /// Waits until the work that was queued for what was mapped there has let go.
    fn wait_for_retired(&self, address: Address, size: u64) -> Result<(), EngineError> {
        let deadline = Instant::now() + PATIENCE;
        let end = address.get().saturating_add(size);
        loop {
            let in_use = {
                let mut memory = lock(&self.memory);
                let range = memory.blocks.range_mut(address, size)?;
                range.retired.retain(|old| old.strong_count() > 0);
                let overlaps = |old: &Mapping| old.base() < end && old.base() + old.size() > address.get();
                range.retired.iter().filter_map(Weak::upgrade).any(|old| overlaps(&old))
            };
            if !in_use {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(EngineError::invalid_value("work is queued for what was mapped there"));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Takes whole mappings away that fill these bytes. Work that is queued for them fails; none is waited for.
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
                range.retired.push(Arc::downgrade(&placed.mapping));
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

    /// Says what a device may do with whole mappings that fill these bytes. It also holds for work that is queued.
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

    /// As [`set_access`](Self::set_access), also for a device without peer access: for those who play a driver that
    /// carries copies over, and look themselves at what kernels reach.
    ///
    /// # Errors
    /// As `set_access`, without `NoPeerAccess`.
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
        as_peer: bool,
    ) -> Result<(), EngineError> {
        self.enter(Operation::SetAccess)?;
        let physical = self.device(device)?.physical;
        let mut memory = lock(&self.memory);
        let (range, bases) = memory.blocks.mappings_covering(address, size)?;
        let homes = || bases.iter().filter_map(|base| range.mapped.get(base));
        for home in homes().map(|placed| placed.mapping.identity.physical as usize) {
            if as_peer && access.is_some() && !self.config.peers.reaches(physical, home) {
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

    /// What a device may do with the mapped byte at an address.
    ///
    /// # Errors
    /// `InvalidDevice`; `UnknownAddress` where no block is mapped.
    pub fn access_of(&self, address: Address, device: usize) -> Result<Option<Access>, EngineError> {
        self.device(device)?;
        let memory = lock(&self.memory);
        let (_, placed) = memory.blocks.mapping_at(address).ok_or(EngineError::UnknownAddress { address })?;
        Ok(placed.mapping.grants.as_ref().and_then(|grants| grants.of(device)))
    }

    /// The mapped block at an address; `None` if no block is mapped there: the address may be other memory, or none.
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

    /// The reservation in which an address lies: first address and size.
    pub fn reservation_of(&self, address: Address) -> Option<(Address, u64)> {
        let memory = lock(&self.memory);
        memory.blocks.range_at(address).map(ReservedRange::bounds)
    }
}
