//! Devices: ordinals and identities.
//!
//! An ordinal is a position in a list that differs between processes (`CUDA_VISIBLE_DEVICES`, `ASCEND_RT_VISIBLE_DEVICES`). An
//! identity is the same in all processes of the host. Sending an ordinal instead of an identity is the most frequent bug of
//! hand-written device IPC, so they are two types.

mod identity;
mod ordinal;

pub(crate) use identity::parse_hex;
pub use identity::{DeviceIdentity, HostId};
pub use ordinal::DeviceOrdinal;

/// The properties of a device that are available without a context on it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// The ordinal in this process.
    pub ordinal: DeviceOrdinal,
    /// The identity, the same in all processes of the host.
    pub identity: DeviceIdentity,
    /// The vendor's name of the device model.
    pub name: String,
    /// The size of the device's memory in bytes.
    pub memory_bytes: u64,
}

impl DeviceInfo {
    /// Creates the description of a device.
    pub fn new(
        ordinal: DeviceOrdinal,
        identity: DeviceIdentity,
        name: impl Into<String>,
        memory_bytes: u64,
    ) -> Self {
        Self { ordinal, identity, name: name.into(), memory_bytes }
    }
}
