//! The driver's attributes of an address, from which the source of its memory follows.
//!
//! `cuPointerGetAttributes` in "Unified Addressing" (`group__CUDA__UNIFIED`) returns all of them in one call (46 ns
//! with driver 580.159.04).

use std::ffi::c_void;

use device_ipc_core::backend::Generation;
use device_ipc_core::{DevicePtr, DeviceRange, Error, Result};

use crate::bindings::api::{PointerAttribute, Pool};
use crate::library::CudaLibrary;
use crate::library::status::number;

const ATTRIBUTES: [PointerAttribute; 7] = [
    PointerAttribute::MEMORY_TYPE,
    PointerAttribute::IS_MANAGED,
    PointerAttribute::DEVICE_ORDINAL,
    PointerAttribute::IS_LEGACY_CUDA_IPC_CAPABLE,
    PointerAttribute::ALLOWED_HANDLE_TYPES,
    PointerAttribute::MEMPOOL_HANDLE,
    PointerAttribute::BUFFER_ID,
];

/// The driver's attributes of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pointer {
    /// The `CUmemorytype`.
    pub(crate) memory_type: u64,
    /// Whether it is memory of `cuMemAllocManaged`.
    pub(crate) managed: bool,
    /// The ordinal of the device.
    pub(crate) device: u32,
    /// Whether `cuIpcGetMemHandle` supports it.
    pub(crate) legacy: bool,
    /// The `CUmemAllocationHandleType`s that it was allocated with.
    pub(crate) handle_types: u32,
    /// The pool that it was allocated from, or null.
    pub(crate) pool: Pool,
    /// The driver's number of the allocation.
    pub(crate) generation: Option<Generation>,
}

impl CudaLibrary {
    /// Returns the attributes of an address that the driver must know. A context must be current.
    pub(super) fn known_pointer(&self, ptr: DevicePtr) -> Result<Pointer> {
        self.pointer(ptr)?.ok_or_else(|| Error::NotDeviceMemory {
            ptr,
            why: "CUDA does not know the address in this process: it is ordinary host memory, was freed, or is an \
                  address of another process"
                .into(),
        })
    }

    /// Returns the attributes of an address, or `None` if the driver does not know it. A context must be current.
    pub(crate) fn pointer(&self, ptr: DevicePtr) -> Result<Option<Pointer>> {
        let Some([memory_type, managed, device, legacy, handle_types, pool, generation]) =
            self.attributes(ptr)?
        else {
            return Ok(None);
        };
        if memory_type == 0 {
            return Ok(None);
        }
        Ok(Some(Pointer {
            memory_type,
            managed: managed != 0,
            device: device as u32,
            legacy: legacy != 0,
            handle_types: handle_types as u32,
            pool: Pool(pool as usize),
            generation: (generation != 0).then_some(Generation(generation)),
        }))
    }

    /// Returns the attributes as numbers. The driver's booleans, ints, 64-bit numbers and pointers all fit, and the
    /// upper bytes of narrow ones are zero.
    fn attributes(&self, ptr: DevicePtr) -> Result<Option<[u64; ATTRIBUTES.len()]>> {
        let mut values = [0u64; ATTRIBUTES.len()];
        let Some(get_all) = self.api.pointer_get_attributes else {
            for (value, attribute) in values.iter_mut().zip(ATTRIBUTES) {
                // Some attributes do not exist for some memory; they are zero.
                *value = self.attribute(attribute, ptr)?.unwrap_or(0);
            }
            return Ok(Some(values));
        };
        let places = values.each_mut().map(|value| (&raw mut *value).cast::<c_void>());
        // SAFETY: writes at most 8 bytes at each of the places, one for each attribute.
        let status =
            unsafe { get_all(ATTRIBUTES.len() as u32, ATTRIBUTES.as_ptr(), places.as_ptr(), ptr.get()) };
        match status {
            number::ERROR_INVALID_VALUE | number::ERROR_INVALID_CONTEXT => Ok(None),
            status => self.check("cuPointerGetAttributes", status).map(|()| Some(values)),
        }
    }

    fn attribute(&self, attribute: PointerAttribute, ptr: DevicePtr) -> Result<Option<u64>> {
        let mut value = 0u64;
        // SAFETY: writes at most 8 bytes for these attributes; the address is not dereferenced.
        let status =
            unsafe { (self.api.pointer_get_attribute)((&raw mut value).cast(), attribute, ptr.get()) };
        match status {
            number::ERROR_INVALID_VALUE => Ok(None),
            status => self.check("cuPointerGetAttribute", status).map(|()| Some(value)),
        }
    }

    /// Returns the whole allocation that `inside` begins in. The device's context must be current.
    pub(crate) fn allocation_of(&self, inside: DeviceRange) -> Result<DeviceRange> {
        let (mut base, mut size) = (0, 0);
        // SAFETY: writes an address and a size; an address outside allocations is an error.
        let status =
            unsafe { (self.api.mem_get_address_range)(&raw mut base, &raw mut size, inside.ptr.get()) };
        if matches!(status, number::ERROR_INVALID_VALUE | number::ERROR_NOT_FOUND) {
            return Err(Error::NotDeviceMemory {
                ptr: inside.ptr,
                why: "no allocation of this process contains the address (cuMemGetAddressRange)".into(),
            });
        }
        self.check("cuMemGetAddressRange", status)?;
        Ok(DeviceRange::new(inside.device, DevicePtr::new(base), size as u64))
    }
}
