//! Physical memory and addresses, managed apart from each other.
//!
//! Why: both vendors let a program make blocks of physical memory, set addresses aside, and put the one into
//! the other. Such memory has rules of its own: a block travels as a file descriptor or as a number, lives as
//! long as anybody has a handle or a mapping of it, and each device gets its access separately, or none.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::arena::Reservation;
use crate::handle::{Handle, HandleKind};
use crate::machine::lock;
use crate::mapping::{Content, Grants, Mapping, Place, Slice};
use crate::memory::{MemoryTable, NEXT_GENERATION};
use crate::object::{Object, duplicate, refuse_own, whole_pages};
use crate::page::{Edition, Identity, ObjectKind, Page, page_size};
use crate::process::ProcessId;
use crate::{Access, Address, BlockId, EngineError, Lifetime, Machine, Operation};

/// How long a new mapping waits for work that was queued for the one before it at its addresses.
const PATIENCE: Duration = Duration::from_secs(1);

/// A number of a block holds the exporter's pid, the number of its descriptor (`fs.nr_open` is 2^20 by default)
/// and a check, from the highest bit to the lowest.
const FD_BITS: u32 = 20;
const CHECK_BITS: u32 = 22;
const PID_SHIFT: u32 = FD_BITS + CHECK_BITS;

/// What is known of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockInfo {
    /// The block.
    pub block: BlockId,
    /// Ordinal of the device on which it lies; `None` if this process does not see that device.
    pub device: Option<usize>,
    /// Its size in bytes, whole pages.
    pub size: u64,
    /// A number that no other memory of the process that made it has had.
    pub generation: u64,
    /// Whether another process made it, or it was imported into the process that did.
    pub imported: bool,
    /// Whether it is one of [`Machine::create_sparse_block`].
    pub sparse: bool,
}

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

#[derive(Debug)]
struct Block {
    file: Arc<OwnedFd>,
    identity: Identity,
    imported: bool,
    /// Handles that were given out; the block stays while it is mapped, too.
    handles: u32,
    mappings: u32,
    /// Bytes that count as used, on this device.
    counted: Option<(usize, u64)>,
}

#[derive(Debug)]
struct Placed {
    mapping: Arc<Mapping>,
    block: u64,
    offset: u64,
}

#[derive(Debug)]
struct Range {
    space: Arc<Reservation>,
    /// By first address.
    placed: BTreeMap<u64, Placed>,
    /// Unmapped, perhaps with work in the queues of streams.
    retired: Vec<Weak<Mapping>>,
}

impl Range {
    fn end(&self) -> u64 {
        (self.space.base() + self.space.len()) as u64
    }
}

/// The blocks and reservations of a process.
#[derive(Debug, Default)]
pub(crate) struct BlockTable {
    blocks: HashMap<u64, Block>,
    /// By first address.
    ranges: BTreeMap<u64, Range>,
}

impl BlockTable {
    fn block(&self, block: BlockId) -> Result<&Block, EngineError> {
        let found = self.blocks.get(&block.get()).filter(|found| found.handles > 0);
        found.ok_or(EngineError::InvalidBlock { block: block.get() })
    }

    /// The reservation that holds these bytes.
    fn range_mut(&mut self, address: Address, len: u64) -> Result<&mut Range, EngineError> {
        let found = self.ranges.range_mut(..=address.get()).next_back().map(|(_, range)| range);
        let end = address.get().checked_add(len).filter(|_| len > 0);
        let found = found.filter(|range| end.is_some_and(|end| end <= range.end()));
        found.ok_or(EngineError::UnknownAddress { address })
    }

    /// The mappings that fill these bytes from their first to their last, without a gap.
    fn filling(&mut self, address: Address, len: u64) -> Result<(&mut Range, Vec<u64>), EngineError> {
        let range = self.range_mut(address, len)?;
        let mut reached = address.get();
        let mut found = Vec::new();
        for (&base, placed) in range.placed.range(address.get()..) {
            if base != reached || reached >= address.get() + len {
                break;
            }
            found.push(base);
            reached += placed.mapping.size();
        }
        if reached != address.get() + len {
            return Err(EngineError::invalid_value("a range that is not filled by whole mappings"));
        }
        Ok((range, found))
    }

