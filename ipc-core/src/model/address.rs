//! Addresses of this process, and ranges of device memory.

use std::fmt;

use crate::model::device::DeviceOrdinal;

/// An address in device memory, valid in **this** process.
///
/// Addresses never cross a process boundary: a descriptor contains offsets into allocations.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DevicePtr(u64);

impl DevicePtr {
    /// The null address.
    pub const NULL: Self = Self(0);

    /// Creates an address from the vendor's number (`CUdeviceptr`, or a `void *` of ACL).
    pub const fn new(address: u64) -> Self {
        Self(address)
    }

    /// Returns the vendor's number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns whether this is the null address.
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// Returns the address plus `bytes`, or `None` on overflow.
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(address) => Some(Self(address)),
            None => None,
        }
    }

    /// Returns the distance from `base` in bytes, or `None` if `base` is greater.
    pub const fn offset_from(self, base: Self) -> Option<u64> {
        self.0.checked_sub(base.0)
    }
}

impl fmt::Debug for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Display for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{:x}", self.0)
    }
}

/// A range in the address space of one device of this process. It keeps no memory allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceRange {
    /// The device of the address space.
    pub device: DeviceOrdinal,
    /// The first address.
    pub ptr: DevicePtr,
    /// The length in bytes.
    pub len: u64,
}

impl DeviceRange {
    /// Creates the range of `len` bytes from `ptr`.
    pub const fn new(device: DeviceOrdinal, ptr: DevicePtr, len: u64) -> Self {
        Self { device, ptr, len }
    }

    /// Returns the address after the last byte, or `None` on overflow.
    pub const fn end(&self) -> Option<DevicePtr> {
        self.ptr.checked_add(self.len)
    }

    /// Returns whether the range contains all of `other`.
    pub fn contains(&self, other: &Self) -> bool {
        match (self.end(), other.end()) {
            (Some(end), Some(other_end)) => self.ptr <= other.ptr && other_end <= end,
            _ => false,
        }
    }

    /// Returns the `len` bytes from `byte_offset` on, or `None` if they are not all in the range.
    pub fn slice(&self, byte_offset: u64, len: u64) -> Option<Self> {
        let end = byte_offset.checked_add(len)?;
        if end > self.len {
            return None;
        }
        Some(Self { device: self.device, ptr: self.ptr.checked_add(byte_offset)?, len })
    }
}

/// The part of a region in one driver allocation. Driver calls take the base of the allocation only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The whole allocation.
    pub allocation: DeviceRange,
    /// The vendor's generation of the allocation (CUDA: `CU_POINTER_ATTRIBUTE_BUFFER_ID`); `None` if the vendor has none.
    pub generation: Option<Generation>,
}

/// The vendor's number of an allocation, which no later allocation of the process receives. It distinguishes allocations that
/// successively have the same address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Generation(pub u64);

#[cfg(test)]
mod tests;
