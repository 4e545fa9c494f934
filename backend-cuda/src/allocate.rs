//! Memory by any kind of handle, for those who have no allocator of their own.
//!
//! | kind | allocated by | freed by |
//! |---|---|---|
//! | [`LEGACY`] | `cuMemAlloc` | `cuMemFree` |
//! | [`VIRTUAL_MEMORY`], [`FABRIC`] | `cuMemCreate`, and mapped | unmapping |
//! | [`POOL`] | `cuMemAllocFromPoolAsync`, from a pool of ours | `cuMemFree` |
//!
//! Memory of `cuMemAlloc` can be copied from and to any device. So that this is true of the other kinds too, every device
//! that has peer access is let in.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use device_ipc_core::{
    Access, DeviceOrdinal, DevicePtr, DeviceRange, DeviceStream, Error, HandleKind, MemoryInfo, Result,
};

use crate::api::Pool;
use crate::backend::CudaBackend;
use crate::driver::Driver;
use crate::export::pool;
use crate::fabric::Fabric;
use crate::kinds::{self, FABRIC, LEGACY, POOL, VIRTUAL_MEMORY};
use crate::layout::{HANDLE_TYPE_FABRIC, HANDLE_TYPE_POSIX_FD};
use crate::status::number;
use crate::stream::CudaOwnStream;
use crate::virtual_memory::{self, Block, Mapping};
use crate::{NAME, pools};

/// What was allocated otherwise than by `cuMemAlloc`, by its address.
#[derive(Debug, Default)]
pub(crate) struct Allocated(Mutex<HashMap<DevicePtr, Held>>);

#[derive(Debug)]
enum Held {
    Mapped(Mapping),
    Pool(Pool),
}

impl Allocated {
    fn insert(&self, ptr: DevicePtr, held: Held) {
        self.lock().insert(ptr, held);
    }

    fn holds(&self, ptr: DevicePtr) -> bool {
        self.lock().contains_key(&ptr)
    }