    /// Forgets a block that nobody has any more; returns what it counted for.
    fn settle(&mut self, block: u64) -> Option<(usize, u64)> {
        let found = self.blocks.get(&block)?;
        if found.handles > 0 || found.mappings > 0 {
            return None;
        }
        self.blocks.remove(&block)?.counted
    }
}

impl MemoryTable {
    fn settle(&mut self, block: u64) {
        if let Some((device, bytes)) = self.blocks.settle(block) {
            self.used[device] -= bytes;
        }
    }
}

impl Machine {
    /// Makes a block of physical memory of `size` bytes, whole pages, all zero. It counts as used until its last
    /// handle is released and its last mapping taken away.
    ///
    /// # Errors
    /// `InvalidDevice`; `InvalidValue` for a size that is 0 or no whole pages; `OutOfMemory`; `System`.
    pub fn create_block(&self, device: usize, size: u64) -> Result<BlockId, EngineError> {
        self.make_block(device, size, true)
    }

    /// As [`create_block`](Self::create_block), a block that does not count as used, and takes memory only
    /// where it is written: for those who hand out its parts and keep count themselves.
    ///
    /// # Errors
    /// As `create_block`.
    pub fn create_sparse_block(&self, device: usize, size: u64) -> Result<BlockId, EngineError> {
        self.make_block(device, size, false)
    }

    fn make_block(&self, device: usize, size: u64, counts: bool) -> Result<BlockId, EngineError> {
        self.enter(Operation::CreateBlock)?;
        let home = self.device(device)?;
        if size == 0 || whole_pages(size) != Some(size) {
            return Err(EngineError::invalid_value("a block that is not of whole pages"));
        }
        let mut memory = lock(&self.memory);
        let free = home.memory_bytes.saturating_sub(memory.used[device]);
        if counts && size > free {
            return Err(EngineError::OutOfMemory { device, requested: size, free });
        }
        let identity = Identity {
            kind: if counts { ObjectKind::Block } else { ObjectKind::SparseBlock },
            owner: self.process,
            id: NEXT_GENERATION.fetch_add(1, Ordering::Relaxed),
            size,
            physical: home.physical as u32,
            lifetime: Lifetime::Pinning,
        };
        let tag = if counts { self.tag(home, size) } else { String::new() };
        let Object { file, .. } = Object::create(identity, size, &tag)?;
        let counted = counts.then_some((device, size));
        if let Some((device, size)) = counted {
            memory.used[device] += size;
        }
        Ok(self.add_block(&mut memory, file, identity, false, counted))
    }

    fn add_block(
        &self,
        memory: &mut MemoryTable,
        file: OwnedFd,
        identity: Identity,
        imported: bool,
        counted: Option<(usize, u64)>,
    ) -> BlockId {
        let id = self.next_id();
        let block = Block { file: Arc::new(file), identity, imported, handles: 1, mappings: 0, counted };
        memory.blocks.blocks.insert(id, block);
        BlockId::new(id)
    }

    /// Lets go of one handle of a block. Its mappings keep it.
    ///
    /// # Errors
    /// `InvalidBlock`.
    pub fn release_block(&self, block: BlockId) -> Result<(), EngineError> {
        self.enter(Operation::ReleaseBlock)?;
        let mut memory = lock(&self.memory);
        memory.blocks.block(block)?;
        memory.blocks.blocks.entry(block.get()).and_modify(|found| found.handles -= 1);
        memory.settle(block.get());
        Ok(())
    }

    /// What is known of a block.
    ///
    /// # Errors
    /// `InvalidBlock`.
    pub fn block_info(&self, block: BlockId) -> Result<BlockInfo, EngineError> {
        let memory = lock(&self.memory);
        Ok(self.describe(block.get(), memory.blocks.block(block)?))
    }

