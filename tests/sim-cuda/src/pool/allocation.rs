//! Stream-ordered allocations and frees.

use crate::capture::node;
use crate::entry::driver;
use crate::ffi::Out;
use crate::memory::{Block, Kind};
use crate::simulator::{Objects, simulator};
use crate::status::{Result, Status};
use crate::stream::{Target, target};

fn allocate(out: Out<u64>, size: usize, pool: Option<u64>, target: &Target) -> Result {
    if size == 0 || out.is_null() {
        return Err(Status::INVALID_VALUE);
    }
    let simulator = simulator()?;
    let machine = &simulator.machine;
    let mut objects = simulator.objects();
    let Objects { memory, pools, .. } = &mut *objects;
    let handle = match pool {
        Some(handle) => handle,
        None => pools.current_of(machine, target.context.device)?,
    };
    let size = size as u64;
    let free = machine.memory_info(pools.get(handle)?.device)?.0;
    let used = pools.used(pools.get(handle)?.device);
    let pool = pools.get_mut(handle)?;
    if pool.imported {
        return Err(Status::INVALID_VALUE);
    }
    if used.checked_add(size).is_none_or(|wanted| wanted > free) {
        return Err(Status::OUT_OF_MEMORY);
    }
    let id = memory.next_id();
    let offset = pool.take(machine, size)?;
    let base = pool.base + offset;
    if node(target)? {
        // The graph reserves the addresses; the memory is allocated when it runs.
        return out.put(base);
    }
    let kind = Kind::Pooled { pool: handle, offset };
    memory.insert(Block { base, size, device: pool.device, context: target.context.handle, id, kind });
    out.put(base)
}

/// Submits a free. From now on calls with the address fail.
fn free_on_stream(address: u64, target: &Target) -> Result {
    crate::capture::refuse_on(target)?;
    target.order()?;
    let simulator = simulator()?;
    let taken = {
        let mut objects = simulator.objects();
        let block = objects.memory.at_base(address)?;
        if !matches!(block.kind, Kind::Plain { .. } | Kind::Pooled { .. } | Kind::PoolImported { .. }) {
            return Err(Status::INVALID_VALUE);
        }
        objects.memory.blocks.remove(&address)
    };
    let block = taken.ok_or(Status::INVALID_VALUE)?;
    let free = move || {
        let mut objects = simulator.objects();
        let Objects { memory, pools, directory, .. } = &mut *objects;
        // Skipped if the context was destroyed with its memory meanwhile, and the address was reused.
        if let std::collections::btree_map::Entry::Vacant(place) = memory.blocks.entry(address) {
            place.insert(block);
            // Only host memory needs further steps.
            drop(memory.remove(&simulator.machine, address, pools, directory.as_mut()));
        }
    };
    Ok(simulator.machine.host_fn(Box::new(free), target.engine)?)
}

driver! {
    /// Allocates from the device's current pool, in the order of a stream.
    fn cuMemAllocAsync(out: Out<u64>, size: usize, stream: u64) {
        allocate(out, size, None, &target(stream)?)
    }

    /// Allocates from a pool, in the order of a stream.
    fn cuMemAllocFromPoolAsync(out: Out<u64>, size: usize, pool: u64, stream: u64) {
        allocate(out, size, Some(pool), &target(stream)?)
    }

    /// Frees memory in the order of a stream, also memory of `cuMemAlloc`.
    fn cuMemFreeAsync(address: u64, stream: u64) {
        let target = target(stream)?;
        if address == 0 { Ok(()) } else { free_on_stream(address, &target) }
    }
}
