//! Imports of blocks by file descriptor, mapped side by side.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use device_ipc_core::backend::{ReceivedHandle, VendorError};
use device_ipc_core::{Access, DeviceOrdinal, DeviceRange, Error, Result};

use super::block::{self, Block, Mapping};
use crate::bindings::layout::HANDLE_TYPE_POSIX_FD;
use crate::library::status::number;
use crate::memory::received::{import_error, no_peer_access, out_of_memory, parts};
use crate::objects::driver::Driver;

/// Opens blocks on device `on`, whose context must be current.
pub(crate) fn open(
    driver: &Arc<Driver>,
    handles: &[ReceivedHandle],
    on: DeviceOrdinal,
    access: Access,
) -> Result<(DeviceRange, Mapping)> {
    map_side_by_side(driver, handles, on, access, HANDLE_TYPE_POSIX_FD, |handle| import_block(driver, handle))
}

/// Imports the block of a handle. A context must be current.
pub(crate) fn import_block<'d>(driver: &'d Driver, handle: &ReceivedHandle) -> Result<Block<'d>> {
    let ([], [fd]) = parts::<0, 1>(handle)?;
    let api = block::api(driver)?;
    let mut block = 0;
    // The descriptor's number itself, as a pointer; a pointer to it is CUDA_ERROR_UNKNOWN (driver 580.159.04).
    let number = std::ptr::without_provenance_mut(fd.as_raw_fd() as usize);
    // SAFETY: writes one handle; a descriptor of another origin is an error.
    let status = unsafe { (api.import)(&raw mut block, number, HANDLE_TYPE_POSIX_FD) };
    if status != number::SUCCESS {
        return Err(import_error(driver, "cuMemImportFromShareableHandle", status));
    }
    // SAFETY: the driver gave the reference to this call.
    unsafe { Block::adopt(driver, block) }
}

/// Refuses a block of host memory.
pub(crate) fn check_block(driver: &Driver, block: &Block<'_>) -> Result<()> {
    if block.properties(driver)?.is_on_a_device() {
        return Ok(());
    }
    Err(Error::Protocol("received a block of host memory, expected device memory".into()))
}

/// Imports each handle's block, reserves addresses for all of them, and maps them side by side.
///
/// The sizes are untrusted until the driver has mapped the blocks.
pub(crate) fn map_side_by_side<'d>(
    driver: &'d Arc<Driver>,
    handles: &[ReceivedHandle],
    on: DeviceOrdinal,
    access: Access,
    handle_type: u32,
    import: impl Fn(&ReceivedHandle) -> Result<Block<'d>>,
) -> Result<(DeviceRange, Mapping)> {
    let granularity = block::granularity(driver, on, handle_type)?;
    let total = total_bytes(handles, granularity)?;
    let mut mapping: Option<Mapping> = None;
    for handle in handles {
        let block = import(handle)?;
        check_block(driver, &block)?;
        let mapping = match &mut mapping {
            Some(mapping) => mapping,
            // Only after the first successful import: the stated sizes are untrusted.
            none => none.insert(Mapping::reserve(driver, on, total)?),
        };
        mapping.map(block.handle(), handle.size)?;
    }
    let Some(mapping) = mapping else { return Err(out_of_memory(on, total, "cuMemMap")) };
    mapping.grant_access(&[on], access).map_err(|error| {
        let refused = |vendor: &VendorError| {
            handles.iter().find_map(|handle| no_peer_access(handle, on, vendor.status.0))
        };
        match &error {
            Error::Vendor(vendor) => refused(vendor).unwrap_or(error),
            _ => error,
        }
    })?;
    Ok((mapping.range(), mapping))
}

/// Returns the total size of all blocks. Refuses sizes that no block of the driver has.
pub(crate) fn total_bytes(handles: &[ReceivedHandle], granularity: u64) -> Result<u64> {
    let mut total = 0u64;
    for handle in handles {
        if handle.size == 0 || !handle.size.is_multiple_of(granularity) {
            return Err(Error::Protocol(format!(
                "received a block of virtual memory of {} bytes, expected a multiple of {granularity}",
                handle.size
            )));
        }
        total =
            total.checked_add(handle.size).filter(|total| *total <= i64::MAX as u64).ok_or_else(|| {
                Error::Protocol("the stated sizes of the blocks exceed the address space".into())
            })?;
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::kind::VIRTUAL_MEMORY;
    use crate::memory::received::tests::received;

    fn total(sizes: &[u64]) -> Result<u64> {
        let with_size = |size: &u64| ReceivedHandle { size: *size, ..received(VIRTUAL_MEMORY, 0) };
        total_bytes(&sizes.iter().map(with_size).collect::<Vec<_>>(), 2 << 20)
    }

    #[test]
    fn impossible_block_sizes_are_rejected() {
        assert_eq!(total(&[2 << 20, 4 << 20]).unwrap(), 6 << 20);
        for sizes in [&[0][..], &[4096], &[2 << 20, (2 << 20) + 1]] {
            assert!(total(sizes).unwrap_err().to_string().contains("expected a multiple of 2097152"));
        }
        for sizes in [&[1 << 63][..], &[1 << 62, 1 << 62], &[u64::MAX - (2 << 20) + 1, 2 << 20]] {
            assert!(total(sizes).unwrap_err().to_string().contains("exceed the address space"), "{sizes:?}");
        }
    }
}
