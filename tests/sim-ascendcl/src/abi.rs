//! Types with the layouts of the vendor's headers.
//!
//! A C caller is responsible for the validity of its pointers, in the same way for all calls. The wrappers in this
//! file are the only code that dereferences them, and state what they rely on.

use std::ffi::{CStr, c_char, c_void};

use crate::key::KEY_BYTES;
use crate::status::{Outcome, Status, refuse};

/// An opaque handle or an address; null if it is 0.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Handle(pub(crate) *mut c_void);

// SAFETY: a number that is only compared and looked up.
unsafe impl Send for Handle {}

impl Handle {
    pub(crate) fn new(value: u64) -> Self {
        Self(value as *mut c_void)
    }

    pub(crate) fn value(self) -> u64 {
        self.0 as u64
    }

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Returns the value, or fails if it is null.
    pub(crate) fn required(self, what: &str) -> Outcome<u64> {
        if self.is_null() {
            return refuse(Status::INVALID_PARAM, format!("{what} is a null pointer"));
        }
        Ok(self.value())
    }
}

/// A pointer to a value that a call reads, writes, or both.
#[repr(transparent)]
#[derive(Debug)]
pub struct Pointer<T>(*mut T);

impl<T> Clone for Pointer<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Pointer<T> {}

impl<T: Copy> Pointer<T> {
    /// # Errors
    /// 100000 for a null pointer.
    pub(crate) fn check(self, what: &str) -> Outcome {
        if self.0.is_null() {
            return refuse(Status::INVALID_PARAM, format!("{what} is a null pointer"));
        }
        Ok(())
    }

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// # Errors
    /// 100000 for a null pointer.
    pub(crate) fn put(self, value: T, what: &str) -> Outcome {
        self.check(what)?;
        // SAFETY: not null, and the caller of an exported function guarantees that it can be written; no alignment
        // is assumed.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// # Errors
    /// 100000 for a null pointer.
    pub(crate) fn get(self, what: &str) -> Outcome<T> {
        self.check(what)?;
        // SAFETY: not null, and the caller of an exported function guarantees that it can be read.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// Reads the values of an array.
    ///
    /// # Errors
    /// 100000 for a null pointer.
    pub(crate) fn list(self, count: usize, what: &str) -> Outcome<Vec<T>> {
        self.check(what)?;
        // SAFETY: not null, and the caller of an exported function guarantees `count` elements.
        Ok((0..count).map(|index| unsafe { self.0.add(index).read_unaligned() }).collect())
    }

    /// Converts the address in a handle to a pointer.
    pub(crate) fn at(handle: Handle) -> Self {
        Self(handle.0.cast())
    }

    /// Casts to a pointer to another type.
    pub(crate) fn cast<U>(self) -> Pointer<U> {
        Pointer(self.0.cast())
    }

    /// Drops a value that `Box::into_raw` passed to the caller.
    pub(crate) fn give_back(self) {
        // SAFETY: the caller of an exported function guarantees that the pointer came from the creating call, and
        // does not use it again.
        drop(unsafe { Box::from_raw(self.0) });
    }

    /// Writes an array.
    ///
    /// # Errors
    /// 100000 for a null pointer.
    pub(crate) fn put_list(self, values: &[T], what: &str) -> Outcome {
        self.check(what)?;
        for (index, &value) in values.iter().enumerate() {
            // SAFETY: not null, and the caller of an exported function guarantees room for these elements.
            unsafe { self.0.add(index).write_unaligned(value) };
        }
        Ok(())
    }
}

/// A NUL-terminated string, or a key.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub struct Text(*const c_char);

impl Text {
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Returns the bytes before the NUL.
    ///
    /// # Errors
    /// 100000 for a null pointer.
    pub(crate) fn bytes(self, what: &str) -> Outcome<&'static [u8]> {
        if self.0.is_null() {
            return refuse(Status::INVALID_PARAM, format!("{what} is a null pointer"));
        }
        // SAFETY: not null, and the caller of an exported function guarantees the NUL. The bytes are used during
        // the call only.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_bytes())
    }

    /// Returns the bytes of a key: those before the NUL, of which the driver reads at most the size of a key
    /// buffer.
    ///
    /// # Errors
    /// 100000 for a null pointer, 107000 for an empty key and one that is too long.
    pub(crate) fn key(self) -> Outcome<Vec<u8>> {
        if self.0.is_null() {
            return refuse(Status::INVALID_PARAM, "key is a null pointer");
        }
        let mut key = Vec::new();
        for index in 0..KEY_BYTES {
            // SAFETY: not null; the caller of an exported function guarantees the bytes up to the NUL, and no byte
            // behind the first NUL is read.
            match unsafe { self.0.add(index).read() } {
                0 => break,
                byte => key.push(byte.cast_unsigned()),
            }
        }
        if key.is_empty() || key.len() >= KEY_BYTES {
            return refuse(Status::RT_PARAM_INVALID, "a key has 1 to 64 bytes before its NUL");
        }
        Ok(key)
    }
}

/// `aclrtMemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemLocation {
    /// Device or node.
    pub id: u32,
    /// 0 host, 1 device, 2 unknown.
    pub kind: i32,
}

