//! Allocations of every kind, for callers without an allocator of their own.
//!
//! | kind | allocated by | freed by |
//! |---|---|---|
//! | [`LEGACY`] | `cuMemAlloc` | `cuMemFree` |
//! | [`VIRTUAL_MEMORY`], [`FABRIC`] | `cuMemCreate`, and mapped | unmapping |
//! | [`POOL`] | `cuMemAllocFromPoolAsync`, from a pool of this backend | `cuMemFree` |
//!
//! Memory of `cuMemAlloc` can be copied from and to any device. So that this holds for the other kinds too, every
//! device with peer access is granted access.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device_ipc_core::backend::{DeviceStream, HandleKind, MemoryInfo};
use device_ipc_core::{Access, DeviceOrdinal, DevicePtr, DeviceRange, Error, Result};

use super::fabric::support::{FabricProbes, FabricSupport};
use super::kind::{self, FABRIC, LEGACY, POOL, VIRTUAL_MEMORY};
use super::pool::handle::api as pool_api;
use super::pool::own::{self, OwnPools};
use super::virtual_memory::block::{self, Block, Mapping};
use crate::bindings::api::Pool;
use crate::bindings::layout::{HANDLE_TYPE_FABRIC, HANDLE_TYPE_POSIX_FD};
use crate::library::status::number;
use crate::library::{CudaLibrary, NAME};
use crate::objects::driver::Driver;
use crate::objects::stream::OwnedStream;

/// The allocator of a backend.
#[derive(Debug)]
pub(crate) struct Allocator {
    driver: Arc<Driver>,
    /// The allocations of other kinds than [`LEGACY`], by address.
    allocations: Mutex<HashMap<DevicePtr, Allocation>>,
    pub(crate) pools: OwnPools,
    pub(crate) fabric: FabricProbes,
}

#[derive(Debug)]
enum Allocation {
    Mapped(Mapping),
    Pool(Pool),
}

impl Allocator {
    pub(crate) fn new(driver: &Arc<Driver>) -> Self {
        Self {
            driver: Arc::clone(driver),
            allocations: Mutex::default(),
            pools: OwnPools::default(),
            fabric: FabricProbes::new(driver),
        }
    }

    /// Allocates memory for handles of a kind.
    pub(crate) fn allocate(
        &self,
        device: DeviceOrdinal,
        bytes: u64,
        kind: HandleKind,
    ) -> Result<DeviceRange> {
        let driver = &self.driver;
        driver.device(device)?;
        if bytes == 0 {
            return Err(Error::InvalidRegion("an allocation has at least one byte".into()));
        }
        self.check_support(device, kind)?;
        let _current = driver.enter(device)?;
        let ptr = match kind {
            VIRTUAL_MEMORY => self.allocate_virtual(device, bytes, HANDLE_TYPE_POSIX_FD)?,
            FABRIC => self.allocate_virtual(device, bytes, HANDLE_TYPE_FABRIC)?,
            POOL => self.allocate_in_pool(device, bytes)?,
            _ => allocate_plain(driver, device, bytes)?,
        };
        Ok(DeviceRange::new(device, ptr, bytes))
    }

    /// Frees memory of [`allocate`](Self::allocate).
    ///
    /// # Safety
    ///
    /// As [`DeviceMemory::free`](device_ipc_core::backend::DeviceMemory::free).
    pub(crate) unsafe fn free(&self, range: DeviceRange) -> Result<()> {
        let driver = &self.driver;
        // cuMemFree of memory of cuMemAlloc waits for the streams of its context; CUDA does not promise it for streams
        // of other devices. cuMemUnmap unmaps memory under pending work, and cuMemFree gives a pool's memory to the
        // next allocation (both observed with driver 580.159.04).
        let free_waits = !self.lock().contains_key(&range.ptr);
        wait_for_devices_in_use(driver, free_waits.then_some(range.device))?;
        let allocation = self.lock().remove(&range.ptr);
        let _current = driver.enter(range.device)?;
        match allocation {
            Some(Allocation::Mapped(mapping)) => mapping.close(),
            // SAFETY: the range was allocated here, and no work uses it any longer.
            allocation => unsafe {
                driver.check("cuMemFree", (driver.api.mem_free)(range.ptr.get()))?;
                if let Some(Allocation::Pool(pool)) = allocation {
                    // Otherwise the pool would keep it until the next synchronisation.
                    driver.check("cuMemPoolTrimTo", (pool_api(driver)?.trim_to)(pool, 0))?;
                }
                Ok(())
            },
        }
    }

    fn check_support(&self, device: DeviceOrdinal, kind: HandleKind) -> Result<()> {
        let refused = |why: String| {
            Err(Error::Unsupported {
                backend: NAME,
                what: format!(
                    "allocate memory of device {device} for handles of kind {} ({})",
                    kind.0,
                    kind::name(kind)
                ),
                why,
            })
        };
        match kind {
            LEGACY => Ok(()),
            VIRTUAL_MEMORY if self.driver.has_virtual_memory(device) => Ok(()),
            VIRTUAL_MEMORY => refused(
                "the device or the driver does not support virtual memory with file descriptors".into(),
            ),
            POOL => own::check_support(&self.driver, device),
            FABRIC => match self.fabric.get(&self.driver, device)? {
                FabricSupport::Available => Ok(()),
                other => refused(other.to_string()),
            },
            _ => refused(
                "this version supports the kinds 1 (legacy), 2 (virtual-memory), 3 (pool) and 4 (fabric)"
                    .into(),
            ),
        }
    }

