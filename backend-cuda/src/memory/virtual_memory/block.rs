//! Blocks of memory without an address, reserved addresses without memory, and mappings of the former at the latter.
//!
//! A block stays allocated while any process has a handle or a mapping of it; so a handle is released as soon as the
//! block is mapped. Dropping an incomplete mapping undoes it.

use std::sync::Arc;

use device_ipc_core::{Access, DeviceOrdinal, DevicePtr, DeviceRange, Result};

use crate::bindings::api::VirtualMemoryApi;
use crate::bindings::layout::{
    ACCESS_READ, ACCESS_READ_WRITE, AccessDescription, AllocationProperties, BlockHandle,
    GRANULARITY_MINIMUM, Location,
};
use crate::library::status::number;
use crate::library::{CudaLibrary, too_old};
use crate::objects::driver::Driver;

/// Returns the functions of virtual memory.
pub(crate) fn api(library: &CudaLibrary) -> Result<&VirtualMemoryApi> {
    library.api.virtual_memory.as_ref().ok_or_else(|| too_old("share virtual memory", "11.0"))
}

/// Returns the granularity of block sizes on a device, in bytes. A context must be current.
pub(crate) fn granularity(driver: &Driver, device: DeviceOrdinal, handle_types: u32) -> Result<u64> {
    let properties = AllocationProperties::on_device(driver.device(device)?.handle, handle_types);
    let mut granularity = 0;
    // SAFETY: writes one size, and reads the properties.
    let status = unsafe {
        (api(driver)?.granularity)(&raw mut granularity, &raw const properties, GRANULARITY_MINIMUM)
    };
    driver.check("cuMemGetAllocationGranularity", status)?;
    Ok((granularity as u64).max(1))
}

/// A reference to a block, released on drop.
pub(crate) struct Block<'d> {
    api: &'d VirtualMemoryApi,
    handle: BlockHandle,
}

impl<'d> Block<'d> {
    /// Creates a block. The inner error is the driver's status, which the caller interprets.
    pub(crate) fn create(
        driver: &'d Driver,
        device: DeviceOrdinal,
        bytes: u64,
        handle_types: u32,
    ) -> Result<std::result::Result<Self, i32>> {
        let api = api(driver)?;
        let properties = AllocationProperties::on_device(driver.device(device)?.handle, handle_types);
        let mut handle = 0;
        // SAFETY: writes one handle, and reads the properties.
        let status = unsafe { (api.create)(&raw mut handle, bytes as usize, &raw const properties, 0) };
        Ok(if status == number::SUCCESS { Ok(Self { api, handle }) } else { Err(status) })
    }

    /// Returns the block that is mapped at an address.
    pub(crate) fn mapped_at(driver: &'d Driver, ptr: DevicePtr) -> Result<Self> {
        let api = api(driver)?;
        let mut handle = 0;
        // SAFETY: writes one handle; an address without a mapped block is an error.
        let status = unsafe { (api.retain)(&raw mut handle, ptr.get()) };
        let hint = match status {
            number::SUCCESS => return Ok(Self { api, handle }),
            number::ERROR_INVALID_VALUE => "The block was unmapped concurrently",
            _ => "",
        };
        Err(driver.error("cuMemRetainAllocationHandle", status, hint))
    }

    /// Takes ownership of a handle that the driver returned.
    ///
    /// # Safety
    ///
    /// No other value owns the reference.
    pub(crate) unsafe fn adopt(driver: &'d Driver, handle: BlockHandle) -> Result<Self> {
        Ok(Self { api: api(driver)?, handle })
    }

    pub(crate) const fn api(&self) -> &'d VirtualMemoryApi {
        self.api
    }

    pub(crate) const fn handle(&self) -> BlockHandle {
        self.handle
    }

    /// Returns the block's location and types of handle.
    pub(crate) fn properties(&self, library: &CudaLibrary) -> Result<AllocationProperties> {
        let mut properties = AllocationProperties::unknown();
        // SAFETY: writes one `CUmemAllocationProp`.
        let status = unsafe { (self.api.properties)(&raw mut properties, self.handle) };
        library.check("cuMemGetAllocationPropertiesFromHandle", status)?;
        Ok(properties)
    }
}

