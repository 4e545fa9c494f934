//! Blocks of physical memory: create, export, import, release.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::sharing::Part;
use super::state::Machine;
use crate::memory::{Block, MemoryTable};
use crate::model::{Access, Address, BlockId, EngineError, Lifetime, Operation};
use crate::shared::{ExportEpoch, Handle, HandleKind, Identity, Object, ObjectKind, refuse_own};
use crate::system::{ProcessId, duplicate, lock, whole_pages};

/// The number of a block has the exporter's pid, the descriptor number (`fs.nr_open` is 2^20 by default) and a check,
/// from the highest bit to the lowest.
const FD_BITS: u32 = 20;
const CHECK_BITS: u32 = 22;
const PID_SHIFT: u32 = FD_BITS + CHECK_BITS;

/// The properties of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockInfo {
    /// The block.
    pub block: BlockId,
    /// Ordinal of the home device; `None` if the device is not visible to this process.
    pub device: Option<usize>,
    /// Size in bytes: whole pages, except for imported allocations.
    pub size: u64,
    /// A number that no other memory of the creating process has had.
    pub generation: u64,
    /// Whether the block was imported, also into the process that created it.
    pub imported: bool,
    /// Whether [`Machine::create_sparse_block`] created it.
    pub sparse: bool,
}

impl Machine {
    /// Creates a block of physical memory of `size` bytes, whole pages, all zeros.
    ///
    /// The block counts as used memory until its last handle is released and its last mapping is removed.
    ///
    /// # Errors
    /// `InvalidDevice`; `InvalidValue` for a size that is 0 or not whole pages; `OutOfMemory`; `System`.
    pub fn create_block(&self, device: usize, size: u64) -> Result<BlockId, EngineError> {
        self.make_block(device, size, true)
    }

    /// Creates a block that does not count as used memory and takes memory only where it is written.
    ///
    /// For simulators of pools, which allocate from the block and do their own accounting.
    ///
    /// # Errors
    /// As [`create_block`](Self::create_block).
    pub fn create_sparse_block(&self, device: usize, size: u64) -> Result<BlockId, EngineError> {
        self.make_block(device, size, false)
    }

    fn make_block(&self, device: usize, size: u64, counts: bool) -> Result<BlockId, EngineError> {
        self.enter(Operation::CreateBlock)?;
        let home = self.device(device)?;
        if size == 0 || whole_pages(size) != Some(size) {
            return Err(EngineError::invalid_value("a block whose size is not whole pages"));
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
        let (writable, exporter) = (true, None);
        let block = Block {
            file: Arc::new(file),
            identity,
            imported,
            writable,
            exporter,
            handles: 1,
            mappings: 0,
            counted,
        };
        memory.blocks.blocks.insert(id, block);
        BlockId::new(id)
    }

    /// Releases one handle of a block. Mappings of the block keep it alive.
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

    /// Returns the properties of a block.
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

    /// Exports a block as a file descriptor, which can be sent over any transport and keeps the memory alive, also
    /// after the termination of this process.
    ///
    /// # Errors
    /// `InvalidBlock`; `InvalidValue` for an imported one; `System`.
    pub fn export_block_fd(&self, block: BlockId) -> Result<OwnedFd, EngineError> {
        self.enter(Operation::ExportBlock)?;
        duplicate(&*self.own_block(block)?.0)
    }

    /// Exports a block as a number, which another process of the same user and pid namespace can import while this
    /// process is alive and has the block.
    ///
    /// # Errors
    /// `InvalidBlock`; `InvalidValue` for an imported one.
    pub fn export_block_number(&self, block: BlockId) -> Result<u64, EngineError> {
        self.enter(Operation::ExportBlock)?;
        let (file, identity) = self.own_block(block)?;
        let slot = Object::slot(&file);
        if slot >= 1 << FD_BITS {
            return Err(EngineError::invalid_value("a block whose descriptor number exceeds 20 bits"));
        }
        let check = check_of(identity.owner, identity.id);
        Ok(u64::from(identity.owner.pid) << PID_SHIFT | u64::from(slot) << CHECK_BITS | check)
    }

    fn own_block(&self, block: BlockId) -> Result<(Arc<OwnedFd>, Identity), EngineError> {
        let memory = lock(&self.memory);
        let found = memory.blocks.block(block)?;
        if found.imported {
            return Err(EngineError::invalid_value("an imported block: only its creator can export it"));
        }
        Ok((found.file.clone(), found.identity))
    }

    /// Imports a block by the file descriptor of [`export_block_fd`](Self::export_block_fd). The process that
    /// created it can do so too, and then has two handles of the same memory.
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
    /// `InvalidHandle` for an invalid or stale number; `OwnProcess`; `ExporterGone`; `PermissionDenied`;
    /// `System`.
    pub fn import_block_number(&self, number: u64) -> Result<BlockId, EngineError> {
        self.enter(Operation::ImportBlock)?;
        let pid = (number >> PID_SHIFT) as u32;
        let exporter = ProcessId::of(pid).ok_or(EngineError::ExporterGone { pid })?;
        refuse_own(exporter, self.process)?;
        let fd = (number >> CHECK_BITS) as u32 & ((1 << FD_BITS) - 1);
        let handle =
            Handle { kind: HandleKind::Bytes, exporter, fd, id: 0, epoch: ExportEpoch::default(), size: 0 };
        let Object { file, identity, .. } = Object::open(&handle, ObjectKind::Block, true)?;
        if number & ((1 << CHECK_BITS) - 1) != check_of(exporter, identity.id) {
            return Err(EngineError::InvalidHandle { reason: "the exporter has released the block" });
        }
        Ok(self.add_block(&mut lock(&self.memory), file, identity, true, None))
    }

    /// Imports an allocation of another process as a block: without an address, to be mapped as a whole in a reserved range of
    /// `device`.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn import_memory(
        &self,
        part: Part<'_>,
        device: usize,
        access: Access,
    ) -> Result<BlockId, EngineError> {
        self.enter(Operation::ImportMemory)?;
        let imported = self.import_for(part, device, access)?;
        let Object { file, identity, .. } = imported.object;
        let mut memory = lock(&self.memory);
        let block = self.add_block(&mut memory, file, identity, true, None);
        memory.blocks.blocks.entry(block.get()).and_modify(|found| {
            found.writable = access == Access::ReadWrite;
            found.exporter = imported.exporter.map(|(exporter, epoch)| (Arc::new(exporter), epoch));
        });
        Ok(block)
    }

    /// Returns the pid of the exporter in a number of [`export_block_number`](Self::export_block_number).
    pub fn exporter_of_number(number: u64) -> u32 {
        (number >> PID_SHIFT) as u32
    }

    /// Returns an additional handle of the block that is mapped at an address. It must be released too.
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

/// Returns bits that distinguish a block from later ones with its descriptor number and pid.
fn check_of(owner: ProcessId, generation: u64) -> u64 {
    let mixed = (owner.start ^ generation.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed >> (u64::BITS - CHECK_BITS)
}
