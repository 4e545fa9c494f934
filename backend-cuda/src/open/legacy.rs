//! `cuIpcOpenMemHandle` and `cuIpcCloseMemHandle` ("Memory Management", `group__CUDA__MEM`).
//!
//! The handle opens in the current context, so the same bytes map the memory for another device when that device's
//! context is current; the driver then sets peer access up by itself (`CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`).

use device_ipc_core::{DeviceOrdinal, DevicePtr, DeviceRange, Error, ReceivedHandle, Result};

use super::{out_of_memory, parts, the_only_one};
use crate::api::{IPC_HANDLE_BYTES, IPC_MEM_LAZY_ENABLE_PEER_ACCESS, IpcHandle};
use crate::driver::Driver;
use crate::status::number;

/// Opens one handle for `on`, whose context is current. The address is what [`close`] wants.
pub(super) fn open(
    driver: &Driver,
    handles: &[ReceivedHandle],
    on: DeviceOrdinal,
) -> Result<(DeviceRange, u64)> {
    let handle = the_only_one(handles)?;
    let (bytes, []) = parts::<IPC_HANDLE_BYTES, 0>(handle)?;
    let mut address = 0;
    // SAFETY: writes one address; the driver checks the bytes of the handle, whatever they are.
    let status = unsafe {
        (driver.api.ipc_open_mem_handle)(
            &raw mut address,
            IpcHandle { reserved: *bytes },
            IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
        )
    };
    match (status, handle.home) {
        (number::SUCCESS, _) => {}
        (number::ERROR_PEER_ACCESS_UNSUPPORTED, Some(home)) => return Err(driver.no_peer_access(on, home)),
        (number::ERROR_OUT_OF_MEMORY, _) => return Err(out_of_memory(on, handle.size, "cuIpcOpenMemHandle")),
        (number::ERROR_ALREADY_MAPPED, _) => {
            let error = driver.error("cuIpcOpenMemHandle", status, "");
            return Err(Error::OverlapsInUse { detail: error.to_string() });
        }
        _ => return Err(driver.error("cuIpcOpenMemHandle", status, hint(status))),
    }
    // The handle's bytes and the stated size are the peer's word; what is mapped is the driver's.
    match driver.allocation_of(DeviceRange::new(on, DevicePtr::new(address), 0)) {
        Ok(range) => Ok((range, address)),
        Err(error) => {
            let closed = close(driver, address);
            tracing::debug!(ok = closed.is_ok(), "closed a CUDA IPC handle whose range could not be told");
            Err(error)
        }
    }
}

/// Closes what [`open`] opened, in the context that it was opened in.
pub(super) fn close(driver: &Driver, address: u64) -> Result<()> {
    // SAFETY: opened in this context; the caller of `DeviceIpc::close` has finished all work on it.
    driver.check("cuIpcCloseMemHandle", unsafe { (driver.api.ipc_close_mem_handle)(address) })
}

const fn hint(status: i32) -> &'static str {
    match status {
        number::ERROR_INVALID_VALUE => "The handle is corrupt, or its block was freed",
        number::ERROR_INVALID_CONTEXT => {
            "CUDA takes this process for the exporter: a process cannot open its own handle, and two processes in \
             different pid namespaces must not have the same process id (two containers that both run as pid 1; \
             start one with an init process, or share the pid namespace). Memory that is shared by file descriptor bears \
             it: have the exporter allocate with DeviceMemory::allocate_as and device_ipc::cuda::VIRTUAL_MEMORY or POOL, \
             or call device_ipc::cuda::make_pool_shareable before cudarc or candle allocate"
        }
        number::ERROR_INVALID_HANDLE => {
            "The exporting process has ended, or another context of this device has the handle open"
        }
        number::ERROR_NOT_PERMITTED => {
            "The block was freed, and another one that is not shared is in its place"
        }
        number::ERROR_MAP_FAILED => {
            "The memory could not be mapped: see whether both processes use the same device and driver, also in \
             containers"
        }
        number::ERROR_PEER_ACCESS_UNSUPPORTED => {
            "The device cannot access the memory of the device that the block lives on"
        }
        number::ERROR_TOO_MANY_PEERS => {
            "The device has as many peers as the hardware allows; open the memory on its home device"
        }
        _ => "",
    }
}