impl Block<'_> {
    /// Keeps the reference for longer than the borrow of the driver. The block has `bytes` bytes.
    pub(crate) fn keep(self, driver: &Arc<Driver>, bytes: u64) -> KeptBlock {
        let kept = KeptBlock { driver: Arc::clone(driver), handle: self.handle, bytes };
        std::mem::forget(self);
        kept
    }
}

/// A reference to a block of a stated size, released on drop.
#[derive(Debug)]
pub(crate) struct KeptBlock {
    driver: Arc<Driver>,
    handle: BlockHandle,
    bytes: u64,
}

impl KeptBlock {
    pub(crate) const fn handle(&self) -> BlockHandle {
        self.handle
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for KeptBlock {
    fn drop(&mut self) {
        if let Ok(api) = api(&self.driver) {
            drop(Block { api, handle: self.handle });
        }
    }
}

impl Drop for Block<'_> {
    fn drop(&mut self) {
        // SAFETY: this value owns the reference.
        let status = unsafe { (self.api.release)(self.handle) };
        if !matches!(status, number::SUCCESS | number::ERROR_DEINITIALIZED) {
            tracing::warn!(target: crate::LOG, status, "cuMemRelease failed");
        }
    }
}

/// The alignment with which the driver reserves a range at a hint that is a multiple of it, however small the range is. With a smaller
/// one it takes ranges below 32 MiB from ranges of its own, whatever the hint; and it moves a larger one to a multiple of 32 MiB (driver
/// 580.159.04).
pub(crate) const RANGE_ALIGNMENT: u64 = 32 << 20;

/// Reserves addresses: at the hint, a multiple of [`RANGE_ALIGNMENT`], if they are free; else, and if it is null, of the driver's choice.
/// A context must be current.
pub(crate) fn reserve(driver: &Driver, bytes: u64, hint: DevicePtr) -> Result<DevicePtr> {
    let mut base = 0;
    let alignment = if hint.is_null() { 0 } else { RANGE_ALIGNMENT as usize };
    // SAFETY: writes one address.
    let status = unsafe { (api(driver)?.reserve)(&raw mut base, bytes as usize, alignment, hint.get(), 0) };
    let hint = match status {
        number::SUCCESS => return Ok(DevicePtr::new(base)),
        number::ERROR_OUT_OF_MEMORY => {
            "The address space has no free range of this size; close idle mappings"
        }
        _ => "",
    };
    Err(driver.error("cuMemAddressReserve", status, hint))
}

/// Frees addresses of [`reserve`], where no block is mapped any longer. A context must be current.
pub(crate) fn unreserve(driver: &Driver, base: DevicePtr, bytes: u64) -> Result<()> {
    // SAFETY: the driver refuses addresses that are not exactly a reserved range, or at which a block is mapped.
    let freed = unsafe { (api(driver)?.unreserve)(base.get(), bytes as usize) };
    driver.check("cuMemAddressFree", freed)
}

/// A range of reserved addresses with blocks mapped side by side from its begin. Dropping it unmaps them.
#[derive(Debug)]
pub(crate) struct Mapping {
    driver: Arc<Driver>,
    device: DeviceOrdinal,
    base: u64,
    /// The number of addresses that this value reserved; 0 if another value did.
    reserved: usize,
    /// The sizes of the mapped blocks.
    mapped: Vec<usize>,
}

impl Mapping {
    /// Reserves exactly the addresses that the blocks need. The device's context must be current, here and below.
    pub(crate) fn reserve(driver: &Arc<Driver>, device: DeviceOrdinal, bytes: u64) -> Result<Self> {
        let mut mapping = Self::at(driver, device, reserve(driver, bytes, DevicePtr::NULL)?);
        mapping.reserved = bytes as usize;
        Ok(mapping)
    }

    /// Maps blocks from `base` on, in addresses that another value has reserved.
    pub(crate) fn at(driver: &Arc<Driver>, device: DeviceOrdinal, base: DevicePtr) -> Self {
        let (driver, mapped) = (Arc::clone(driver), Vec::new());
        Self { driver, device, base: base.get(), reserved: 0, mapped }
    }