    fn describe(&self, id: u64, block: &Block) -> BlockInfo {
        let physical = block.identity.physical as usize;
        BlockInfo {
            block: BlockId::new(id),
            device: self.devices.iter().position(|device| device.physical == physical),
            size: block.identity.size,
            generation: block.identity.id,
            imported: block.imported,
            sparse: block.identity.kind == ObjectKind::SparseBlock,
        }
    }

    /// Exports a block as a file descriptor, to be passed on by whatever road. It keeps the memory as a
    /// mapping does, also after the end of this process.
    ///
    /// # Errors
    /// `InvalidBlock`; `InvalidValue` for an imported one; `System`.
    pub fn export_block_fd(&self, block: BlockId) -> Result<OwnedFd, EngineError> {
        self.enter(Operation::ExportBlock)?;
        duplicate(&*self.own_block(block)?.0)
    }

    /// Exports a block as a number that another process of the same user, in the same pid namespace, can import
    /// while this process lives and has the block.
    ///
    /// # Errors
    /// `InvalidBlock`; `InvalidValue` for an imported one.
    pub fn export_block_number(&self, block: BlockId) -> Result<u64, EngineError> {
        self.enter(Operation::ExportBlock)?;
        let (file, identity) = self.own_block(block)?;
        let slot = Object::slot(&file);
        if slot >= 1 << FD_BITS {
            return Err(EngineError::invalid_value("a block whose descriptor has no room in a number"));
        }
        let check = check_of(identity.owner, identity.id);
        Ok(u64::from(identity.owner.pid) << PID_SHIFT | u64::from(slot) << CHECK_BITS | check)
    }

    fn own_block(&self, block: BlockId) -> Result<(Arc<OwnedFd>, Identity), EngineError> {
        let memory = lock(&self.memory);
        let found = memory.blocks.block(block)?;
        if found.imported {
            return Err(EngineError::invalid_value("export of a block that was imported"));
        }
        Ok((found.file.clone(), found.identity))
    }

    /// Imports a block by the file descriptor of [`export_block_fd`](Self::export_block_fd). Also the process that
    /// made it can, and has the same memory by two handles then.
    ///
    /// # Errors
    /// `InvalidHandle` for a descriptor of something else; `System`.
    pub fn import_block_fd(&self, fd: OwnedFd) -> Result<BlockId, EngineError> {
        self.enter(Operation::ImportBlock)?;
        let sparse = duplicate(&fd)?;
        let object = Object::adopt(fd, ObjectKind::Block, false)
            .or_else(|_| Object::adopt(sparse, ObjectKind::SparseBlock, false));
        let Object { file, identity, .. } = object?;
        Ok(self.add_block(&mut lock(&self.memory), file, identity, true, None))
    }

    /// Imports a block by the number of [`export_block_number`](Self::export_block_number).
    ///
    /// # Errors
    /// `InvalidHandle` for a number that names nothing (any more); `OwnProcess`; `ExporterGone`; `PermissionDenied`;
    /// `System`.
    pub fn import_block_number(&self, number: u64) -> Result<BlockId, EngineError> {
        self.enter(Operation::ImportBlock)?;
        let pid = (number >> PID_SHIFT) as u32;
        let exporter = ProcessId::of(pid).ok_or(EngineError::ExporterGone { pid })?;
        refuse_own(exporter, self.process)?;
        let fd = (number >> CHECK_BITS) as u32 & ((1 << FD_BITS) - 1);
        let handle =
            Handle { kind: HandleKind::Bytes, exporter, fd, id: 0, edition: Edition::default(), size: 0 };
        let Object { file, identity, .. } = Object::reach(&handle, ObjectKind::Block, true)?;
        if number & ((1 << CHECK_BITS) - 1) != check_of(exporter, identity.id) {
            return Err(EngineError::InvalidHandle { reason: "its exporter has released the block" });
        }
        Ok(self.add_block(&mut lock(&self.memory), file, identity, true, None))
    }

