//! The entry points that make a device's current memory pool shareable.

use device_ipc_core::{DeviceOrdinal, Error, Result};

use super::cuda::{CudaBackend, registered};
use crate::library::NAME;

/// Makes memory of `cuMemAllocAsync` shareable: cudarc's slices, candle's tensors, memory of `cudaMallocAsync`.
///
/// Call it once per device before the first allocation there. It uses the backend of
/// [`Ipc::auto`](device_ipc_core::Ipc::auto).
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use device_ipc_cuda::make_pool_shareable;
/// # use cudarc::driver::CudaContext;
///
/// make_pool_shareable(0)?;
/// let weights = CudaContext::new(0)?.default_stream().clone_htod(&[1f32; 20])?; // shareable
/// # drop(weights);
/// # Ok(())
/// # }
/// ```
///
/// [`CudaBackend::make_pool_shareable`] describes the effects.
///
/// # Errors
///
/// [`Error::BackendUnavailable`], and the errors of [`CudaBackend::make_pool_shareable`].
pub fn make_pool_shareable(device: impl Into<DeviceOrdinal>) -> Result<()> {
    let backend = registered()
        .map_err(|reason| Error::BackendUnavailable { backend: Some(NAME.to_owned()), reason })?;
    backend.make_pool_shareable(device)
}

impl CudaBackend {
    /// Makes a shareable pool the device's current one, unless it already is: from then on `cuMemAllocAsync` allocates
    /// memory of the kind [`POOL`](crate::POOL).
    ///
    /// The new pool copies the attributes of the previous one (when it returns memory to the system, how it reuses
    /// memory) and its peer access. If the current pool is shareable, nothing changes. Earlier allocations stay in the
    /// previous pool, are freed there, and remain as little shareable as before. Code that names the default pool
    /// (`cuDeviceGetDefaultMemPool`, to set its attributes or to allocate from it) still gets the default pool.
    ///
    /// An importer holds the pool's file descriptor, and its kernels can reach other memory in the pool.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for a device or a driver without shareable pools, [`Error::NoSuchDevice`], or a driver
    /// error.
    pub fn make_pool_shareable(&self, device: impl Into<DeviceOrdinal>) -> Result<()> {
        self.allocator.pools.make_current(self.driver(), device.into())
    }
}
