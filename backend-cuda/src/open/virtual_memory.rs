//! Blocks by file descriptor, mapped side by side ("Virtual Memory Management", `group__CUDA__VA`).

use std::os::fd::AsRawFd;
use std::sync::Arc;

use device_ipc_core::{Access, DeviceOrdinal, DeviceRange, Error, ReceivedHandle, Result};

use super::{import_error, out_of_memory, parts};
use crate::driver::Driver;
use crate::layout::HANDLE_TYPE_POSIX_FD;
use crate::status::number;
use crate::virtual_memory::{self, Block, Mapping};

/// Opens blocks for `on`, whose context is current.
pub(super) fn open(
    driver: &Arc<Driver>,
    handles: &[ReceivedHandle],
    on: DeviceOrdinal,
    access: Access,
) -> Result<(DeviceRange, Mapping)> {
    map_side_by_side(driver, handles, on, access, HANDLE_TYPE_POSIX_FD, |handle| {
        let ([], [fd]) = parts::<0, 1>(handle)?;
        let api = virtual_memory::api(driver)?;
        let mut block = 0;
        // The descriptor's number itself, as a pointer; a pointer to it is CUDA_ERROR_UNKNOWN (driver 580.159.04).
        let number = std::ptr::without_provenance_mut(fd.as_raw_fd() as usize);
        // SAFETY: writes one handle; a descriptor that is none of the driver's is an error.
        let status = unsafe { (api.import)(&raw mut block, number, HANDLE_TYPE_POSIX_FD) };
        if status != number::SUCCESS {
            return Err(import_error(driver, "cuMemImportFromShareableHandle", status));
        }
        // SAFETY: the driver gave the reference to this call.
        unsafe { Block::adopt(driver, block) }
    })
}

/// Imports each handle's block, reserves addresses for all of them, and maps one behind the other.
///
/// The sizes are the peer's word until the driver has mapped them.
pub(super) fn map_side_by_side<'d>(
    driver: &'d Arc<Driver>,
    handles: &[ReceivedHandle],
    on: DeviceOrdinal,
    access: Access,
    handle_type: u32,
    import: impl Fn(&ReceivedHandle) -> Result<Block<'d>>,
) -> Result<(DeviceRange, Mapping)> {
    let granularity = virtual_memory::granularity(driver, on, handle_type)?;
    let total = total_of(handles, granularity)?;
    let mut mapping: Option<Mapping> = None;
    for handle in handles {
        let block = import(handle)?;
        if !block.properties(driver)?.is_on_a_device() {
            return Err(Error::Protocol("the block lies in host memory, not on a device".into()));
        }
        let mapping = match &mut mapping {
            Some(mapping) => mapping,
            // Not before the first handle is known to be one: the size may be anything.
            none => none.insert(Mapping::reserve(driver, on, total)?),
        };
        mapping.map(&block, handle.size)?;
    }
    let Some(mapping) = mapping else { return Err(out_of_memory(on, total, "cuMemMap")) };
    mapping.permit(&[on], access)?;
    Ok((mapping.range(), mapping))
}

/// The size of all blocks together. A block that the driver could not have made is refused by its size.
fn total_of(handles: &[ReceivedHandle], granularity: u64) -> Result<u64> {
    let mut total = 0u64;
    for handle in handles {
        if handle.size == 0 || !handle.size.is_multiple_of(granularity) {
            return Err(Error::Protocol(format!(
                "a block of virtual memory was stated to have {} bytes, which is no multiple of {granularity}",
                handle.size
            )));
        }
        total =
            total.checked_add(handle.size).filter(|total| *total <= i64::MAX as u64).ok_or_else(|| {
                Error::Protocol("the blocks were stated to be larger together than the address space".into())
            })?;
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::VIRTUAL_MEMORY;
    use crate::open::tests::received;

    fn total(sizes: &[u64]) -> Result<u64> {
        let with_size = |size: &u64| ReceivedHandle { size: *size, ..received(VIRTUAL_MEMORY, 0) };
        total_of(&sizes.iter().map(with_size).collect::<Vec<_>>(), 2 << 20)
    }

    #[test]
    fn sizes_that_no_block_has_are_refused_before_the_driver_sees_them() {
        assert_eq!(total(&[2 << 20, 4 << 20]).unwrap(), 6 << 20);
        for sizes in [&[0][..], &[4096], &[2 << 20, (2 << 20) + 1]] {
            assert!(total(sizes).unwrap_err().to_string().contains("no multiple of 2097152"));
        }
        for sizes in [&[1 << 63][..], &[1 << 62, 1 << 62], &[u64::MAX - (2 << 20) + 1, 2 << 20]] {
            assert!(total(sizes).unwrap_err().to_string().contains("larger together"), "{sizes:?}");
        }
    }
}
