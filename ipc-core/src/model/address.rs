//! Addresses of this process, and ranges of device memory.

use std::fmt;

use crate::model::device::DeviceOrdinal;

/// An address in device memory, valid in **this** process.
///
/// Addresses never cross a process boundary: a descriptor speaks of offsets into allocations.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DevicePtr(u64);

impl DevicePtr {
    /// The null address.
    pub const NULL: Self = Self(0);

    /// An address from the vendor's number (`CUdeviceptr`, or a `void *` of ACL).
    pub const fn new(address: u64) -> Self {
        Self(address)
    }

    /// The vendor's number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Is it the null address?
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The address `bytes` further, or `None` where that leaves the address space.
    pub const fn checked_add(self, bytes: u64) -> Option<Self> {
        match self.0.checked_add(bytes) {
            Some(address) => Some(Self(address)),
            None => None,
        }
    }

    /// How many bytes this address lies behind `base`, or `None` where it lies before it.
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

/// A range in the address space of one device of this process. Plain data: it keeps nothing alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceRange {
    /// The device in whose address space it lies.
    pub device: DeviceOrdinal,
    /// Where it begins.
    pub ptr: DevicePtr,
    /// Its length in bytes.
    pub len: u64,
}

impl DeviceRange {
    /// The range of `len` bytes that begins at `ptr`.
    pub const fn new(device: DeviceOrdinal, ptr: DevicePtr, len: u64) -> Self {
        Self { device, ptr, len }
    }

    /// The address after its last byte, or `None` where that leaves the address space.
    pub const fn end(&self) -> Option<DevicePtr> {
        self.ptr.checked_add(self.len)
    }

    /// Does `other` lie wholly inside?
    pub fn contains(&self, other: &Self) -> bool {
        match (self.end(), other.end()) {
            (Some(end), Some(other_end)) => self.ptr <= other.ptr && other_end <= end,
            _ => false,
        }
    }

    /// `len` bytes from `offset` on, or `None` where they do not lie inside.
    pub fn slice(&self, offset: u64, len: u64) -> Option<Self> {
        let end = offset.checked_add(len)?;
        if end > self.len {
            return None;
        }
        Some(Self { device: self.device, ptr: self.ptr.checked_add(offset)?, len })
    }
}

/// The part of a region in one driver allocation. Only its base crosses a driver call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The whole allocation.
    pub allocation: DeviceRange,
    /// The vendor's number of this allocation, never given twice by a process (CUDA:
    /// `CU_POINTER_ATTRIBUTE_BUFFER_ID`); `None` where the vendor has none.
    pub generation: Option<Generation>,
}

/// The vendor's number of an allocation. Two allocations at one address differ in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Generation(pub u64);

#[cfg(test)]
mod tests {
    use super::*;

    fn range(ptr: u64, len: u64) -> DeviceRange {
        DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::new(ptr), len)
    }

    #[test]
    fn ranges_at_the_end_of_the_address_space_do_not_wrap() {
        let last = range(u64::MAX - 15, 15);
        assert!(last.contains(&range(u64::MAX - 15, 1)));
        assert_eq!(range(u64::MAX - 3, 8).end(), None);
        assert!(!last.contains(&range(u64::MAX - 3, 8)));
        assert_eq!(range(16, 16).slice(u64::MAX, 2), None);
        assert_eq!(range(16, 16).slice(8, 9), None);
        assert_eq!(range(16, 16).slice(8, 8), Some(range(24, 8)));
    }
}
