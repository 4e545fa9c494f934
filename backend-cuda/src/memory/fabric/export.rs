//! Exports of blocks as fabric handles.

use device_ipc_core::{DevicePtr, Result};

use super::support::CHANNEL_HINT;
use crate::bindings::layout::{FABRIC_BYTES, FabricHandle, HANDLE_TYPE_FABRIC};
use crate::library::status::number;
use crate::memory::virtual_memory::block::Block;
use crate::objects::driver::Driver;

/// Exports the block that is mapped at `base`. A context must be current.
pub(crate) fn export(driver: &Driver, base: DevicePtr) -> Result<[u8; FABRIC_BYTES]> {
    let block = Block::mapped_at(driver, base)?;
    let mut handle = FabricHandle([0; FABRIC_BYTES]);
    // SAFETY: writes a `CUmemFabricHandle` for this type of handle.
    let status =
        unsafe { (block.api().export)((&raw mut handle).cast(), block.handle(), HANDLE_TYPE_FABRIC, 0) };
    let hint = match status {
        number::SUCCESS => return Ok(handle.0),
        number::ERROR_NOT_PERMITTED => CHANNEL_HINT,
        number::ERROR_INVALID_VALUE => {
            "The block was created without CU_MEM_HANDLE_TYPE_FABRIC, or was unmapped concurrently"
        }
        _ => "",
    };
    Err(driver.error("cuMemExportToShareableHandle", status, hint))
}
