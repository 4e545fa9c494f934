//! The table of device addresses, and plain device memory ("Memory Management" in `cuda.h`).
//!
//! Blocks of less than 2 MiB share pages of 2 MiB, and a new block takes the lowest free place, as measured on two
//! H200 with driver 580.159.04: a kernel with access to one of them can access its neighbours.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;

use device_ipc_mock_engine::{Access, Address, BlockId, Machine};

use crate::capture::reject_unsafe_call;
use crate::context::{Context, context, current};
use crate::directory::Directory;
use crate::entry::driver;
use crate::ffi::{AllocationProp, Out};
use crate::gaps::Gaps;
use crate::host::{HostBlock, RetiredHostMemory};
use crate::ipc::OpenedMemory;
use crate::pool::PoolTable;
use crate::simulator::{Objects, simulator};
use crate::status::{Result, Status};

/// The page size of device memory, which small blocks share, and the granularity of virtual memory.
pub(crate) const PAGE: u64 = 2 << 20;

/// The unit of the sizes of small blocks.
const UNIT: u64 = 512;

/// Ratio of the address space of a device to its memory, so that fragmentation does not matter.
const ADDRESSES_PER_BYTE: u64 = 4;

/// A range of known memory: an allocation or a mapping.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) base: u64,
    pub(crate) size: u64,
    /// Ordinal of the device that the driver reports.
    pub(crate) device: usize,
    /// The context that owns the block; 0 for none.
    pub(crate) context: u64,
    /// `CU_POINTER_ATTRIBUTE_BUFFER_ID`: unique for each allocation of a process.
    pub(crate) id: u64,
    pub(crate) kind: Kind,
}

/// The origin of a block.
#[derive(Debug)]
pub(crate) enum Kind {
    /// `cuMemAlloc`, in this chunk.
    Plain { chunk: u64 },
    /// `cuIpcOpenMemHandle`.
    Opened(OpenedMemory),
    /// `cuMemAllocAsync` and similar calls, in this pool at this offset.
    Pooled { pool: u64, offset: u64 },
    /// `cuMemPoolImportPointer`.
    PoolImported { pool: u64 },
    /// `cuMemMap`.
    Virtual,
    /// `cuMemHostAlloc`, `cuMemHostRegister` or `cuMemAllocManaged`.
    Host(HostBlock),
}

impl Block {
    pub(crate) fn end(&self) -> u64 {
        self.base + self.size
    }
}

/// Physical memory that is divided into plain blocks.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) block: BlockId,
    pub(crate) size: u64,
    device: usize,
    context: u64,
    gaps: Gaps,
}

#[derive(Debug)]
struct Arena {
    base: u64,
    gaps: Gaps,
}

/// All memory that this process knows.
#[derive(Debug, Default)]
pub(crate) struct MemoryTable {
    pub(crate) blocks: BTreeMap<u64, Block>,
    pub(crate) chunks: BTreeMap<u64, Chunk>,
    /// The arguments of `cuMemCreate`, by block.
    pub(crate) properties: HashMap<u64, AllocationProp>,
    arenas: Vec<Option<Arena>>,
    last_id: u64,
}

impl MemoryTable {
    pub(crate) fn new(devices: usize) -> Self {
        Self { arenas: (0..devices).map(|_| None).collect(), ..Self::default() }
    }

    pub(crate) fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    pub(crate) fn insert(&mut self, block: Block) {
        self.blocks.insert(block.base, block);
    }

    /// Returns the block that contains an address.
    pub(crate) fn find(&self, address: u64) -> Option<&Block> {
        let (_, block) = self.blocks.range(..=address).next_back()?;
        (address < block.end()).then_some(block)
    }

    /// Returns the block that begins at an address.
    ///
    /// # Errors
    /// `INVALID_VALUE`.
    pub(crate) fn at_base(&self, address: u64) -> Result<&Block> {
        self.blocks.get(&address).ok_or(Status::INVALID_VALUE)
    }

    /// Returns the block that contains these bytes, or their first block where further mappings follow; `None` if
    /// the first byte is not known.
    ///
    /// # Errors
    /// `INVALID_VALUE` where the bytes exceed the block.
    pub(crate) fn containing(&self, address: u64, len: u64) -> Result<Option<&Block>> {
        let Some(first) = self.find(address) else { return Ok(None) };
        let end = address.checked_add(len).ok_or(Status::INVALID_VALUE)?;
        let mut reached = first.end();
        while reached < end {
            let both = matches!(first.kind, Kind::Virtual);
            let next = self.blocks.get(&reached).filter(|next| both && matches!(next.kind, Kind::Virtual));
            reached = next.ok_or(Status::INVALID_VALUE)?.end();
        }
        Ok(Some(first))
    }

