//! Which allocation an address lies in, whether it can be shared, and its handle.
//!
//! What memory can do is told by the pointer, not by who allocated it: `cuPointerGetAttribute` in "Unified Addressing"
//! (`group__CUDA__UNIFIED`). `cuIpcGetMemHandle` is in "Memory Management" (`group__CUDA__MEM`).

use device_ipc_core::{
    DevicePtr, DeviceRange, Error, Exported, Extent, Generation, HandleBytes, HandleKind, Result,
};

use crate::api::{IPC_HANDLE_BYTES, IpcHandle, MEMORYTYPE_HOST, PointerAttribute};
use crate::driver::Driver;
use crate::kinds::LEGACY;
use crate::status::number;

impl Driver {
    /// The allocation that `range` lies in, if a handle can be made of it.
    pub(crate) fn extent_of(&self, range: DeviceRange, stated: Option<DeviceRange>) -> Result<Extent> {
        self.device(range.device)?;
        let ptr = range.ptr;
        if ptr.is_null() {
            return Err(Error::NotDeviceMemory { ptr, why: "it is the null address".into() });
        }
        // Addresses are known only where there is a context.
        let _current = self.enter(range.device)?;
        self.check_kind_of_memory(ptr)?;
        let home = self.attribute(PointerAttribute::DEVICE_ORDINAL, ptr)?;
        if home.is_some_and(|home| home as u32 != range.device.get()) {
            return Err(Error::InvalidRegion(format!(
                "{ptr} is memory of device {}, and device {} was stated",
                home.unwrap_or_default() as u32,
                range.device
            )));
        }
        let allocation = self.allocation_of(range)?;
        if !allocation.contains(&range) {
            return Err(Error::InvalidRegion(format!(
                "{} bytes from {ptr} on leave their allocation of {} bytes at {}",
                range.len, allocation.len, allocation.ptr
            )));
        }
        if let Some(stated) = stated
            && (stated.ptr != allocation.ptr || stated.len > allocation.len)
        {
            return Err(Error::InvalidRegion(format!(
                "the allocation was stated to be {} bytes at {}, and CUDA says that it is {} bytes at {}",
                stated.len, stated.ptr, allocation.len, allocation.ptr
            )));
        }
        let generation = self.attribute(PointerAttribute::BUFFER_ID, allocation.ptr)?.map(Generation);
        Ok(Extent { allocation, generation })
    }

    /// Makes a handle of an allocation.
    pub(crate) fn export(&self, extent: &Extent, kind: Option<HandleKind>) -> Result<Exported> {
        let base = extent.allocation.ptr;
        if let Some(other) = kind.filter(|kind| *kind != LEGACY) {
            return Err(Error::NotShareable {
                ptr: base,
                kind: "memory of cuMemAlloc".into(),
                remedy: format!("it has no handle of kind {}; ask for kind {} (legacy)", other.0, LEGACY.0),
            });
        }
        let mut handle = IpcHandle { reserved: [0; IPC_HANDLE_BYTES] };
        let status = {
            let _current = self.enter(extent.allocation.device)?;
            // SAFETY: writes one handle; an address that is no allocation's is an error.
            unsafe { (self.api.ipc_get_mem_handle)(&raw mut handle, base.get()) }
        };
        let hint = match status {
            number::SUCCESS => {
                return Ok(Exported {
                    extent: *extent,
                    kind: LEGACY,
                    bytes: HandleBytes::new(handle.reserved),
                    fds: Vec::new(),
                });
            }
            number::ERROR_INVALID_VALUE => "The block was freed, or is not of cuMemAlloc",
            number::ERROR_NOT_SUPPORTED => "This device or this operating system has no CUDA IPC",
            _ => "",
        };
        Err(self.error("cuIpcGetMemHandle", status, hint))
    }

