//! The C boundary: layouts of `cuda.h`, and pointers of callers.
//!
//! Each function of the driver is `unsafe` and requires, as `cuda.h` does, that pointers are null or valid as
//! declared. The wrappers are created only at that boundary, and are the only code that dereferences those
//! pointers.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::status::{Result, Status};

/// A pointer to which a call writes one value.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// Writes the value.
    ///
    /// # Errors
    /// `INVALID_VALUE` for null.
    pub(crate) fn put(self, value: T) -> Result {
        if self.0.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: not null, so valid for one value, as the caller of the function promised.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Writes the value, unless the pointer is null.
    pub(crate) fn put_if_not_null(self, value: T) {
        let _ = self.put(value);
    }

    /// Casts an address to a pointer whose type another argument states.
    pub(crate) fn from_address(address: usize) -> Self {
        Self(address as *mut T)
    }

    pub(crate) fn address(self) -> usize {
        self.0 as usize
    }
}

impl<T: Copy> Out<T> {
    /// Reads the value.
    pub(crate) fn get(self) -> Result<T> {
        In(self.0.cast_const()).get()
    }
}

/// A pointer from which a call reads one or several values.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// Reads the value.
    ///
    /// # Errors
    /// `INVALID_VALUE` for null.
    pub(crate) fn get(self) -> Result<T> {
        self.at(0)
    }

    /// Reads the value at an index, which is below the count that the caller states.
    pub(crate) fn at(self, index: usize) -> Result<T> {
        if self.0.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: not null, so valid for the number of values that the caller of the function stated.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }
}

/// A C string.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    pub(crate) fn get(&self) -> Result<&str> {
        if self.0.is_null() {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: not null, so a NUL-terminated string that lives during the call, as the caller of the function
        // promised.
        unsafe { CStr::from_ptr(self.0) }.to_str().map_err(|_| Status::INVALID_VALUE)
    }
}

/// Host memory of a caller: address and length.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostBytes {
    address: usize,
    len: usize,
}

impl HostBytes {
    /// # Errors
    /// `INVALID_VALUE` for null.
    pub(crate) fn new(address: u64, len: usize) -> Result<Self> {
        if address == 0 { Err(Status::INVALID_VALUE) } else { Ok(Self { address: address as usize, len }) }
    }

    pub(crate) fn to_vec(self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        // SAFETY: the caller of the function promised that these bytes are readable.
        unsafe { std::ptr::copy_nonoverlapping(self.address as *const u8, bytes.as_mut_ptr(), self.len) };
        bytes
    }

    pub(crate) fn fill_from(self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len, "the requested length");
        // SAFETY: the caller of the function promised that these bytes are writable.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.address as *mut u8, self.len) };
    }
}

/// `CUhostFn`.
pub(crate) type HostFn = unsafe extern "C" fn(*mut c_void);

/// `CUuuid`, and other arrays of 16 bytes.
pub(crate) type Uuid = [u8; 16];

/// `CUipcMemHandle` and `CUipcEventHandle`, which are passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct IpcHandle {
    pub(crate) reserved: [u8; 64],
}

/// `CUmemLocation`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Location {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

impl Location {
    /// `CU_MEM_LOCATION_TYPE_DEVICE`.
    pub(crate) const DEVICE: c_int = 1;
}

/// `CUmemAllocationProp`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct AllocationProp {
    pub(crate) kind: c_int,
    pub(crate) handle_types: c_int,
    pub(crate) location: Location,
    pub(crate) win32: usize,
    pub(crate) flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct AccessDesc {
    pub(crate) location: Location,
    pub(crate) flags: c_int,
}

/// `CUmemPoolProps`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct PoolProps {
    pub(crate) kind: c_int,
    pub(crate) handle_types: c_int,
    pub(crate) location: Location,
    pub(crate) win32: usize,
    pub(crate) max_size: usize,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 54],
}

/// `CUmemPoolPtrExportData`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct PoolPointer {
    pub(crate) reserved: [u8; 64],
}

const _: () = assert!(size_of::<IpcHandle>() == 64 && size_of::<Location>() == 8);
const _: () = assert!(size_of::<AllocationProp>() == 32 && size_of::<AccessDesc>() == 12);
const _: () = assert!(size_of::<PoolProps>() == 88 && size_of::<PoolPointer>() == 64);
const _: () = assert!(size_of::<Out<u8>>() == size_of::<usize>() && size_of::<c_uint>() == 4);
