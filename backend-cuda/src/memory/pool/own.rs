//! Shareable pools that this backend creates.
//!
//! `cuMemAllocAsync` allocates from the device's *current* pool: the default pool unless another one was set. The
//! default pool cannot be exported. Setting a shareable pool thus makes the allocations of all code in the process
//! shareable, without a change to that code.

use std::ffi::c_uint;
use std::sync::{Mutex, PoisonError};

use device_ipc_core::{DeviceOrdinal, Error, Result};

use super::export::export_pool;
use super::handle::api;
use crate::bindings::api::{Pool, PoolApi};
use crate::bindings::layout::{
    ACCESS_NONE, ACCESS_READ_WRITE, AccessDescription, Location, POOL_BEHAVIOUR, PoolProperties,
};
use crate::library::NAME;
use crate::objects::driver::Driver;
use crate::remedy;

/// The pools that this backend created, by device. None is ever destroyed: any code of the process may use its memory.
#[derive(Debug, Default)]
pub(crate) struct OwnPools(Mutex<Vec<(DeviceOrdinal, Pool)>>);

impl OwnPools {
    /// Returns the pool of a device, whose context must be current; the first call creates it.
    pub(crate) fn of(&self, driver: &Driver, device: DeviceOrdinal) -> Result<Pool> {
        let mut pools = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, pool)) = pools.iter().find(|(of, _)| *of == device) {
            return Ok(*pool);
        }
        let pool = create(driver, device)?;
        pools.push((device, pool));
        Ok(pool)
    }

    /// Makes a shareable pool the current one of a device. See
    /// [`CudaBackend::make_pool_shareable`](crate::CudaBackend::make_pool_shareable).
    pub(crate) fn make_current(&self, driver: &Driver, device: DeviceOrdinal) -> Result<()> {
        let handle = driver.device(device)?.handle;
        check_support(driver, device)?;
        let api = api(driver)?;
        let _current = driver.enter(device)?;
        let mut previous = Pool::NULL;
        // SAFETY: writes one pool.
        driver.check("cuDeviceGetMemPool", unsafe { (api.current)(&raw mut previous, handle) })?;
        if export_pool(driver, previous).is_ok() {
            return Ok(());
        }
        let pool = self.of(driver, device)?;
        copy_behaviour(driver, api, previous, pool, device)?;
        // The driver refuses pointers of a pool that was never exported; a failure shows here.
        export_pool(driver, pool)?;
        // SAFETY: the pool is of this device, and is never destroyed.
        driver.check("cuDeviceSetMemPool", unsafe { (api.set_current)(handle, pool) })?;
        tracing::debug!(target: crate::LOG, %device, "made the device's current memory pool shareable");
        Ok(())
    }
}

/// Refuses a device without pools that can be shared by file descriptor.
pub(crate) fn check_support(driver: &Driver, device: DeviceOrdinal) -> Result<()> {
    if driver.has_shareable_pools(device) {
        return Ok(());
    }
    Err(Error::Unsupported {
        backend: NAME,
        what: format!("share memory pools of device {device}"),
        why: format!(
            "the device or the driver does not support pools with file descriptors; {}",
            remedy::ALLOCATE_OUTSIDE_POOLS
        ),
    })
}

fn create(driver: &Driver, device: DeviceOrdinal) -> Result<Pool> {
    let properties = PoolProperties::on_device(driver.device(device)?.handle);
    let mut pool = Pool::NULL;
    // SAFETY: writes one pool, and reads the properties.
    let status = unsafe { (api(driver)?.create)(&raw mut pool, &raw const properties) };
    driver.check("cuMemPoolCreate", status)?;
    Ok(pool)
}

/// Copies the attributes and the peer access of the previous pool to `pool`, of `device`.
fn copy_behaviour(
    driver: &Driver,
    api: &PoolApi,
    previous: Pool,
    pool: Pool,
    device: DeviceOrdinal,
) -> Result<()> {
    for attribute in POOL_BEHAVIOUR {
        let mut value = 0u64;
        // SAFETY: writes an int or a 64-bit number.
        let got = unsafe { (api.get_attribute)(previous, attribute, (&raw mut value).cast()) };
        driver.check("cuMemPoolGetAttribute", got)?;
        // SAFETY: reads the number written above.
        let set = unsafe { (api.set_attribute)(pool, attribute, (&raw mut value).cast()) };
        driver.check("cuMemPoolSetAttribute", set)?;
    }
    for peer in driver.devices.iter().filter(|peer| peer.info.ordinal != device) {
        let mut location = Location::device(peer.handle);
        let mut flags: c_uint = ACCESS_NONE;
        // SAFETY: writes one number, and reads the location.
        let status = unsafe { (api.get_access)(&raw mut flags, previous, &raw mut location) };
        driver.check("cuMemPoolGetAccess", status)?;
        if flags != ACCESS_NONE {
            let description = AccessDescription { location, flags };
            // SAFETY: reads the description.
            let status = unsafe { (api.set_access)(pool, &raw const description, 1) };
            driver.check("cuMemPoolSetAccess", status)?;
        }
    }
    Ok(())
}

/// Grants devices access to all memory of a pool.
pub(crate) fn grant_access(driver: &Driver, pool: Pool, devices: &[DeviceOrdinal]) -> Result<()> {
    for device in devices {
        let location = Location::device(driver.device(*device)?.handle);
        let description = AccessDescription { location, flags: ACCESS_READ_WRITE };
        // SAFETY: reads the description.
        let status = unsafe { (api(driver)?.set_access)(pool, &raw const description, 1) };
        driver.check("cuMemPoolSetAccess", status)?;
    }
    Ok(())
}
