//! Handles of `cuIpcGetMemHandle` ("Memory Management", `group__CUDA__MEM`).

use device_ipc_core::{DevicePtr, DeviceRange, Result};

use crate::api::{IPC_HANDLE_BYTES, IpcHandle};
use crate::driver::Driver;
use crate::status::number;

/// The driver gives `cuMemAlloc` out of pages of this size, and an importer gets whole pages mapped.
const PAGE: u64 = 2 << 20;

/// The handle of the block at `base`. A context is current.
pub(super) fn export(driver: &Driver, base: DevicePtr) -> Result<[u8; IPC_HANDLE_BYTES]> {
    let mut handle = IpcHandle { reserved: [0; IPC_HANDLE_BYTES] };
    // SAFETY: writes one handle; an address that is no allocation's is an error.
    let status = unsafe { (driver.api.ipc_get_mem_handle)(&raw mut handle, base.get()) };
    let hint = match status {
        number::SUCCESS => return Ok(handle.reserved),
        number::ERROR_INVALID_VALUE => "The block was freed, or is not of cuMemAlloc",
        number::ERROR_NOT_SUPPORTED => "This device or this operating system has no CUDA IPC",
        _ => "",
    };
    Err(driver.error("cuIpcGetMemHandle", status, hint))
}

/// The pages that a block lies in. Copies by an importer's driver are held to the block, its kernels are not (seen with
/// driver 580.159.04 on H200).
pub(super) fn reach(block: DeviceRange) -> Option<DeviceRange> {
    let first = block.ptr.get() / PAGE * PAGE;
    let end = block.end()?.get().checked_next_multiple_of(PAGE)?;
    Some(DeviceRange::new(block.device, DevicePtr::new(first), end - first))
}

#[cfg(test)]
mod tests {
    use device_ipc_core::DeviceOrdinal;

    use super::*;

    fn reached(ptr: u64, len: u64) -> Option<(u64, u64)> {
        let block = DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::new(ptr), len);
        reach(block).map(|range| (range.ptr.get(), range.len))
    }

    #[test]
    fn a_small_block_reaches_its_page_and_whole_pages_themselves() {
        assert_eq!(reached(PAGE + 4096, 4096), Some((PAGE, PAGE)));
        assert_eq!(reached(PAGE, 1), Some((PAGE, PAGE)));
        assert_eq!(reached(2 * PAGE - 1, 2), Some((PAGE, 2 * PAGE)));
        assert_eq!(reached(3 * PAGE, 2 * PAGE), Some((3 * PAGE, 2 * PAGE)));
        assert_eq!(reached(u64::MAX - 4096, 4096), None);
    }
}