    /// Returns whether kernels of a context may access the page of an address, and the range of bytes for which
    /// this answer holds.
    pub(crate) fn kernel_access(&self, context: &Context, address: u64) -> Option<(u64, u64, bool)> {
        let of =
            |device| device == context.device || crate::simulator::lock(&context.peers).contains(&device);
        if let Some((&base, chunk)) = self.chunks.range(..=address).next_back()
            && address < base + chunk.size
        {
            return Some((base, base + chunk.size, of(chunk.device)));
        }
        let (_, block) = self.blocks.range(..=address).next_back()?;
        match &block.kind {
            Kind::Opened(opened) if address < opened.range.0 + opened.range.1 => {
                Some((opened.range.0, opened.range.0 + opened.range.1, of(block.device)))
            }
            _ => None,
        }
    }

    /// Allocates a block in a chunk, or in a new one, and returns its address.
    fn allocate(&mut self, machine: &Machine, context: &Context, size: u64) -> Result<u64> {
        let unit = if size < PAGE { UNIT } else { PAGE };
        if unit == UNIT {
            let own = |chunk: &&mut Chunk| chunk.context == context.handle && chunk.size == PAGE;
            for (base, chunk) in self.chunks.iter_mut().filter(|(_, chunk)| own(chunk)) {
                if let Some(offset) = chunk.gaps.take(size, unit) {
                    return Ok(base + offset);
                }
            }
        }
        let whole = size.checked_next_multiple_of(PAGE).ok_or(Status::OUT_OF_MEMORY)?;
        let base = self.place(machine, context.device, whole)?;
        let made = (|| {
            let block = machine.create_block(context.device, whole)?;
            machine.map_block(Address::new(base), whole, 0, block).inspect_err(|_| {
                let _ = machine.release_block(block);
            })?;
            for device in 0..machine.devices().len() {
                // Copies work between all devices; the access of kernels is checked by context.
                set_access_without_check(machine, base, whole, device, Access::ReadWrite)?;
            }
            Ok(block)
        })();
        let block = made.inspect_err(|_: &Status| self.give_back(context.device, base, whole))?;
        let mut gaps = Gaps::new(0, whole);
        let _ = gaps.take(size, unit);
        let chunk = Chunk { block, size: whole, device: context.device, context: context.handle, gaps };
        self.chunks.insert(base, chunk);
        Ok(base)
    }

    fn place(&mut self, machine: &Machine, device: usize, size: u64) -> Result<u64> {
        let arena = match &mut self.arenas[device] {
            Some(arena) => arena,
            none => {
                let bytes = machine.devices()[device].memory_bytes.saturating_mul(ADDRESSES_PER_BYTE);
                let len = bytes.checked_next_multiple_of(PAGE).ok_or(Status::OUT_OF_MEMORY)?;
                let base = machine.reserve(len, PAGE)?.get();
                none.insert(Arena { base, gaps: Gaps::new(0, len) })
            }
        };
        let offset = arena.gaps.take(size, PAGE).ok_or(Status::OUT_OF_MEMORY)?;
        Ok(arena.base + offset)
    }

    fn give_back(&mut self, device: usize, base: u64, size: u64) {
        if let Some(arena) = &mut self.arenas[device] {
            arena.gaps.give_back(base - arena.base, size, PAGE);
        }
    }

    /// Removes a block of any kind, and releases its resources. It does not wait for work: it returns what must
    /// wait, so that the caller does so without the lock that the work may need.
    #[must_use = "host memory must be unmapped without the lock"]
    pub(crate) fn remove(
        &mut self,
        machine: &Machine,
        base: u64,
        pools: &mut PoolTable,
        directory: Option<&mut Directory>,
    ) -> Option<RetiredHostMemory> {
        let block = self.blocks.remove(&base)?;
        match block.kind {
            Kind::Plain { chunk } => {
                if let Some(directory) = directory {
                    directory.freed(base);
                }
                self.free_in_chunk(machine, chunk, base, block.size);
            }
            Kind::Opened(opened) => opened.close(machine),
            Kind::Pooled { pool, offset } => pools.give_back(machine, pool, offset, block.size),
            Kind::PoolImported { pool } => pools.remove_one(machine, pool),
            Kind::Virtual => {
                let _ = machine.unmap_blocks(Address::new(base), block.size);
            }
            Kind::Host(host) => return Some(RetiredHostMemory { base, mapped: host.mapped }),
        }
        None
    }

    fn free_in_chunk(&mut self, machine: &Machine, base: u64, address: u64, size: u64) {
        let Some(chunk) = self.chunks.get_mut(&base) else { return };
        let unit = if size < PAGE { UNIT } else { PAGE };
        chunk.gaps.give_back(address - base, size, unit);
        if !chunk.gaps.is_whole() {
            return;
        }
        let (block, size, device) = (chunk.block, chunk.size, chunk.device);
        self.chunks.remove(&base);
        let _ = machine.unmap_blocks(Address::new(base), size);
        let _ = machine.release_block(block);
        self.give_back(device, base, size);
    }