    fn allocate_virtual(&self, device: DeviceOrdinal, bytes: u64, handle_type: u32) -> Result<DevicePtr> {
        let driver = &self.driver;
        let granularity = block::granularity(driver, device, handle_type)?;
        let size = bytes.checked_next_multiple_of(granularity).filter(|size| *size <= i64::MAX as u64);
        let size = size.ok_or_else(|| out_of_memory(driver, device, bytes))?;
        let block = Block::create(driver, device, size, handle_type)?
            .map_err(|status| allocation_error(driver, "cuMemCreate", status, device, bytes))?;
        let mut mapping = Mapping::reserve(driver, device, size)?;
        mapping.map(block.handle(), size)?;
        mapping.grant_access(&with_access_to(driver, device)?, Access::ReadWrite)?;
        let ptr = mapping.range().ptr;
        self.lock().insert(ptr, Allocation::Mapped(mapping));
        Ok(ptr)
    }

    fn allocate_in_pool(&self, device: DeviceOrdinal, bytes: u64) -> Result<DevicePtr> {
        let driver = &self.driver;
        let pool = self.pools.of(driver, device)?;
        let mut peers = with_access_to(driver, device)?;
        peers.retain(|peer| *peer != device);
        own::grant_access(driver, pool, &peers)?;
        // A dedicated stream, so that the call waits for no other work.
        let stream = OwnedStream::create(driver, device)?;
        let raw = driver.stream(stream.as_borrowed())?;
        let mut address = 0;
        // SAFETY: writes one address; the stream and the pool live.
        let status = unsafe { (pool_api(driver)?.allocate)(&raw mut address, bytes as usize, pool, raw) };
        if status != number::SUCCESS {
            return Err(allocation_error(driver, "cuMemAllocFromPoolAsync", status, device, bytes));
        }
        let ptr = DevicePtr::new(address);
        self.lock().insert(ptr, Allocation::Pool(pool));
        // Other streams may use the memory once this one has executed the allocation.
        // SAFETY: the stream lives.
        driver.check("cuStreamSynchronize", unsafe { (driver.api.stream_synchronize)(raw) })?;
        Ok(ptr)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<DevicePtr, Allocation>> {
        self.allocations.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn allocate_plain(library: &CudaLibrary, device: DeviceOrdinal, bytes: u64) -> Result<DevicePtr> {
    let mut address = 0;
    // SAFETY: writes one address.
    let status = unsafe { (library.api.mem_alloc)(&raw mut address, bytes as usize) };
    if status != number::SUCCESS {
        return Err(allocation_error(library, "cuMemAlloc", status, device, bytes));
    }
    Ok(DevicePtr::new(address))
}

fn allocation_error(
    library: &CudaLibrary,
    call: &'static str,
    status: i32,
    device: DeviceOrdinal,
    bytes: u64,
) -> Error {
    match status {
        number::ERROR_OUT_OF_MEMORY => out_of_memory(library, device, bytes),
        _ => library.error(call, status, ""),
    }
}

/// Returns [`Error::OutOfMemory`] for an allocation of `bytes`, with the free and total memory in the text.
///
/// The context of `device` must be current.
fn out_of_memory(library: &CudaLibrary, device: DeviceOrdinal, bytes: u64) -> Error {
    let detail = match info(library) {
        Ok(MemoryInfo { free_bytes, total_bytes }) => {
            format!("{free_bytes} of {total_bytes} bytes are free")
        }
        Err(error) => error.to_string(),
    };
    Error::OutOfMemory { device, bytes, detail }
}

/// Returns the free and total memory, in bytes, of the device whose context is current.
pub(crate) fn info(library: &CudaLibrary) -> Result<MemoryInfo> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: writes two sizes.
    library.check("cuMemGetInfo", unsafe { (library.api.mem_get_info)(&raw mut free, &raw mut total) })?;
    Ok(MemoryInfo { free_bytes: free as u64, total_bytes: total as u64 })
}

/// Returns the devices that can access the memory of `home`, starting with `home`.
fn with_access_to(driver: &Driver, home: DeviceOrdinal) -> Result<Vec<DeviceOrdinal>> {
    let mut devices = vec![home];
    for device in &driver.devices {
        let ordinal = device.info.ordinal;
        if ordinal != home && driver.peer_access(ordinal, home)? {
            devices.push(ordinal);
        }
    }
    Ok(devices)
}

/// Waits for the streams of all devices that this process uses, except for one. Includes devices without peer access,
/// as the driver stages copies to those.
///
/// Frees one byte of cuMemAlloc, which waits for all streams of the context and is possible during a capture;
/// cuCtxSynchronize would invalidate the capture in every mode of this thread (observed with driver 580.159.04).
fn wait_for_devices_in_use(driver: &Driver, except: Option<DeviceOrdinal>) -> Result<()> {
    for used in driver.devices.iter().filter(|device| device.context.get().is_some()) {
        let device = used.info.ordinal;
        if Some(device) != except {
            let _current = driver.enter(device)?;
            let (call, status) = match allocate_plain(driver, device, 1) {
                // SAFETY: allocated above, and unused.
                Ok(byte) => ("cuMemFree", unsafe { (driver.api.mem_free)(byte.get()) }),
                Err(Error::OutOfMemory { .. }) => {
                    // SAFETY: takes no arguments; the device's primary context is current.
                    ("cuCtxSynchronize", unsafe { (driver.api.ctx_synchronize)() })
                }
                Err(error) => return Err(error),
            };
            driver.check(call, status)?;
        }
    }
    Ok(())
}
