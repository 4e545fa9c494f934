//! Blocks of memory without an address, reserved addresses without memory, and the two brought together ("Virtual Memory
//! Management", `group__CUDA__VA`).
//!
//! A block lives while a handle or a mapping of it does, in whatever process; so a handle is released as soon as the block
//! is mapped. Whatever is given up half-way undoes itself.

use std::sync::Arc;

use device_ipc_core::{Access, DeviceOrdinal, DevicePtr, DeviceRange, Result};

use crate::api::VirtualMemoryApi;
use crate::driver::Driver;
use crate::export::too_old;
use crate::layout::{
    ACCESS_READ, ACCESS_READ_WRITE, AccessDescription, AllocationProperties, BlockHandle,
    GRANULARITY_MINIMUM, Location,
};
use crate::status::number;

/// The functions of virtual memory.
pub(crate) fn api(driver: &Driver) -> Result<&VirtualMemoryApi> {
    driver.api.virtual_memory.as_ref().ok_or_else(|| too_old("share virtual memory", "11.0"))
}

/// What sizes of blocks on a device are multiples of. A context is current.
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

/// A reference to a block; released when it is dropped.
pub(crate) struct Block<'d> {
    api: &'d VirtualMemoryApi,
    handle: BlockHandle,
}

impl<'d> Block<'d> {
    /// Creates a block. The status is the driver's, for the caller to make an error of.
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

    /// The block that is mapped at an address.
    pub(crate) fn mapped_at(driver: &'d Driver, ptr: DevicePtr) -> Result<Self> {
        let api = api(driver)?;
        let mut handle = 0;
        // SAFETY: writes one handle; an address that no block is mapped at is an error.
        let status = unsafe { (api.retain)(&raw mut handle, ptr.get()) };
        let hint = match status {
            number::SUCCESS => return Ok(Self { api, handle }),
            number::ERROR_INVALID_VALUE => "The block was unmapped meanwhile",
            _ => "",
        };
        Err(driver.error("cuMemRetainAllocationHandle", status, hint))
    }

    /// Takes over a handle that the driver has just given.
    ///
    /// # Safety
    ///
    /// The reference is nobody else's.
    pub(crate) unsafe fn adopt(driver: &'d Driver, handle: BlockHandle) -> Result<Self> {
        Ok(Self { api: api(driver)?, handle })
    }

    pub(crate) const fn api(&self) -> &'d VirtualMemoryApi {
        self.api
    }

    pub(crate) const fn handle(&self) -> BlockHandle {
        self.handle
    }

    /// Where it lies, and what can be done with it.
    pub(crate) fn properties(&self, driver: &Driver) -> Result<AllocationProperties> {
        let mut properties = AllocationProperties::unknown();
        // SAFETY: writes one `CUmemAllocationProp`.
        let status = unsafe { (self.api.properties)(&raw mut properties, self.handle) };
        driver.check("cuMemGetAllocationPropertiesFromHandle", status)?;
        Ok(properties)
    }
}

impl Drop for Block<'_> {
    fn drop(&mut self) {
        // SAFETY: the reference is this value's.
        let status = unsafe { (self.api.release)(self.handle) };
        if !matches!(status, number::SUCCESS | number::ERROR_DEINITIALIZED) {
            tracing::warn!(status, "cuMemRelease failed");
        }
    }
}

/// Addresses, with blocks mapped at them from the first on, side by side. Dropping it unmaps them.
#[derive(Debug)]
pub(crate) struct Mapping {
    driver: Arc<Driver>,
    device: DeviceOrdinal,
    base: u64,
    reserved: usize,
    /// The sizes of the blocks.
    mapped: Vec<usize>,
}

impl Mapping {
    /// Reserves addresses, as many as the blocks need and no more. The device's context is current, here and below.
    pub(crate) fn reserve(driver: &Arc<Driver>, device: DeviceOrdinal, bytes: u64) -> Result<Self> {
        let mut base = 0;
        let reserved = bytes as usize;
        // SAFETY: writes one address.
        let status = unsafe { (api(driver)?.reserve)(&raw mut base, reserved, 0, 0, 0) };
        let hint = match status {
            number::SUCCESS => {
                return Ok(Self { driver: Arc::clone(driver), device, base, reserved, mapped: Vec::new() });
            }
            number::ERROR_OUT_OF_MEMORY => {
                "The address space has no free range of this size; close mappings that are idle"
            }
            _ => "",
        };
        Err(driver.error("cuMemAddressReserve", status, hint))
    }

