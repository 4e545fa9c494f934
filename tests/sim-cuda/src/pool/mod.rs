//! Memory pools ("Stream Ordered Memory Allocator" in `cuda.h`).
//!
//! A pool is one block of physical memory, whose pages are mapped at the pool's addresses on demand. The first page
//! has the number by which processes identify the pool. An importer has the whole block and is not notified of a
//! free: as on a GPU, it reads the present content.

mod allocation;
mod attributes;
mod chunks;
mod life;
mod sharing;

use std::collections::{HashMap, HashSet};
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

use device_ipc_mock_engine::{Access, Address, BlockId, Machine};

use crate::memory::PAGE;
use crate::simulator::next_handle;
use crate::status::{Result, Status};
use chunks::Chunks;

/// A pool, created or imported.
#[derive(Debug)]
pub(crate) struct Pool {
    device: usize,
    block: BlockId,
    base: u64,
    size: u64,
    /// Bytes from the base on that stay mapped.
    mapped: u64,
    nonce: u64,
    handle_types: c_int,
    is_default: bool,
    imported: bool,
    exported: bool,
    /// Destroyed by its owner; removed with the last allocation.
    destroyed: bool,
    /// The memory of the pool; an imported pool has none.
    chunks: Chunks,
    /// Number of allocations, or of imported pointers.
    live: u64,
    used: u64,
    most_used: u64,
    most_reserved: u64,
    release_threshold: u64,
    reuse: [c_int; 3],
}

/// The pools of a process.
#[derive(Debug, Default)]
pub(crate) struct PoolTable {
    pools: HashMap<u64, Pool>,
    /// Imported pools that were destroyed: a second destroy is not an error.
    closed: HashSet<u64>,
    /// The default pool of each device, created on demand, and the current one; 0 for none.
    defaults: Vec<u64>,
    current: Vec<u64>,
}

impl PoolTable {
    pub(crate) fn new(devices: usize) -> Self {
        Self { defaults: vec![0; devices], current: vec![0; devices], ..Self::default() }
    }

    fn get(&self, handle: u64) -> Result<&Pool> {
        self.pools.get(&handle).filter(|pool| !pool.destroyed).ok_or(Status::INVALID_VALUE)
    }

    fn get_mut(&mut self, handle: u64) -> Result<&mut Pool> {
        self.pools.get_mut(&handle).filter(|pool| !pool.destroyed).ok_or(Status::INVALID_VALUE)
    }

    /// Returns the bytes of a device that this process's pools have allocated.
    pub(crate) fn used(&self, device: usize) -> u64 {
        let own = self.pools.values().filter(|pool| pool.device == device && !pool.imported);
        own.map(|pool| pool.used).sum()
    }

    /// Returns the handle types of a pool, and its device.
    pub(crate) fn handle_types(&self, handle: u64) -> c_int {
        self.pools.get(&handle).map_or(0, |pool| pool.handle_types)
    }

    fn default_of(&mut self, machine: &Machine, device: usize) -> Result<u64> {
        if self.defaults[device] == 0 {
            let size = whole(machine.devices()[device].memory_bytes)?;
            let block = machine.create_sparse_block(device, size + PAGE)?;
            self.defaults[device] = self.add(machine, block, 0, true, false)?;
        }
        Ok(self.defaults[device])
    }

    fn current_of(&mut self, machine: &Machine, device: usize) -> Result<u64> {
        match self.current[device] {
            0 => self.default_of(machine, device),
            pool => Ok(pool),
        }
    }