    /// Removes all memory of a context.
    pub(crate) fn remove_all_of(
        &mut self,
        machine: &Machine,
        context: u64,
        pools: &mut PoolTable,
        mut directory: Option<&mut Directory>,
    ) -> Vec<RetiredHostMemory> {
        let own: Vec<u64> =
            self.blocks.values().filter(|block| block.context == context).map(|block| block.base).collect();
        let remove = |base| self.remove(machine, base, pools, directory.as_deref_mut());
        own.into_iter().filter_map(remove).collect()
    }
}

/// Sets the access of a device, with or without peer access: copies of the driver need none.
fn set_access_without_check(
    machine: &Machine,
    base: u64,
    size: u64,
    device: usize,
    access: Access,
) -> Result {
    machine.grant_access(Address::new(base), size, device, Some(access)).map_err(Status::from)
}

/// Gives all devices' copies access to a mapping.
pub(crate) fn give_all_devices_access(machine: &Machine, base: u64, size: u64) -> Result {
    (0..machine.devices().len())
        .try_for_each(|device| set_access_without_check(machine, base, size, device, Access::ReadWrite))
}

driver! {
    /// Allocates device memory.
    fn cuMemAlloc_v2(out: Out<u64>, size: usize) {
        let context = current()?;
        reject_unsafe_call()?;
        if size == 0 || out.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        let simulator = simulator()?;
        let mut objects = simulator.objects();
        let Objects { memory, directory, .. } = &mut *objects;
        let size = size as u64;
        let base = memory.allocate(&simulator.machine, &context, size)?;
        let id = memory.next_id();
        let chunk = memory.chunks.range(..=base).next_back().map_or(base, |(chunk, _)| *chunk);
        let kind = Kind::Plain { chunk };
        memory.insert(Block { base, size, device: context.device, context: context.handle, id, kind });
        if let Some(directory) = directory {
            directory.clear_slot(base);
        }
        out.put(base)
    }

    /// Frees device memory, after all work of its context's streams.
    fn cuMemFree_v2(address: u64) {
        current()?;
        reject_unsafe_call()?;
        if address == 0 {
            return Ok(());
        }
        let simulator = simulator()?;
        let freeable = |objects: &Objects| {
            let block = objects.memory.at_base(address)?;
            let waits = match &block.kind {
                Kind::Plain { .. } => true,
                Kind::Host(host) if host.managed => true,
                // The pool reuses it at once.
                Kind::Pooled { .. } | Kind::PoolImported { .. } => false,
                _ => return Err(Status::INVALID_VALUE),
            };
            Ok((block.context, block.id, waits))
        };
        let (owner, id, waits) = freeable(&simulator.objects())?;
        if waits {
            context(owner)?.synchronize_exclusively()?;
        }
        let mut objects = simulator.objects();
        // Another thread may have freed it meanwhile.
        if freeable(&objects)?.1 != id {
            return Err(Status::INVALID_VALUE);
        }
        let Objects { memory, pools, directory, .. } = &mut *objects;
        let remains = memory.remove(&simulator.machine, address, pools, directory.as_mut());
        drop(objects);
        if let Some(remains) = remains {
            remains.give_back(&simulator.machine);
        }
        Ok(())
    }

    /// Returns the free and the total bytes of the current device, as used by this process.
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let context = current()?;
        let simulator = simulator()?;
        let (left, all) = simulator.machine.memory_info(context.device)?;
        let pooled = simulator.objects().pools.used(context.device);
        free.put(left.saturating_sub(pooled) as usize)?;
        total.put(all as usize)
    }

    /// Returns the block that contains an address.
    fn cuMemGetAddressRange_v2(base: Out<u64>, size: Out<usize>, address: u64) {
        current()?;
        let objects = simulator()?.objects();
        let block = objects.memory.find(address).ok_or(Status::NOT_FOUND)?;
        let mapped = matches!(block.kind, Kind::Virtual);
        if mapped && (0..simulator()?.devices).all(|device| !is_accessible(address, device)) {
            return Err(Status::NOT_FOUND);
        }
        base.put_if_not_null(block.base);
        size.put_if_not_null(block.size as usize);
        Ok(())
    }

}

/// Returns whether a device has access to mapped memory.
fn is_accessible(address: u64, device: usize) -> bool {
    let access = simulator().map(|simulator| simulator.machine.access_of(Address::new(address), device));
    matches!(access, Ok(Ok(Some(_))))
}

/// Returns the ordinal of the device that a location names.
pub(crate) fn device_of(location: crate::ffi::Location) -> Result<usize> {
    if location.kind != crate::ffi::Location::DEVICE {
        return Err(Status::INVALID_VALUE);
    }
    crate::context::device(location.id as c_int)
}