    fn remove(&self, ptr: DevicePtr) -> Option<Held> {
        self.lock().remove(&ptr)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<DevicePtr, Held>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CudaBackend {
    pub(crate) fn allocate_of_kind(
        &self,
        device: DeviceOrdinal,
        bytes: u64,
        kind: HandleKind,
    ) -> Result<DeviceRange> {
        let driver = self.driver();
        driver.device(device)?;
        if bytes == 0 {
            return Err(Error::InvalidRegion("an allocation has at least one byte".into()));
        }
        self.check_can_allocate(device, kind)?;
        let _current = driver.enter(device)?;
        let ptr = match kind {
            VIRTUAL_MEMORY => self.allocate_virtual(device, bytes, HANDLE_TYPE_POSIX_FD)?,
            FABRIC => self.allocate_virtual(device, bytes, HANDLE_TYPE_FABRIC)?,
            POOL => self.allocate_in_pool(device, bytes)?,
            _ => allocate_plain(driver, device, bytes)?,
        };
        Ok(DeviceRange::new(device, ptr, bytes))
    }

    /// Frees what [`allocate_of_kind`](Self::allocate_of_kind) gave.
    ///
    /// # Safety
    ///
    /// As [`DeviceMemory::free`](device_ipc_core::DeviceMemory::free).
    pub(crate) unsafe fn free_of_any_kind(&self, range: DeviceRange) -> Result<()> {
        let driver = self.driver();
        // cuMemFree of memory of cuMemAlloc waits for the streams of its own context; CUDA promises nothing for those of
        // other devices. cuMemUnmap unmaps memory under pending work, and cuMemFree gives a pool's memory to the next
        // allocation (both seen with driver 580.159.04).
        let free_waits = !self.allocated.holds(range.ptr);
        wait_for_devices_in_use(driver, free_waits.then_some(range.device))?;
        let held = self.allocated.remove(range.ptr);
        let _current = driver.enter(range.device)?;
        match held {
            Some(Held::Mapped(mapping)) => mapping.close(),
            // SAFETY: the range was allocated here, and no work uses it any longer.
            held => unsafe {
                driver.check("cuMemFree", (driver.api.mem_free)(range.ptr.get()))?;
                if let Some(Held::Pool(pool)) = held {
                    // Else the pool would keep it until somebody synchronises.
                    driver.check("cuMemPoolTrimTo", (pool::api(driver)?.trim_to)(pool, 0))?;
                }
                Ok(())
            },
        }
    }

    fn check_can_allocate(&self, device: DeviceOrdinal, kind: HandleKind) -> Result<()> {
        let refused = |why: String| {
            Err(Error::Unsupported {
                backend: NAME,
                what: format!(
                    "allocate memory of device {device} for handles of kind {} ({})",
                    kind.0,
                    kinds::name(kind)
                ),
                why,
            })
        };
        match kind {
            LEGACY => Ok(()),
            VIRTUAL_MEMORY if self.driver().has_virtual_memory(device) => Ok(()),
            VIRTUAL_MEMORY => refused(
                "the device or the driver has no virtual memory that travels by file descriptor".into(),
            ),
            POOL => pools::check_support(self.driver(), device),
            FABRIC => match self.fabric(device)? {
                Fabric::Available => Ok(()),
                other => refused(other.to_string()),
            },
            _ => refused(
                "this version knows the kinds 1 (legacy), 2 (virtual-memory), 3 (pool) and 4 (fabric)".into(),
            ),
        }
    }

    fn allocate_virtual(&self, device: DeviceOrdinal, bytes: u64, handle_type: u32) -> Result<DevicePtr> {
        let driver = self.driver();
        let granularity = virtual_memory::granularity(driver, device, handle_type)?;
        let size = bytes.checked_next_multiple_of(granularity).filter(|size| *size <= i64::MAX as u64);
        let size = size.ok_or_else(|| out_of_memory(driver, device, bytes))?;
        let block = Block::create(driver, device, size, handle_type)?
            .map_err(|status| allocation_error(driver, "cuMemCreate", status, device, bytes))?;
        let mut mapping = Mapping::reserve(driver, device, size)?;
        mapping.map(&block, size)?;
        mapping.permit(&with_access_to(driver, device)?, Access::ReadWrite)?;
        let ptr = mapping.range().ptr;
        self.allocated.insert(ptr, Held::Mapped(mapping));
        Ok(ptr)
    }

    fn allocate_in_pool(&self, device: DeviceOrdinal, bytes: u64) -> Result<DevicePtr> {
        let driver = self.driver();
        let pool = self.made_pools.of(driver, device)?;
        let mut peers = with_access_to(driver, device)?;
        peers.retain(|peer| *peer != device);
        pools::let_in(driver, pool, &peers)?;
        // Of its own, so that nobody else's work is waited for.
        let stream = CudaOwnStream::create(driver, device)?;
        let raw = driver.stream(stream.as_borrowed())?;
        let mut address = 0;
        // SAFETY: writes one address; the stream and the pool live.
        let status = unsafe { (pool::api(driver)?.allocate)(&raw mut address, bytes as usize, pool, raw) };
        if status != number::SUCCESS {
            return Err(allocation_error(driver, "cuMemAllocFromPoolAsync", status, device, bytes));
        }
        let ptr = DevicePtr::new(address);
        self.allocated.insert(ptr, Held::Pool(pool));
        // Other streams may use the memory once this one has come to the allocation.
        // SAFETY: the stream lives.
        driver.check("cuStreamSynchronize", unsafe { (driver.api.stream_synchronize)(raw) })?;
        Ok(ptr)
    }
}

fn allocate_plain(driver: &Driver, device: DeviceOrdinal, bytes: u64) -> Result<DevicePtr> {
    let mut address = 0;
    // SAFETY: writes one address.
    let status = unsafe { (driver.api.mem_alloc)(&raw mut address, bytes as usize) };
    if status != number::SUCCESS {
        return Err(allocation_error(driver, "cuMemAlloc", status, device, bytes));
    }
    Ok(DevicePtr::new(address))
}

fn allocation_error(
    driver: &Driver,
    call: &'static str,
    status: i32,
    device: DeviceOrdinal,
    bytes: u64,
) -> Error {
    match status {
        number::ERROR_OUT_OF_MEMORY => out_of_memory(driver, device, bytes),
        _ => driver.error(call, status, ""),
    }
}

/// The error of a device whose context is current.
fn out_of_memory(driver: &Driver, device: DeviceOrdinal, bytes: u64) -> Error {
    let detail = match info(driver) {
        Ok(MemoryInfo { free_bytes, total_bytes }) => {
            format!("{free_bytes} of {total_bytes} bytes are free")
        }
        Err(error) => error.to_string(),
    };
    Error::OutOfMemory { device, bytes, detail }
}

/// The memory of the device whose context is current.
pub(crate) fn info(driver: &Driver) -> Result<MemoryInfo> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: writes two sizes.
    driver.check("cuMemGetInfo", unsafe { (driver.api.mem_get_info)(&raw mut free, &raw mut total) })?;
    Ok(MemoryInfo { free_bytes: free as u64, total_bytes: total as u64 })
}

/// The devices that can access the memory of one, itself first.
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

/// Waits for the streams of all devices that this process uses, except for those of one. Also of devices without peer
/// access, as the driver stages copies to those.
///
/// By freeing a byte of cuMemAlloc, which waits for all streams of the context and can be done beside a capture;
/// cuCtxSynchronize would invalidate the capture whatever mode this thread is in (seen with driver 580.159.04).
fn wait_for_devices_in_use(driver: &Driver, except: Option<DeviceOrdinal>) -> Result<()> {
    for used in driver.devices.iter().filter(|device| device.context.get().is_some()) {
        let device = used.info.ordinal;
        if Some(device) != except {
            let _current = driver.enter(device)?;
            let (call, status) = match allocate_plain(driver, device, 1) {
                // SAFETY: allocated above, and used by nobody.
                Ok(byte) => ("cuMemFree", unsafe { (driver.api.mem_free)(byte.get()) }),
                Err(Error::OutOfMemory { .. }) => {
                    // SAFETY: takes nothing; the device's primary context is current.
                    ("cuCtxSynchronize", unsafe { (driver.api.ctx_synchronize)() })
                }
                Err(error) => return Err(error),
            };
            driver.check(call, status)?;
        }
    }
    Ok(())
}
