//! What is allocated from pools, and freed, in the order of a stream.

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
        // The place is the graph's from now on; there is memory once it runs.
        return out.put(base);
    }
    let kind = Kind::Pooled { pool: handle, offset };
    memory.insert(Block { base, size, device: pool.device, context: target.context.handle, id, kind });
    out.put(base)
}

/// Frees when the stream gets there; from now on nothing new can be asked of the address.
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
        // Unless the context has gone meanwhile, with everything, and somebody else has the place.
        if let std::collections::btree_map::Entry::Vacant(place) = memory.blocks.entry(address) {
            place.insert(block);
            // Only memory of the host leaves anything to do, and this is none.
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

    /// Allocates from a pool.
    fn cuMemAllocFromPoolAsync(out: Out<u64>, size: usize, pool: u64, stream: u64) {
        allocate(out, size, Some(pool), &target(stream)?)
    }

    /// Frees in the order of a stream: also memory of `cuMemAlloc`.
    fn cuMemFreeAsync(address: u64, stream: u64) {
        let target = target(stream)?;
        if address == 0 { Ok(()) } else { free_on_stream(address, &target) }
    }
}
