//! Imports of blocks by fabric handle, mapped side by side.

use std::sync::Arc;

use device_ipc_core::backend::ReceivedHandle;
use device_ipc_core::{Access, DeviceOrdinal, DeviceRange, Result};

use super::support::CHANNEL_HINT;
use crate::bindings::layout::{FABRIC_BYTES, FabricHandle, HANDLE_TYPE_FABRIC};
use crate::library::status::number;
use crate::memory::received::{import_error, parts};
use crate::memory::virtual_memory::block::{self, Block, Mapping};
use crate::memory::virtual_memory::import::map_side_by_side;
use crate::objects::driver::Driver;

/// Opens blocks on device `on`, whose context must be current.
pub(crate) fn open(
    driver: &Arc<Driver>,
    handles: &[ReceivedHandle],
    on: DeviceOrdinal,
    access: Access,
) -> Result<(DeviceRange, Mapping)> {
    map_side_by_side(driver, handles, on, access, HANDLE_TYPE_FABRIC, |handle| import_block(driver, handle))
}

/// Imports the block of a handle. A context must be current.
pub(crate) fn import_block<'d>(driver: &'d Driver, handle: &ReceivedHandle) -> Result<Block<'d>> {
    let (bytes, []) = parts::<FABRIC_BYTES, 0>(handle)?;
    let api = block::api(driver)?;
    let mut block = 0;
    let mut handle = FabricHandle(*bytes);
    // SAFETY: writes one handle, and reads a `CUmemFabricHandle`, whose bytes the driver validates.
    let status = unsafe { (api.import)(&raw mut block, (&raw mut handle).cast(), HANDLE_TYPE_FABRIC) };
    match status {
        // SAFETY: the driver gave the reference to this call.
        number::SUCCESS => unsafe { Block::adopt(driver, block) },
        number::ERROR_NOT_PERMITTED => {
            Err(driver.error("cuMemImportFromShareableHandle", status, CHANNEL_HINT))
        }
        _ => Err(import_error(driver, "cuMemImportFromShareableHandle", status)),
    }
}
