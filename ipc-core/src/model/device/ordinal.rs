//! The position of a device in this process's numbering.

use std::fmt;

/// The position of a device in **this process's** numbering, as the vendor's visibility variable left it.
///
/// Never sent to another process: see [`DeviceIdentity`](super::DeviceIdentity) for what is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceOrdinal(u32);

impl DeviceOrdinal {
    /// The ordinal at this position.
    pub const fn new(position: u32) -> Self {
        Self(position)
    }

    /// The position as a number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The position as an index into [`DeviceIpc::devices`](crate::backend::DeviceIpc::devices).
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl From<u32> for DeviceOrdinal {
    fn from(position: u32) -> Self {
        Self(position)
    }
}

impl fmt::Display for DeviceOrdinal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
