//! File descriptors of blocks of `cuMemCreate` ("Virtual Memory Management", `group__CUDA__VA`).

use std::os::fd::OwnedFd;

use device_ipc_core::{DevicePtr, Result};

use crate::driver::Driver;
use crate::fd;
use crate::layout::HANDLE_TYPE_POSIX_FD;
use crate::status::number;
use crate::virtual_memory::Block;

/// A file descriptor of the block that is mapped at `base`. A context is current.
///
/// Each call makes a new one. The block stays while one of them is open.
pub(super) fn export(driver: &Driver, base: DevicePtr) -> Result<OwnedFd> {
    let block = Block::mapped_at(driver, base)?;
    let mut raw = -1;
    // SAFETY: for this type of handle writes one int.
    let status =
        unsafe { (block.api().export)((&raw mut raw).cast(), block.handle(), HANDLE_TYPE_POSIX_FD, 0) };
    let hint = match status {
        // SAFETY: the driver made the descriptor for this call.
        number::SUCCESS => return unsafe { fd::adopt("cuMemExportToShareableHandle", raw) },
        number::ERROR_INVALID_VALUE => {
            "The block was created without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, or unmapped meanwhile"
        }
        _ => fd::LIMIT_HINT,
    };
    Err(driver.error("cuMemExportToShareableHandle", status, hint))
}