    /// Maps a block behind the mapped ones. The driver refuses a size that differs from the block's
    /// (`CUDA_ERROR_NOT_SUPPORTED` for a smaller and for a larger size, driver 580.159.04).
    pub(crate) fn map(&mut self, block: BlockHandle, bytes: u64) -> Result<()> {
        let size = bytes as usize;
        let at = self.base + self.mapped_bytes();
        // SAFETY: the addresses are reserved, and the driver refuses those where a block is mapped.
        let status = unsafe { (api(&self.driver)?.map)(at, size, 0, block, 0) };
        let hint = match status {
            number::SUCCESS => {
                self.mapped.push(size);
                return Ok(());
            }
            number::ERROR_INVALID_VALUE | number::ERROR_NOT_SUPPORTED => {
                "The block's size differs from the stated one"
            }
            _ => "",
        };
        Err(self.driver.error("cuMemMap", status, hint))
    }

    /// Grants devices access to all mapped blocks. Without a grant no device has access, not even the home device.
    pub(crate) fn grant_access(&self, devices: &[DeviceOrdinal], access: Access) -> Result<()> {
        let flags = if access.is_writable() { ACCESS_READ_WRITE } else { ACCESS_READ };
        let description = |device: &DeviceOrdinal| {
            let location = Location::device(self.driver.device(*device)?.handle);
            Ok(AccessDescription { location, flags })
        };
        let descriptions = devices.iter().map(description).collect::<Result<Vec<_>>>()?;
        let bytes = self.mapped_bytes() as usize;
        // SAFETY: this value mapped the whole range; reads the stated number of descriptions.
        let status = unsafe {
            (api(&self.driver)?.set_access)(self.base, bytes, descriptions.as_ptr(), descriptions.len())
        };
        let hint = match status {
            number::SUCCESS => return Ok(()),
            number::ERROR_INVALID_DEVICE | number::ERROR_NOT_SUPPORTED | number::ERROR_INVALID_VALUE => {
                "The device may not have peer access to the blocks' home device: check nvidia-smi topo -p2p rw"
            }
            _ => "",
        };
        Err(self.driver.error("cuMemSetAccess", status, hint))
    }

    /// Returns the mapped range.
    pub(crate) fn range(&self) -> DeviceRange {
        DeviceRange::new(self.device, DevicePtr::new(self.base), self.mapped_bytes())
    }

    /// Unmaps the blocks, and keeps the addresses. All work on them must have finished. After an error the blocks that are
    /// left can be unmapped by another call.
    pub(crate) fn unmap(&mut self) -> Result<()> {
        let api = api(&self.driver)?;
        let mut at = self.base + self.mapped_bytes();
        while let Some(size) = self.mapped.last().copied() {
            at -= size as u64;
            // SAFETY: `map` mapped exactly this range, and no work uses it any longer.
            self.driver.check("cuMemUnmap", unsafe { (api.unmap)(at, size) })?;
            self.mapped.pop();
        }
        Ok(())
    }

    /// Unmaps the blocks and frees the addresses that it reserved. All work on them must have finished.
    pub(crate) fn close(mut self) -> Result<()> {
        self.undo()
    }

    fn mapped_bytes(&self) -> u64 {
        self.mapped.iter().sum::<usize>() as u64
    }

    /// Undoes every step, also after a failure, and returns the first error. Resources of failed steps leak until the
    /// process exits.
    fn undo(&mut self) -> Result<()> {
        let api = api(&self.driver)?;
        let mut at = self.base;
        let mut result = Ok(());
        for size in self.mapped.drain(..) {
            // SAFETY: `map` mapped exactly this range, and no work uses it any longer.
            let unmapped = self.driver.check("cuMemUnmap", unsafe { (api.unmap)(at, size) });
            result = result.and(unmapped);
            at += size as u64;
        }
        let reserved = std::mem::take(&mut self.reserved);
        if result.is_ok() && reserved != 0 {
            result = unreserve(&self.driver, DevicePtr::new(self.base), reserved as u64);
        }
        result
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.reserved == 0 && self.mapped.is_empty() {
            return;
        }
        if let Err(error) = self.undo() {
            tracing::warn!(target: crate::LOG, %error, "cannot unmap virtual memory");
        }
    }
}
