//! Blocks of physical memory: make, export, import, release.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::state::Machine;
use crate::memory::{Block, MemoryTable};
use crate::model::{Address, BlockId, EngineError, Lifetime, Operation};
use crate::shared::{ExportEpoch, Handle, HandleKind, Identity, Object, ObjectKind, refuse_own};
use crate::system::{ProcessId, duplicate, lock, whole_pages};

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
            id: self.next_generation(),
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
        memory.remove_block_if_unused(block.get());
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

    pub(super) fn describe(&self, id: u64, block: &Block) -> BlockInfo {
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
            Handle { kind: HandleKind::Bytes, exporter, fd, id: 0, epoch: ExportEpoch::default(), size: 0 };
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

    /// One more handle of the block that is mapped at an address, to be released as well.
    ///
    /// # Errors
    /// `UnknownAddress` where no block is mapped.
    pub fn retain_block_at(&self, address: Address) -> Result<BlockId, EngineError> {
        let mut memory = lock(&self.memory);
        let block = memory.blocks.mapping_at(address).map(|(_, found)| found.block);
        let block = block.ok_or(EngineError::UnknownAddress { address })?;
        memory.blocks.blocks.entry(block).and_modify(|found| found.handles += 1);
        Ok(BlockId::new(block))
    }
}

/// Tells a block from others that come to have its number in the same or a later process.
fn check_of(owner: ProcessId, generation: u64) -> u64 {
    let mixed = (owner.start ^ generation.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed >> (u64::BITS - CHECK_BITS)
}
