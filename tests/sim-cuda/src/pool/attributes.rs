//! Attributes of pools, and the access of devices to them.

use std::ffi::c_int;

use device_ipc_mock_engine::{Access, Address};

use crate::entry::driver;
use crate::ffi::{AccessDesc, In, Location, Out};
use crate::memory::device_of;
use crate::simulator::{Simulator, simulator};
use crate::status::{Result, Status};
use crate::vmm::{access, flags_of};

fn attribute(simulator: &Simulator, pool: u64, attribute: c_int) -> Result<u64> {
    let objects = simulator.objects();
    let pool = objects.pools.get(pool)?;
    Ok(match attribute {
        1..=3 => pool.reuse[attribute as usize - 1] as u64,
        4 => pool.release_threshold,
        5 => pool.chunks.reserved(),
        6 => pool.most_reserved,
        7 => pool.used,
        8 => pool.most_used,
        _ => return Err(Status::INVALID_VALUE),
    })
}

driver! {
    /// Sets an attribute of a pool.
    fn cuMemPoolSetAttribute(handle: u64, attribute: c_int, value: Out<u64>) {
        let mut objects = simulator()?.objects();
        let pool = objects.pools.get_mut(handle)?;
        match attribute {
            1..=3 => pool.reuse[attribute as usize - 1] = Out::from_address(value.address()).get()?,
            4 => pool.release_threshold = value.get()?,
            6 if value.get()? == 0 => pool.most_reserved = pool.chunks.reserved(),
            8 if value.get()? == 0 => pool.most_used = pool.used,
            _ => return Err(Status::INVALID_VALUE),
        }
        Ok(())
    }

    /// Returns an attribute of a pool.
    fn cuMemPoolGetAttribute(handle: u64, number: c_int, value: Out<u64>) {
        let known = attribute(simulator()?, handle, number)?;
        match number {
            1..=3 => Out::<c_int>::from_address(value.address()).put(known as c_int),
            _ => value.put(known),
        }
    }

    /// Sets the access of devices to all memory of a pool.
    fn cuMemPoolSetAccess(handle: u64, descriptions: In<AccessDesc>, count: usize) {
        let simulator = simulator()?;
        let mut objects = simulator.objects();
        let pool = objects.pools.get_mut(handle)?;
        for index in 0..count {
            let description = descriptions.at(index)?;
            let device = device_of(description.location)?;
            let access = access(description.flags)?;
            if access == Some(Access::ReadOnly) {
                return Err(Status::NOT_SUPPORTED);
            }
            if device == pool.device && access.is_none() {
                return Err(Status::INVALID_DEVICE);
            }
            pool.set_access(&simulator.machine, device, access)?;
        }
        Ok(())
    }

    /// Returns the access of a device to a pool.
    fn cuMemPoolGetAccess(out: Out<c_int>, handle: u64, location: In<Location>) {
        let device = device_of(location.get()?)?;
        let simulator = simulator()?;
        let base = simulator.objects().pools.get(handle)?.base;
        out.put(flags_of(simulator.machine.access_of(Address::new(base), device)?))
    }
}
