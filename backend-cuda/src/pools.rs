//! Pools whose memory can be shared ("Stream Ordered Memory Allocator", `group__CUDA__MALLOC__ASYNC`).
//!
//! `cuMemAllocAsync` takes from the device's *current* pool. That is the default one unless somebody sets another, and
//! the default one cannot be exported; so whoever sets a pool that can changes what all allocating code of the process gets,
//! with no change to that code.

use std::ffi::c_uint;
use std::sync::{Mutex, PoisonError};

use device_ipc_core::{DeviceOrdinal, Error, Result};

use crate::NAME;
use crate::api::{Pool, PoolApi};
use crate::backend::{self, CudaBackend};
use crate::driver::Driver;
use crate::export::pool::{api, export_pool};
use crate::layout::{
    ACCESS_NONE, ACCESS_READ_WRITE, AccessDescription, Location, POOL_BEHAVIOUR, PoolProperties,
};

/// The pools that were made here, by device. None is ever destroyed: memory of it may be anywhere in the process.
#[derive(Debug, Default)]
pub(crate) struct MadePools(Mutex<Vec<(DeviceOrdinal, Pool)>>);

impl MadePools {
    /// The pool of a device, whose context is current.
    pub(crate) fn of(&self, driver: &Driver, device: DeviceOrdinal) -> Result<Pool> {
        let mut made = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, pool)) = made.iter().find(|(of, _)| *of == device) {
            return Ok(*pool);
        }
        let pool = create(driver, device)?;
        made.push((device, pool));
        Ok(pool)
    }
}

/// Makes memory of `cuMemAllocAsync` shareable: cudarc's slices, candle's tensors, `cudaMallocAsync`.
///
/// Call it once for a device, before anything is allocated there; the backend is the one that
/// [`Ipc::auto`](device_ipc_core::Ipc::auto) takes.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use device_ipc_cuda::make_pool_shareable;
/// # use cudarc::driver::CudaContext;
///
/// make_pool_shareable(0)?;
/// let weights = CudaContext::new(0)?.default_stream().clone_htod(&[1f32; 20])?; // can be shared as it is
/// # drop(weights);
/// # Ok(())
/// # }
/// ```
///
/// See [`CudaBackend::make_pool_shareable`] for what it does.
///
/// # Errors
///
/// [`Error::BackendUnavailable`], else as the method.
pub fn make_pool_shareable(device: impl Into<DeviceOrdinal>) -> Result<()> {
    let backend = backend::registered()
        .map_err(|reason| Error::BackendUnavailable { backend: NAME.to_owned(), reason })?;
    backend.make_pool_shareable(device)
}

impl CudaBackend {
    /// Makes a pool that can be shared the device's current one, where it is not already: from then on `cuMemAllocAsync`
    /// gives memory of the kind [`POOL`](crate::POOL).
    ///
    /// The new pool takes over how the former one behaves (when it gives memory back to the system, how it re-uses it) and
    /// which devices may access it. Where the current pool can be shared, nothing changes. What was allocated before stays
    /// in the former pool, is freed there, and can no more be shared than before. Who asks for the default pool by name
    /// (`cuDeviceGetDefaultMemPool`, to set its attributes or to allocate from it) still gets the default one.
    ///
    /// An importer holds the pool's file descriptor, and its kernels can reach what else lies in the pool.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for a device or a driver without pools that can be shared, [`Error::NoSuchDevice`], else
    /// the driver's error.
    pub fn make_pool_shareable(&self, device: impl Into<DeviceOrdinal>) -> Result<()> {
        let device = device.into();
        let driver = self.driver();
        let handle = driver.device(device)?.handle;
        check_support(driver, device)?;
        let api = api(driver)?;
        let _current = driver.enter(device)?;
        let mut former = Pool::NULL;
        // SAFETY: writes one pool.
        driver.check("cuDeviceGetMemPool", unsafe { (api.current)(&raw mut former, handle) })?;
        if export_pool(driver, former).is_ok() {
            return Ok(());
        }
        let pool = self.made_pools.of(driver, device)?;
        take_over(driver, api, former, pool, device)?;
        // The driver refuses the pointers of a pool that has not been exported itself, and this shows now whether it can.
        export_pool(driver, pool)?;
        // SAFETY: the pool is of this device, and is never destroyed.
        driver.check("cuDeviceSetMemPool", unsafe { (api.set_current)(handle, pool) })?;
        tracing::debug!(%device, "made the device's memory pool one that can be shared");
        Ok(())
    }
}

/// Refuses a device that can have no pool that is shared by file descriptor.
pub(crate) fn check_support(driver: &Driver, device: DeviceOrdinal) -> Result<()> {
    if driver.has_shareable_pools(device) {
        return Ok(());
    }
    Err(Error::Unsupported {
        backend: NAME,
        what: format!("share memory pools of device {device}"),
        why: "the device or the driver has none that travel by file descriptor; allocate with \
              device_ipc::cuda::alloc_zeros or device_ipc::cuda::clone_htod instead"
            .into(),
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

/// Makes `pool`, of `device`, behave as `former` does, and lets in whom that lets in.
fn take_over(driver: &Driver, api: &PoolApi, former: Pool, pool: Pool, device: DeviceOrdinal) -> Result<()> {
    for attribute in POOL_BEHAVIOUR {
        let mut value = 0u64;
        // SAFETY: writes an int or a 64-bit number.
        let got = unsafe { (api.get_attribute)(former, attribute, (&raw mut value).cast()) };
        driver.check("cuMemPoolGetAttribute", got)?;
        // SAFETY: reads what was written above.
        let set = unsafe { (api.set_attribute)(pool, attribute, (&raw mut value).cast()) };
        driver.check("cuMemPoolSetAttribute", set)?;
    }
    for peer in driver.devices.iter().filter(|peer| peer.info.ordinal != device) {
        let mut location = Location::device(peer.handle);
        let mut flags: c_uint = ACCESS_NONE;
        // SAFETY: writes one number, and reads the location.
        let status = unsafe { (api.get_access)(&raw mut flags, former, &raw mut location) };
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

/// Lets devices access all memory of a pool.
pub(crate) fn let_in(driver: &Driver, pool: Pool, devices: &[DeviceOrdinal]) -> Result<()> {
    for device in devices {
        let location = Location::device(driver.device(*device)?.handle);
        let description = AccessDescription { location, flags: ACCESS_READ_WRITE };
        // SAFETY: reads the description.
        let status = unsafe { (api(driver)?.set_access)(pool, &raw const description, 1) };
        driver.check("cuMemPoolSetAccess", status)?;
    }
    Ok(())
}