    /// The process that made a block, as its number of [`export_block_number`](Self::export_block_number) says.
    pub fn exporter_of_number(number: u64) -> u32 {
        (number >> PID_SHIFT) as u32
    }

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
        let range = Range { space, placed: BTreeMap::new(), retired: Vec::new() };
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
        if !range.placed.is_empty() {
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
        let overlaps = range.placed.range(..address.get() + size).next_back();
        if overlaps.is_some_and(|(base, placed)| base + placed.mapping.size() > address.get()) {
            return Err(EngineError::invalid_value("something is mapped there"));
        }
        let at = (address.get() - range.space.base() as u64) as usize;
        let slice = Slice { start: offset, size, grants: Some(Grants::new(self.devices.len(), None)) };
        let page = Page::map(&*file, false)?;
        let content = Content { file: &file, page, identity, device, writable: true, imported };
        let place = Place::Window(range.space.clone());
        let mapping = Arc::new(Mapping::of_slice(place, at, size as usize, slice, content)?);
        let placed = Placed { mapping: mapping.clone(), block: block.get(), offset };
        range.placed.insert(address.get(), placed);
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
        let (range, bases) = memory.blocks.filling(address, size)?;
        let mut blocks = Vec::new();
        for base in &bases {
            if let Some(placed) = range.placed.remove(base) {
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
            memory.settle(block);
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
        let (range, bases) = memory.blocks.filling(address, size)?;
        let homes = || bases.iter().filter_map(|base| range.placed.get(base));
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
        let (_, placed) = placed_at(&memory, address).ok_or(EngineError::UnknownAddress { address })?;
        Ok(placed.mapping.grants.as_ref().and_then(|grants| grants.of(device)))
    }

    /// The mapped block at an address; `None` if no block is mapped there: the address may be other memory, or none.
    pub fn mapped_block(&self, address: Address) -> Option<MappedBlock> {
        let memory = lock(&self.memory);
        let (range, placed) = placed_at(&memory, address)?;
        let block = memory.blocks.blocks.get(&placed.block)?;
        Some(MappedBlock {
            block: self.describe(placed.block, block),
            base: Address::new(placed.mapping.base()),
            size: placed.mapping.size(),
            offset: placed.offset,
            reservation: (Address::new(range.space.base() as u64), range.space.len() as u64),
        })
    }

    /// The reservation in which an address lies: first address and size.
    pub fn reservation_of(&self, address: Address) -> Option<(Address, u64)> {
        let memory = lock(&self.memory);
        let (_, range) = memory.blocks.ranges.range(..=address.get()).next_back()?;
        let found = (Address::new(range.space.base() as u64), range.space.len() as u64);
        (address.get() < range.end()).then_some(found)
    }

    /// One more handle of the block that is mapped at an address, to be released as well.
    ///
    /// # Errors
    /// `UnknownAddress` where no block is mapped.
    pub fn retain_block_at(&self, address: Address) -> Result<BlockId, EngineError> {
        let mut memory = lock(&self.memory);
        let block = placed_at(&memory, address).map(|(_, placed)| placed.block);
        let block = block.ok_or(EngineError::UnknownAddress { address })?;
        memory.blocks.blocks.entry(block).and_modify(|found| found.handles += 1);
        Ok(BlockId::new(block))
    }
}

fn placed_at(memory: &MemoryTable, address: Address) -> Option<(&Range, &Placed)> {
    let (_, range) = memory.blocks.ranges.range(..=address.get()).next_back()?;
    let (base, placed) = range.placed.range(..=address.get()).next_back()?;
    (address.get() - base < placed.mapping.size()).then_some((range, placed))
}

/// Tells a block from others that come to have its number in the same or a later process.
fn check_of(owner: ProcessId, generation: u64) -> u64 {
    let mixed = (owner.start ^ generation.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed >> (u64::BITS - CHECK_BITS)
}
