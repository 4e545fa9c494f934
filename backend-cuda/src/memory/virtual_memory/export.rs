//! Exports of blocks as file descriptors.

use std::os::fd::OwnedFd;

use device_ipc_core::{DevicePtr, Result};

use super::block::Block;
use crate::bindings::layout::HANDLE_TYPE_POSIX_FD;
use crate::library::fd;
use crate::library::status::number;
use crate::objects::driver::Driver;

/// Exports the block that is mapped at `base` as a new file descriptor. A context must be current.
///
/// The block stays allocated while one of its descriptors is open.
pub(crate) fn export(driver: &Driver, base: DevicePtr) -> Result<OwnedFd> {
    let block = Block::mapped_at(driver, base)?;
    let mut raw = -1;
    // SAFETY: writes one int for this type of handle.
    let status =
        unsafe { (block.api().export)((&raw mut raw).cast(), block.handle(), HANDLE_TYPE_POSIX_FD, 0) };
    let hint = match status {
        // SAFETY: the driver created the descriptor for this call.
        number::SUCCESS => return unsafe { fd::adopt("cuMemExportToShareableHandle", raw) },
        number::ERROR_INVALID_VALUE => {
            "The block was created without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, or was unmapped concurrently"
        }
        _ => fd::LIMIT_HINT,
    };
    Err(driver.error("cuMemExportToShareableHandle", status, hint))
}