impl MemLocation {
    pub(crate) const HOST: i32 = 0;
    pub(crate) const DEVICE: i32 = 1;
}

/// `aclrtPtrAttributes`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PtrAttributes {
    /// The location of the memory.
    pub location: MemLocation,
    /// Page size in bytes.
    pub page_size: u32,
    /// Unused.
    pub reserved: [u32; 4],
}

/// `aclrtPhysicalMemProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PhysicalMemProp {
    /// 0: none.
    pub handle_type: i32,
    /// 0: pinned.
    pub allocation_type: i32,
    /// The page attribute.
    pub attribute: i32,
    /// The location.
    pub location: MemLocation,
    /// Unused.
    pub reserved: u64,
}

/// `aclrtMemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemAccessDesc {
    /// 0 none, 1 read, 3 read and write.
    pub flags: i32,
    /// The device.
    pub location: MemLocation,
    /// Unused.
    pub reserved: [u8; 12],
}

/// `aclrtServerPid`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ServerPid {
    /// Super device.
    pub super_device: u32,
    /// The processes.
    pub pids: Pointer<i32>,
    /// The number of processes.
    pub count: usize,
}

/// `aclrtIpcEventHandle`, which is passed by value.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpcEventHandle(pub [u8; 64]);

/// `aclrtUuid`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Uuid(pub [u8; 16]);

/// `aclrtUtilizationInfo`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Utilization {
    /// Cube, vector, AI CPU and memory, in percent.
    pub percent: [i32; 4],
    /// Unused.
    pub extend: Handle,
}

/// `aclrtStreamConfigHandle`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct StreamConfig {
    /// Work memory of the stream.
    pub work: Handle,
    /// Size of the work memory in bytes.
    pub work_size: usize,
    /// Flags.
    pub flags: usize,
    /// Priority.
    pub priority: u32,
}

/// The first fields of `aclrtErrorInfo`; the others are left unchanged.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ErrorInfo {
    /// Whether a repair can be tried.
    pub try_repair: u8,
    /// Whether details follow.
    pub has_detail: u8,
    /// Unused.
    pub reserved: [u8; 2],
    /// Kind of error, 0 for none.
    pub kind: i32,
}

/// The description of failed work: `aclrtExceptionInfo`, which callers only pass on.
#[derive(Debug, Clone, Copy)]
pub struct ExceptionInfo {
    pub(crate) task: u32,
    pub(crate) stream: u32,
    pub(crate) thread: u32,
    pub(crate) device: u32,
    pub(crate) status: u32,
}

#[cfg(test)]
mod tests {
    use std::mem::{align_of, offset_of, size_of};

    use super::*;

    /// The numbers are those of `sizeof` and `offsetof` with the headers of hicann/runtime, 2026-08, on x86-64.
    #[test]
    fn layouts_match_vendor_headers() {
        assert_eq!((size_of::<MemLocation>(), offset_of!(MemLocation, kind)), (8, 4));
        assert_eq!((size_of::<PtrAttributes>(), offset_of!(PtrAttributes, page_size)), (28, 8));
        assert_eq!(offset_of!(PtrAttributes, reserved), 12);
        assert_eq!((size_of::<PhysicalMemProp>(), align_of::<PhysicalMemProp>()), (32, 8));
        assert_eq!(offset_of!(PhysicalMemProp, attribute), 8);
        assert_eq!((offset_of!(PhysicalMemProp, location), offset_of!(PhysicalMemProp, reserved)), (12, 24));
        assert_eq!((size_of::<MemAccessDesc>(), offset_of!(MemAccessDesc, location)), (24, 4));
        assert_eq!(
            (size_of::<ServerPid>(), offset_of!(ServerPid, pids), offset_of!(ServerPid, count)),
            (24, 8, 16)
        );
        assert_eq!((size_of::<IpcEventHandle>(), align_of::<IpcEventHandle>()), (64, 1));
        assert_eq!(size_of::<Uuid>(), 16);
        assert_eq!((size_of::<Utilization>(), offset_of!(Utilization, extend)), (24, 16));
        assert_eq!((size_of::<StreamConfig>(), offset_of!(StreamConfig, priority)), (32, 24));
        assert_eq!((size_of::<ErrorInfo>(), offset_of!(ErrorInfo, kind)), (8, 4));
    }
}
