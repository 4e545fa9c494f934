//! Blocks of virtual memory as other allocators map them: side by side in one reservation, or with holes. Uses the
//! driver's functions directly.

use std::ffi::{c_int, c_uint, c_ulonglong};
use std::sync::Arc;

use device_ipc_core::backend::DeviceIpc;
use device_ipc_core::{DeviceOrdinal, DevicePtr, DeviceRange};
use device_ipc_cuda::CudaBackend;
use libloading::Library;

const ZERO: DeviceOrdinal = DeviceOrdinal::new(0);

/// The granularity of block sizes, on the tested GPUs and the simulator.
pub(crate) const GRANULE: u64 = 2 << 20;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(crate) const BY_FD: c_uint = 1;
/// `CU_MEM_HANDLE_TYPE_NONE`.
pub(crate) const NO_HANDLE: c_uint = 0;

type Create = unsafe extern "C" fn(*mut u64, usize, *const Properties, c_ulonglong) -> i32;
type Release = unsafe extern "C" fn(u64) -> i32;
type Reserve = unsafe extern "C" fn(*mut u64, usize, usize, u64, c_ulonglong) -> i32;
type Unreserve = unsafe extern "C" fn(u64, usize) -> i32;
type Map = unsafe extern "C" fn(u64, usize, usize, u64, c_ulonglong) -> i32;
type Unmap = unsafe extern "C" fn(u64, usize) -> i32;
type SetAccess = unsafe extern "C" fn(u64, usize, *const Access, usize) -> i32;

/// `CUmemAllocationProp`.
#[repr(C)]
struct Properties {
    kind: c_uint,
    handle_types: c_uint,
    location: [c_int; 2],
    windows: usize,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct Access {
    location: [c_int; 2],
    flags: c_uint,
}

const ON_DEVICE_ZERO: [c_int; 2] = [1, 0];

/// A reservation with blocks, unmapped on drop.
pub(crate) struct Blocks {
    library: Library,
    _backend: Arc<CudaBackend>,
    base: u64,
    reserved: u64,
    mapped: Vec<(u64, u64)>,
}

impl Blocks {
    /// Maps blocks of these sizes and types of handle side by side; a size without a type is a hole.
    pub(crate) fn map(backend: &Arc<CudaBackend>, sizes: &[(u64, Option<c_uint>)]) -> Self {
        let path = backend.info().library.clone().unwrap();
        // SAFETY: already loaded, as libcuda.
        let library = unsafe { Library::new(path) }.unwrap();
        // An allocation of one byte creates the device's context.
        let byte = backend.memory().allocate(ZERO, 1).unwrap();
        // SAFETY: freed once.
        unsafe { backend.memory().free(byte) }.unwrap();
        let reserved = sizes.iter().map(|(size, _)| size).sum();
        let mut blocks =
            Self { library, _backend: Arc::clone(backend), base: 0, reserved, mapped: Vec::new() };
        // SAFETY: the functions have these types in cuda.h; the arguments follow its manual.
        unsafe {
            let reserve = blocks.function::<Reserve>("cuMemAddressReserve");
            assert_eq!(reserve(&raw mut blocks.base, reserved as usize, 0, 0, 0), 0);
            let mut at = blocks.base;
            for (size, handle_types) in sizes {
                if let Some(handle_types) = handle_types {
                    blocks.map_one(at, *size, *handle_types);
                }
                at += size;
            }
        }
        blocks
    }

    /// # Safety
    ///
    /// The addresses are reserved, and no memory is mapped there.
    unsafe fn map_one(&mut self, at: u64, size: u64, handle_types: c_uint) {
        let properties =
            Properties { kind: 1, handle_types, location: ON_DEVICE_ZERO, windows: 0, flags: [0; 8] };
        let access = Access { location: ON_DEVICE_ZERO, flags: 3 };
        let mut handle = 0;
        // SAFETY: as in `map`.
        unsafe {
            let create = self.function::<Create>("cuMemCreate");
            assert_eq!(create(&raw mut handle, size as usize, &raw const properties, 0), 0);
            assert_eq!(self.function::<Map>("cuMemMap")(at, size as usize, 0, handle, 0), 0);
            assert_eq!(self.function::<Release>("cuMemRelease")(handle), 0);
            let set_access = self.function::<SetAccess>("cuMemSetAccess");
            assert_eq!(set_access(at, size as usize, &raw const access, 1), 0);
        }
        self.mapped.push((at, size));
    }

    /// Returns the whole reservation.
    pub(crate) fn range(&self) -> DeviceRange {
        DeviceRange::new(ZERO, DevicePtr::new(self.base), self.reserved)
    }

    /// # Safety
    ///
    /// `F` is the function's type.
    unsafe fn function<F: Copy>(&self, name: &str) -> F {
        // SAFETY: as the caller promised.
        *unsafe { self.library.get::<F>(name) }.unwrap()
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        // SAFETY: exactly this was mapped and reserved, and its work has finished.
        unsafe {
            for (at, size) in &self.mapped {
                self.function::<Unmap>("cuMemUnmap")(*at, *size as usize);
            }
            self.function::<Unreserve>("cuMemAddressFree")(self.base, self.reserved as usize);
        }
    }
}
