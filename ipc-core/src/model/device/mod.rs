//! Devices: where one stands in this process's numbering, and what it is whatever the numbering.
//!
//! An ordinal is a position in a list that every process may see differently (`CUDA_VISIBLE_DEVICES`,
//! `ASCEND_RT_VISIBLE_DEVICES`). An identity is the same for everybody on the machine. Sending the first
//! where the second was meant is the most frequent bug of hand-written device IPC, so here they are two types.

mod identity;
mod ordinal;

pub(crate) use identity::parse_hex;
pub use identity::{DeviceIdentity, HostId};
pub use ordinal::DeviceOrdinal;

/// What a backend tells about one device without creating a context on it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Position in this process's numbering.
    pub ordinal: DeviceOrdinal,
    /// The same for every process on the machine.
    pub identity: DeviceIdentity,
    /// The vendor's name of the model.
    pub name: String,
    /// Size of the device's memory, in bytes.
    pub memory_bytes: u64,
}

impl DeviceInfo {
    /// Describes a device.
    pub fn new(
        ordinal: DeviceOrdinal,
        identity: DeviceIdentity,
        name: impl Into<String>,
        memory_bytes: u64,
    ) -> Self {
        Self { ordinal, identity, name: name.into(), memory_bytes }
    }
}
