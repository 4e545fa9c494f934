//! Memory of `cuMemAlloc`, shared by IPC handle: `cuIpcGetMemHandle`, `cuIpcOpenMemHandle`, `cuIpcCloseMemHandle`
//! ("Memory Management", `group__CUDA__MEM`).
//!
//! A handle opens in the current context, so the same bytes map the memory for another device when that device's
//! context is current; the driver then enables peer access (`CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`).

use device_ipc_core::backend::ReceivedHandle;
use device_ipc_core::{DeviceOrdinal, DevicePtr, DeviceRange, Error, Result};

use super::received::{no_peer_access, out_of_memory, parts, single};
use crate::bindings::api::{IPC_HANDLE_BYTES, IPC_MEM_LAZY_ENABLE_PEER_ACCESS, IpcHandle};
use crate::library::CudaLibrary;
use crate::library::status::number;
use crate::objects::driver::Driver;

/// The size of the pages that `cuMemAlloc` allocates from; an importer maps whole pages.
const PAGE: u64 = 2 << 20;

/// Exports the block at `base`. A context must be current.
pub(super) fn export(library: &CudaLibrary, base: DevicePtr) -> Result<[u8; IPC_HANDLE_BYTES]> {
    let mut handle = IpcHandle { reserved: [0; IPC_HANDLE_BYTES] };
    // SAFETY: writes one handle; an address outside allocations is an error.
    let status = unsafe { (library.api.ipc_get_mem_handle)(&raw mut handle, base.get()) };
    let hint = match status {
        number::SUCCESS => return Ok(handle.reserved),
        number::ERROR_INVALID_VALUE => "The block was freed, or is not memory of cuMemAlloc",
        number::ERROR_NOT_SUPPORTED => "This device or this operating system does not support CUDA IPC",
        _ => "",
    };
    Err(library.error("cuIpcGetMemHandle", status, hint))
}

/// Returns the pages that a block lies in. The driver restricts an importer's copies to the block, but not its kernels
/// (observed with driver 580.159.04 on H200).
pub(super) fn reach(block: DeviceRange) -> Option<DeviceRange> {
    let first = block.ptr.get() / PAGE * PAGE;
    let end = block.end()?.get().checked_next_multiple_of(PAGE)?;
    Some(DeviceRange::new(block.device, DevicePtr::new(first), end - first))
}

/// Opens one handle on device `on`, whose context must be current. Returns the range, and the address for [`close`].
pub(super) fn open(
    driver: &Driver,
    handles: &[ReceivedHandle],
    on: DeviceOrdinal,
) -> Result<(DeviceRange, u64)> {
    let handle = single(handles)?;
    let (bytes, []) = parts::<IPC_HANDLE_BYTES, 0>(handle)?;
    let mut address = 0;
    // SAFETY: writes one address; the driver validates the bytes of the handle.
    let status = unsafe {
        (driver.api.ipc_open_mem_handle)(
            &raw mut address,
            IpcHandle { reserved: *bytes },
            IPC_MEM_LAZY_ENABLE_PEER_ACCESS,
        )
    };
    if let Some(error) = no_peer_access(handle, on, status) {
        return Err(error);
    }
    match status {
        number::SUCCESS => {}
        number::ERROR_OUT_OF_MEMORY => return Err(out_of_memory(on, handle.size, "cuIpcOpenMemHandle")),
        number::ERROR_ALREADY_MAPPED => {
            let error = driver.error("cuIpcOpenMemHandle", status, "");
            return Err(Error::OverlapsInUse { detail: error.to_string() });
        }
        _ => return Err(driver.error("cuIpcOpenMemHandle", status, hint(status))),
    }
    // The peer states the handle's bytes and size; only the driver knows the mapped range.
    match driver.allocation_of(DeviceRange::new(on, DevicePtr::new(address), 0)) {
        Ok(range) => Ok((range, address)),
        Err(error) => {
            let closed = close(driver, address);
            tracing::debug!(target: crate::LOG, ok = closed.is_ok(), "closed a CUDA IPC handle without a known range");
            Err(error)
        }
    }
}

/// Closes an address that [`open`] returned, in the context that it was opened in.
pub(super) fn close(library: &CudaLibrary, address: u64) -> Result<()> {
    // SAFETY: opened in this context; the caller of `DeviceIpc::close` has finished all work on it.
    library.check("cuIpcCloseMemHandle", unsafe { (library.api.ipc_close_mem_handle)(address) })
}

const fn hint(status: i32) -> &'static str {
    match status {
        number::ERROR_INVALID_VALUE => "The handle is corrupt, or its block was freed",
        number::ERROR_INVALID_CONTEXT => {
            "CUDA identifies this process as the exporter: a process cannot open its own handle, and two processes in \
             different pid namespaces must not have the same process id (two containers that both run as pid 1; \
             start one with an init process, or share the pid namespace). Memory that is shared by file descriptor has \
             no such limit: allocate it with this library"
        }
        number::ERROR_INVALID_HANDLE => {
            "The exporting process has exited, or another context of this device has the handle open"
        }
        number::ERROR_NOT_PERMITTED => {
            "The block was freed, and its address now belongs to one that is not shared"
        }
        number::ERROR_MAP_FAILED => {
            "The memory could not be mapped: check that both processes use the same device and driver, also in \
             containers"
        }
        number::ERROR_PEER_ACCESS_UNSUPPORTED => {
            "The device cannot access the memory of the block's home device"
        }
        number::ERROR_TOO_MANY_PEERS => {
            "The device has the maximum number of peers that the hardware supports; open the memory on its home device"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reached(ptr: u64, len: u64) -> Option<(u64, u64)> {
        let block = DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::new(ptr), len);
        reach(block).map(|range| (range.ptr.get(), range.len))
    }

    #[test]
    fn reach_is_rounded_to_whole_pages() {
        assert_eq!(reached(PAGE + 4096, 4096), Some((PAGE, PAGE)));
        assert_eq!(reached(PAGE, 1), Some((PAGE, PAGE)));
        assert_eq!(reached(2 * PAGE - 1, 2), Some((PAGE, 2 * PAGE)));
        assert_eq!(reached(3 * PAGE, 2 * PAGE), Some((3 * PAGE, 2 * PAGE)));
        assert_eq!(reached(u64::MAX - 4096, 4096), None);
    }
}
