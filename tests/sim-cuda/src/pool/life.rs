//! Creation and selection of pools: default pools, created pools, and the current pool.

use std::ffi::c_int;

use super::whole;
use crate::context::device;
use crate::entry::driver;
use crate::ffi::{In, Out, PoolProps};
use crate::memory::{PAGE, device_of};
use crate::simulator::simulator;
use crate::status::{Result, Status};
use crate::vmm::{FABRIC, PINNED, POSIX_FD};

fn pool_properties(props: &PoolProps) -> Result<(usize, u64)> {
    if props.kind != PINNED || props.handle_types & !(POSIX_FD | FABRIC) != 0 {
        return Err(Status::INVALID_VALUE);
    }
    Ok((device_of(props.location)?, props.max_size as u64))
}

driver! {
    /// Returns the default pool of a device. It cannot be exported.
    fn cuDeviceGetDefaultMemPool(out: Out<u64>, number: c_int) {
        let device = device(number)?;
        let simulator = simulator()?;
        out.put(simulator.objects().pools.default_of(&simulator.machine, device)?)
    }

    /// Returns the pool from which `cuMemAllocAsync` allocates.
    fn cuDeviceGetMemPool(out: Out<u64>, number: c_int) {
        let device = device(number)?;
        let simulator = simulator()?;
        out.put(simulator.objects().pools.current_of(&simulator.machine, device)?)
    }

    /// Sets the pool from which `cuMemAllocAsync` allocates.
    fn cuDeviceSetMemPool(number: c_int, handle: u64) {
        let device = device(number)?;
        let mut objects = simulator()?.objects();
        let pool = objects.pools.get(handle)?;
        if pool.device != device || pool.imported {
            return Err(Status::INVALID_VALUE);
        }
        objects.pools.current[device] = handle;
        Ok(())
    }

    /// Creates a pool.
    fn cuMemPoolCreate(out: Out<u64>, props: In<PoolProps>) {
        let simulator = simulator()?;
        let machine = &simulator.machine;
        let props = props.get()?;
        let (device, most) = pool_properties(&props)?;
        if props.handle_types & FABRIC != 0 && !simulator.config.imex {
            return Err(Status::NOT_PERMITTED);
        }
        let most = if most == 0 { machine.devices()[device].memory_bytes } else { most };
        let block = machine.create_sparse_block(device, whole(most)? + PAGE)?;
        out.put(simulator.objects().pools.add(machine, block, props.handle_types, false, false)?)
    }

    /// Destroys a pool, which exists until its allocations are freed.
    fn cuMemPoolDestroy(handle: u64) {
        let simulator = simulator()?;
        let mut objects = simulator.objects();
        let pools = &mut objects.pools;
        if pools.closed.contains(&handle) {
            return Ok(());
        }
        let pool = pools.get_mut(handle)?;
        if pool.is_default || (pool.imported && pool.live > 0) {
            return Err(Status::INVALID_VALUE);
        }
        pool.destroyed = true;
        let device = pool.device;
        if pools.current[device] == handle {
            pools.current[device] = 0;
        }
        pools.settle(&simulator.machine, handle);
        Ok(())
    }

    /// Releases unused memory until the pool has no more than `keep` bytes.
    fn cuMemPoolTrimTo(handle: u64, keep: usize) {
        let simulator = simulator()?;
        simulator.objects().pools.get_mut(handle)?.chunks.trim(&simulator.machine, keep as u64);
        Ok(())
    }
}
