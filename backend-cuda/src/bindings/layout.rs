//! The structures of libcuda's virtual memory and memory pools, with their constants.
//!
//! "Data types used by CUDA driver" (`group__CUDA__TYPES`). Bytes that newer headers assign to new fields are zero.

use std::ffi::{c_int, c_uint};

/// `CUmemGenericAllocationHandle`: a mapped or unmapped block of `cuMemCreate`.
pub(crate) type BlockHandle = u64;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(crate) const HANDLE_TYPE_POSIX_FD: c_uint = 0x1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`.
pub(crate) const HANDLE_TYPE_FABRIC: c_uint = 0x8;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const ALLOCATION_TYPE_PINNED: c_uint = 0x1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const LOCATION_TYPE_DEVICE: c_uint = 0x1;

/// `CU_MEM_ACCESS_FLAGS_PROT_NONE`.
pub(crate) const ACCESS_NONE: c_uint = 0x0;
/// `CU_MEM_ACCESS_FLAGS_PROT_READ`.
pub(crate) const ACCESS_READ: c_uint = 0x1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub(crate) const ACCESS_READ_WRITE: c_uint = 0x3;

/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
pub(crate) const GRANULARITY_MINIMUM: c_uint = 0x0;

/// `CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES`, `.._REUSE_ALLOW_OPPORTUNISTIC`,
/// `.._REUSE_ALLOW_INTERNAL_DEPENDENCIES` (each an `int`) and `.._RELEASE_THRESHOLD` (64 bits): the attributes that
/// control a pool's behaviour.
pub(crate) const POOL_BEHAVIOUR: [c_uint; 4] = [1, 2, 3, 4];

/// `CUmemLocation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Location {
    kind: c_uint,
    id: c_int,
}

impl Location {
    /// Returns the location of a device with this handle.
    pub(crate) const fn device(handle: c_int) -> Self {
        Self { kind: LOCATION_TYPE_DEVICE, id: handle }
    }
}

/// `CUmemAllocationProp`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct AllocationProperties {
    kind: c_uint,
    requested_handle_types: c_uint,
    location: Location,
    windows: usize,
    flags: [u8; 8],
}

impl AllocationProperties {
    /// Returns the properties of a device's memory that can be exported as these types of handle.
    pub(crate) const fn on_device(handle: c_int, handle_types: c_uint) -> Self {
        Self {
            kind: ALLOCATION_TYPE_PINNED,
            requested_handle_types: handle_types,
            location: Location::device(handle),
            windows: 0,
            flags: [0; 8],
        }
    }

    /// Returns empty properties for the driver to fill in.
    pub(crate) const fn unknown() -> Self {
        Self {
            kind: 0,
            requested_handle_types: 0,
            location: Location { kind: 0, id: 0 },
            windows: 0,
            flags: [0; 8],
        }
    }

    /// Returns whether it is memory of a device, as opposed to the host.
    pub(crate) const fn is_on_a_device(&self) -> bool {
        self.location.kind == LOCATION_TYPE_DEVICE
    }
}

/// `CUmemAccessDesc`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct AccessDescription {
    pub(crate) location: Location,
    pub(crate) flags: c_uint,
}

/// `CUmemPoolProps`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct PoolProperties {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    windows: usize,
    max_size: usize,
    reserved: [u8; 56],
}

impl PoolProperties {
    /// Returns the properties of a pool on a device that can be exported as a file descriptor.
    pub(crate) const fn on_device(handle: c_int) -> Self {
        Self {
            kind: ALLOCATION_TYPE_PINNED,
            handle_types: HANDLE_TYPE_POSIX_FD,
            location: Location::device(handle),
            windows: 0,
            max_size: 0,
            reserved: [0; 56],
        }
    }
}

/// The length of `CUmemPoolPtrExportData`.
pub(crate) const POINTER_BYTES: usize = 64;
/// The length of `CUmemFabricHandle`.
pub(crate) const FABRIC_BYTES: usize = 64;

/// `CUmemPoolPtrExportData`.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(crate) struct PoolPointer(pub(crate) [u8; POINTER_BYTES]);

/// `CUmemFabricHandle`.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(crate) struct FabricHandle(pub(crate) [u8; FABRIC_BYTES]);

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use cudarc::driver::sys;

    use super::*;

    /// cudarc's types are generated from the vendor's header.
    #[test]
    fn structures_have_the_vendors_layout() {
        assert_eq!(size_of::<Location>(), size_of::<sys::CUmemLocation>());
        assert_eq!(size_of::<AllocationProperties>(), size_of::<sys::CUmemAllocationProp>());
        assert_eq!(size_of::<AccessDescription>(), size_of::<sys::CUmemAccessDesc>());
        assert_eq!(size_of::<PoolProperties>(), size_of::<sys::CUmemPoolProps>());
        assert_eq!(size_of::<PoolPointer>(), size_of::<sys::CUmemPoolPtrExportData>());
        assert_eq!(size_of::<FabricHandle>(), size_of::<sys::CUmemFabricHandle>());
        assert_eq!(
            [
                offset_of!(AllocationProperties, requested_handle_types),
                offset_of!(AllocationProperties, location),
                offset_of!(AllocationProperties, windows),
                offset_of!(AllocationProperties, flags),
            ],
            [
                offset_of!(sys::CUmemAllocationProp, requestedHandleTypes),
                offset_of!(sys::CUmemAllocationProp, location),
                offset_of!(sys::CUmemAllocationProp, win32HandleMetaData),
                offset_of!(sys::CUmemAllocationProp, allocFlags),
            ]
        );
        assert_eq!(
            [
                offset_of!(PoolProperties, handle_types),
                offset_of!(PoolProperties, location),
                offset_of!(PoolProperties, windows),
                offset_of!(PoolProperties, max_size),
            ],
            [
                offset_of!(sys::CUmemPoolProps, handleTypes),
                offset_of!(sys::CUmemPoolProps, location),
                offset_of!(sys::CUmemPoolProps, win32SecurityAttributes),
                offset_of!(sys::CUmemPoolProps, maxSize),
            ]
        );
        assert_eq!(offset_of!(AccessDescription, flags), offset_of!(sys::CUmemAccessDesc, flags));
    }
}
