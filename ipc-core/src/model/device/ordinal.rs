//! The ordinal of a device.

use std::fmt;

/// The position of a device in **this process's** list of visible devices.
///
/// Never sent to another process; see [`DeviceIdentity`](super::DeviceIdentity).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceOrdinal(u32);

impl DeviceOrdinal {
    /// Creates the ordinal of this position.
    pub const fn new(position: u32) -> Self {
        Self(position)
    }

    /// Returns the position as a number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the position as an index into [`DeviceIpc::devices`](crate::backend::DeviceIpc::devices).
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