    /// Maps a block behind those that are there. The driver refuses a size that is not the block's
    /// (`CUDA_ERROR_NOT_SUPPORTED` for a smaller one and for a larger one, driver 580.159.04).
    pub(crate) fn map(&mut self, block: &Block<'_>, bytes: u64) -> Result<()> {
        let size = bytes as usize;
        let at = self.base + self.mapped_bytes();
        // SAFETY: the addresses are reserved by this value, and nothing is mapped there yet.
        let status = unsafe { (block.api().map)(at, size, 0, block.handle(), 0) };
        let hint = match status {
            number::SUCCESS => {
                self.mapped.push(size);
                return Ok(());
            }
            number::ERROR_INVALID_VALUE | number::ERROR_NOT_SUPPORTED => {
                "The block is not of the size that was stated"
            }
            _ => "",
        };
        Err(self.driver.error("cuMemMap", status, hint))
    }

    /// Lets devices access all that is mapped; no others can. Without it not even the device that the blocks live on.
    pub(crate) fn permit(&self, devices: &[DeviceOrdinal], access: Access) -> Result<()> {
        let flags = if access.is_writable() { ACCESS_READ_WRITE } else { ACCESS_READ };
        let description = |device: &DeviceOrdinal| {
            let location = Location::device(self.driver.device(*device)?.handle);
            Ok(AccessDescription { location, flags })
        };
        let descriptions = devices.iter().map(description).collect::<Result<Vec<_>>>()?;
        let bytes = self.mapped_bytes() as usize;
        // SAFETY: the whole range is mapped by this value; as many descriptions are read as there are.
        let status = unsafe {
            (api(&self.driver)?.set_access)(self.base, bytes, descriptions.as_ptr(), descriptions.len())
        };
        let hint = match status {
            number::SUCCESS => return Ok(()),
            number::ERROR_INVALID_DEVICE | number::ERROR_NOT_SUPPORTED | number::ERROR_INVALID_VALUE => {
                "The device may have no access to the memory of the device that the blocks live on: see nvidia-smi topo \
                 -p2p rw"
            }
            _ => "",
        };
        Err(self.driver.error("cuMemSetAccess", status, hint))
    }

    /// All that is mapped.
    pub(crate) fn range(&self) -> DeviceRange {
        DeviceRange::new(self.device, DevicePtr::new(self.base), self.mapped_bytes())
    }

    /// Unmaps the blocks and gives the addresses back. All work on them has finished.
    pub(crate) fn close(mut self) -> Result<()> {
        self.undo()
    }

    fn mapped_bytes(&self) -> u64 {
        self.mapped.iter().sum::<usize>() as u64
    }

    /// Goes on where a step fails: what is left then is the driver's until the process ends. The first error is
    /// returned.
    fn undo(&mut self) -> Result<()> {
        let api = api(&self.driver)?;
        let mut at = self.base;
        let mut result = Ok(());
        for size in self.mapped.drain(..) {
            // SAFETY: exactly this was mapped by `map`, and no work uses it any longer.
            let unmapped = self.driver.check("cuMemUnmap", unsafe { (api.unmap)(at, size) });
            result = result.and(unmapped);
            at += size as u64;
        }
        let reserved = std::mem::take(&mut self.reserved);
        if result.is_ok() && reserved != 0 {
            // SAFETY: exactly this was reserved by `reserve`, and nothing is mapped there any longer.
            let freed = unsafe { (api.unreserve)(self.base, reserved) };
            result = self.driver.check("cuMemAddressFree", freed);
        }
        result
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.reserved == 0 {
            return;
        }
        if let Err(error) = self.undo() {
            tracing::warn!(%error, "virtual memory could not be unmapped");
        }
    }
}