    fn check_kind_of_memory(&self, ptr: DevicePtr) -> Result<()> {
        let Some(memory_type) = self.attribute(PointerAttribute::MEMORY_TYPE, ptr)? else {
            return Err(Error::NotDeviceMemory {
                ptr,
                why: "CUDA does not know the address in this process: it is ordinary host memory, was freed, or came \
                      from another process as a number"
                    .into(),
            });
        };
        if self.is(PointerAttribute::IS_MANAGED, ptr)? {
            return Err(not_shareable(
                ptr,
                "managed memory (cuMemAllocManaged)",
                "CUDA has no handle for it; copy it to memory of cuMemAlloc (cudaMalloc) and share the copy",
            ));
        }
        if memory_type == MEMORYTYPE_HOST {
            return Err(Error::NotDeviceMemory { ptr, why: "it is page-locked host memory".into() });
        }
        if self.is(PointerAttribute::IS_LEGACY_CUDA_IPC_CAPABLE, ptr)? {
            return Ok(());
        }
        if self.is(PointerAttribute::MEMPOOL_HANDLE, ptr)? {
            return Err(not_shareable(
                ptr,
                "memory of a pool (cuMemAllocAsync, where cudarc's and candle's slices come from)",
                "allocate it with device_ipc::cuda::alloc_zeros(&stream, len) or device_ipc::cuda::clone_htod(&stream, \
                 &data) instead of the stream's methods, with cudarc::driver::result::malloc_sync, or with cuMemAlloc \
                 (cudaMalloc)",
            ));
        }
        if !self.is_virtual(ptr) {
            // What is left is memory of cuIpcOpenMemHandle.
            return Err(Error::SharedOn { ptr });
        }
        Err(not_shareable(
            ptr,
            "virtual memory (cuMemCreate)",
            "it has no legacy handle; in PyTorch set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, elsewhere \
             allocate it with cuMemAlloc (cudaMalloc)",
        ))
    }

    /// Was the address mapped with `cuMemMap`? Assumed where the driver is too old to be asked.
    fn is_virtual(&self, ptr: DevicePtr) -> bool {
        let (Some(retain), Some(release)) = (self.api.mem_retain_allocation_handle, self.api.mem_release)
        else {
            return true;
        };
        let mut handle = 0;
        // SAFETY: writes one handle; an address that no handle is mapped at is an error.
        let virtual_memory = unsafe { retain(&raw mut handle, ptr.get()) } == number::SUCCESS;
        if virtual_memory {
            // SAFETY: the call above gave this process a reference of its own.
            unsafe { release(handle) };
        }
        virtual_memory
    }

    fn is(&self, attribute: PointerAttribute, ptr: DevicePtr) -> Result<bool> {
        Ok(self.attribute(attribute, ptr)?.is_some_and(|value| value != 0))
    }

    /// An attribute of an address as a number, or `None` where the driver does not know the address or the attribute.
    fn attribute(&self, attribute: PointerAttribute, ptr: DevicePtr) -> Result<Option<u64>> {
        // The attributes asked for are booleans, ints, 64-bit numbers and pointers: all fit, and the bytes that a
        // narrow one leaves are zero.
        let mut value = 0u64;
        // SAFETY: writes at most 8 bytes for these attributes; the address is not followed.
        let status =
            unsafe { (self.api.pointer_get_attribute)((&raw mut value).cast(), attribute, ptr.get()) };
        match status {
            number::ERROR_INVALID_VALUE => Ok(None),
            status => self.check("cuPointerGetAttribute", status).map(|()| Some(value)),
        }
    }

    /// The whole allocation that `inside` begins in.
    pub(crate) fn allocation_of(&self, inside: DeviceRange) -> Result<DeviceRange> {
        let (mut base, mut size) = (0, 0);
        let status = {
            let _current = self.enter(inside.device)?;
            // SAFETY: writes an address and a size; an address that is no allocation's is an error.
            unsafe { (self.api.mem_get_address_range)(&raw mut base, &raw mut size, inside.ptr.get()) }
        };
        if matches!(status, number::ERROR_INVALID_VALUE | number::ERROR_NOT_FOUND) {
            return Err(Error::NotDeviceMemory {
                ptr: inside.ptr,
                why: "no allocation of this process holds the address (cuMemGetAddressRange)".into(),
            });
        }
        self.check("cuMemGetAddressRange", status)?;
        Ok(DeviceRange::new(inside.device, DevicePtr::new(base), size as u64))
    }
}

fn not_shareable(ptr: DevicePtr, kind: &str, remedy: &str) -> Error {
    Error::NotShareable { ptr, kind: kind.into(), remedy: remedy.into() }
}
