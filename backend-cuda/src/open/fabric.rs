//! Blocks by fabric handle, mapped side by side ("Virtual Memory Management", `group__CUDA__VA`).

use std::sync::Arc;

use device_ipc_core::{Access, DeviceOrdinal, DeviceRange, ReceivedHandle, Result};

use super::virtual_memory::map_side_by_side;
use super::{import_error, parts};
use crate::driver::Driver;
use crate::fabric::CHANNEL_HINT;
use crate::layout::{FABRIC_BYTES, FabricHandle, HANDLE_TYPE_FABRIC};
use crate::status::number;
use crate::virtual_memory::{self, Block, Mapping};

/// Opens blocks for `on`, whose context is current.
pub(super) fn open(
    driver: &Arc<Driver>,
    handles: &[ReceivedHandle],
    on: DeviceOrdinal,
    access: Access,
) -> Result<(DeviceRange, Mapping)> {
    map_side_by_side(driver, handles, on, access, HANDLE_TYPE_FABRIC, |handle| {
        let (bytes, []) = parts::<FABRIC_BYTES, 0>(handle)?;
        let api = virtual_memory::api(driver)?;
        let mut block = 0;
        let mut handle = FabricHandle(*bytes);
        // SAFETY: writes one handle, and reads a `CUmemFabricHandle`, whose bytes the driver checks.
        let status = unsafe { (api.import)(&raw mut block, (&raw mut handle).cast(), HANDLE_TYPE_FABRIC) };
        match status {
            // SAFETY: the driver gave the reference to this call.
            number::SUCCESS => unsafe { Block::adopt(driver, block) },
            number::ERROR_NOT_PERMITTED => {
                Err(driver.error("cuMemImportFromShareableHandle", status, CHANNEL_HINT))
            }
            _ => Err(import_error(driver, "cuMemImportFromShareableHandle", status)),
        }
    })
}
