//! Pools and their allocations in other processes. An importer is not notified of a free.

use std::ffi::{c_int, c_ulonglong, c_void};

use crate::context::current;
use crate::entry::driver;
use crate::ffi::{In, Out, PoolPointer};
use crate::memory::{Block, Kind, PAGE};
use crate::simulator::{Objects, simulator};
use crate::status::Status;
use crate::vmm::{POSIX_FD, descriptor, give};

const POINTER_MAGIC: u64 = u64::from_le_bytes(*b"simpool\x01");

driver! {
    /// Exports a pool with the handle type as a file descriptor.
    fn cuMemPoolExportToShareableHandle(out: *mut c_void, handle: u64, kind: c_int, flags: c_ulonglong) {
        let simulator = simulator()?;
        let mut objects = simulator.objects();
        let pool = objects.pools.get_mut(handle)?;
        if flags != 0 || kind != POSIX_FD || pool.handle_types & kind == 0 || pool.imported {
            return Err(Status::INVALID_VALUE);
        }
        give(out, simulator.machine.export_block_fd(pool.block)?)?;
        pool.exported = true;
        Ok(())
    }

    /// Imports a pool. It does not allocate.
    fn cuMemPoolImportFromShareableHandle(
        out: Out<u64>,
        os_handle: *const c_void,
        kind: c_int,
        flags: c_ulonglong,
    ) {
        let simulator = simulator()?;
        let machine = &simulator.machine;
        if flags != 0 || kind != POSIX_FD || out.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        let block = machine.import_block_fd(descriptor(os_handle)?).map_err(|_| Status::UNKNOWN)?;
        if !machine.block_info(block)?.sparse {
            // A descriptor of physical memory that is not a pool.
            machine.release_block(block)?;
            return Err(Status::NOT_SUPPORTED);
        }
        out.put(simulator.objects().pools.add(machine, block, 0, false, true)?)
    }

    /// Returns the bytes that name an allocation of a pool that was exported.
    fn cuMemPoolExportPointer(out: Out<PoolPointer>, address: u64) {
        current()?;
        let objects = simulator()?.objects();
        let block = objects.memory.at_base(address)?;
        let Kind::Pooled { pool, offset } = block.kind else { return Err(Status::INVALID_VALUE) };
        let pool = objects.pools.pools.get(&pool).ok_or(Status::INVALID_VALUE)?;
        if !pool.exported {
            return Err(Status::INVALID_VALUE);
        }
        let physical = pool.chunks.physical(offset).ok_or(Status::INVALID_VALUE)?;
        let words = [POINTER_MAGIC, pool.nonce, physical, block.size];
        let mut reserved = [0; 64];
        for (at, word) in words.into_iter().enumerate() {
            reserved[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
        }
        out.put(PoolPointer { reserved })
    }

    /// Returns the address of an exported allocation in an imported pool, whether or not it was freed.
    fn cuMemPoolImportPointer(out: Out<u64>, handle: u64, data: In<PoolPointer>) {
        let context = current()?;
        let bytes = data.get()?.reserved;
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at * 8 + index]));
        let [magic, nonce, offset, size] = [0, 1, 2, 3].map(word);
        let mut objects = simulator()?.objects();
        let Objects { memory, pools, .. } = &mut *objects;
        let pool = pools.get_mut(handle)?;
        let inside = offset >= PAGE && offset.checked_add(size).is_some_and(|end| end <= pool.size);
        let wrong = magic != POINTER_MAGIC || nonce != pool.nonce;
        if !pool.imported || wrong || !inside || size == 0 || out.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        let base = pool.base + offset;
        if memory.blocks.contains_key(&base) {
            // Imported already: the same address, which is freed once.
            return out.put(base);
        }
        pool.live += 1;
        let (device, kind) = (pool.device, Kind::PoolImported { pool: handle });
        let id = memory.next_id();
        memory.insert(Block { base, size, device, context: context.handle, id, kind });
        out.put(base)
    }
}
