//! Fabric handles of blocks of `cuMemCreate` ("Virtual Memory Management", `group__CUDA__VA`).

use device_ipc_core::{DevicePtr, Result};

use crate::driver::Driver;
use crate::fabric::CHANNEL_HINT;
use crate::layout::{FABRIC_BYTES, FabricHandle, HANDLE_TYPE_FABRIC};
use crate::status::number;
use crate::virtual_memory::Block;

/// The handle of the block that is mapped at `base`. A context is current.
pub(super) fn export(driver: &Driver, base: DevicePtr) -> Result<[u8; FABRIC_BYTES]> {
    let block = Block::mapped_at(driver, base)?;
    let mut handle = FabricHandle([0; FABRIC_BYTES]);
    // SAFETY: for this type of handle writes a `CUmemFabricHandle`.
    let status =
        unsafe { (block.api().export)((&raw mut handle).cast(), block.handle(), HANDLE_TYPE_FABRIC, 0) };
    let hint = match status {
        number::SUCCESS => return Ok(handle.0),
        number::ERROR_NOT_PERMITTED => CHANNEL_HINT,
        number::ERROR_INVALID_VALUE => {
            "The block was created without CU_MEM_HANDLE_TYPE_FABRIC, or unmapped meanwhile"
        }
        _ => "",
    };
    Err(driver.error("cuMemExportToShareableHandle", status, hint))
}