    /// Maps the memory of a pool, and adds the pool.
    fn add(
        &mut self,
        machine: &Machine,
        block: BlockId,
        handle_types: c_int,
        is_default: bool,
        imported: bool,
    ) -> Result<u64> {
        let info = machine.block_info(block)?;
        let base = machine.reserve(info.size, PAGE)?;
        // An importer maps all present and future memory.
        let mapped = if imported { info.size } else { PAGE };
        machine.map_block(base, mapped, 0, block)?;
        // A pool of a device that is not visible can be imported, and access can be given to a visible one.
        let device = info.device.unwrap_or(0);
        let mut pool = Pool {
            device,
            block,
            base: base.get(),
            size: info.size,
            mapped,
            nonce: 0,
            handle_types,
            is_default,
            imported,
            exported: false,
            destroyed: false,
            chunks: Chunks::new(base.get(), block, info.size),
            live: 0,
            used: 0,
            most_used: 0,
            most_reserved: 0,
            release_threshold: 0,
            reuse: [1; 3],
        };
        if let Some(home) = info.device {
            pool.set_access(machine, home, Some(Access::ReadWrite))?;
        }
        if imported {
            pool.nonce = pool.number().load(Ordering::Acquire);
            let is_it = |(_, known): &(&u64, &Pool)| known.imported && known.nonce == pool.nonce;
            let known = self.pools.iter().find(is_it).map(|(handle, _)| *handle);
            if let Some(known) = known {
                // A process has a pool once, whatever the number of imports.
                pool.unmap(machine);
                return Ok(known);
            }
        } else {
            pool.nonce = getrandom::u64().map_err(|_| Status::OPERATING_SYSTEM)?;
            pool.number().store(pool.nonce, Ordering::Release);
        }
        let handle = next_handle();
        self.pools.insert(handle, pool);
        Ok(handle)
    }

    /// Frees an allocation.
    pub(crate) fn give_back(&mut self, machine: &Machine, handle: u64, offset: u64, size: u64) {
        let Some(pool) = self.pools.get_mut(&handle) else { return };
        pool.chunks.give_back(machine, offset, size, pool.release_threshold);
        pool.used -= Chunks::rounded(size);
        self.remove_one(machine, handle);
    }

    /// Removes one allocation or imported pointer of a pool.
    pub(crate) fn remove_one(&mut self, machine: &Machine, handle: u64) {
        if let Some(pool) = self.pools.get_mut(&handle) {
            pool.live -= 1;
        }
        self.settle(machine, handle);
    }

    /// Removes a destroyed pool without allocations.
    fn settle(&mut self, machine: &Machine, handle: u64) {
        if self.pools.get(&handle).is_some_and(|pool| pool.destroyed && pool.live == 0)
            && let Some(mut pool) = self.pools.remove(&handle)
        {
            if pool.imported {
                self.closed.insert(handle);
            }
            pool.unmap(machine);
        }
    }
}

impl Pool {
    fn unmap(&mut self, machine: &Machine) {
        self.chunks.release_all(machine);
        let _ = machine.unmap_blocks(Address::new(self.base), self.mapped);
        let _ = machine.unreserve(Address::new(self.base), self.size);
        let _ = machine.release_block(self.block);
    }

    /// Returns the word by which processes identify the pool.
    fn number(&self) -> &AtomicU64 {
        // SAFETY: the first page is mapped while the pool is in the table, begins with this aligned word, and is
        // only accessed as an atomic, also by other processes.
        unsafe { AtomicU64::from_ptr(self.base as *mut u64) }
    }

    /// Sets the access of a device to all memory of a pool.
    fn set_access(&mut self, machine: &Machine, device: usize, access: Option<Access>) -> Result {
        machine.set_access(Address::new(self.base), self.mapped, device, access)?;
        self.chunks.set_access(machine, device, access)
    }

    fn take(&mut self, machine: &Machine, size: u64) -> Result<u64> {
        let offset = self.chunks.take(machine, size)?;
        self.live += 1;
        self.used += Chunks::rounded(size);
        self.most_used = self.most_used.max(self.used);
        self.most_reserved = self.most_reserved.max(self.chunks.reserved());
        Ok(offset)
    }
}

fn whole(bytes: u64) -> Result<u64> {
    bytes.checked_next_multiple_of(PAGE).ok_or(Status::INVALID_VALUE)
}
