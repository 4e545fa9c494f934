//! The identity of a device, and of a host.

use std::fmt;
use std::fs;

use serde::{Deserialize, Serialize};

/// The identity of a device, equal in all processes of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum DeviceIdentity {
    /// The vendor's UUID of the device (CUDA: `cuDeviceGetUuid`; Ascend A2, A3, 950: `aclrtDeviceGetUuid`).
    Uuid([u8; 16]),
    /// For devices without a UUID (Ascend 310P, 910): the host, and the physical id on it.
    HostPhysical {
        /// The host of the physical id.
        host: HostId,
        /// The vendor's physical id, which visibility variables do not change.
        physical: u32,
    },
}

impl fmt::Display for DeviceIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uuid(bytes) => fmt_uuid(bytes, f),
            Self::HostPhysical { host, physical } => write!(f, "{host}/{physical}"),
        }
    }
}

/// The identity of a host across reboots: `/etc/machine-id`, or a hash of the host name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct HostId([u8; 16]);

impl HostId {
    /// Creates an identity from its bytes.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// Returns the identity of this host. Containers of one host may have different ones: compare boot ids first.
    pub fn local() -> Self {
        let machine_id = fs::read_to_string("/etc/machine-id").ok();
        if let Some(bytes) = machine_id.and_then(|text| parse_hex(text.trim())) {
            return Self(bytes);
        }
        let name = rustix::system::uname();
        let name = name.nodename().to_bytes();
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(b"name");
        bytes[4..8].copy_from_slice(&crc32fast::hash(name).to_le_bytes());
        Self(bytes)
    }
}

impl fmt::Display for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt_uuid(&self.0, f)
    }
}

/// 32 hexadecimal digits; dashes are ignored.
pub(crate) fn parse_hex(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'-').collect();
    let bytes = data_encoding::HEXLOWER_PERMISSIVE.decode(&digits).ok()?;
    bytes.try_into().ok()
}

pub(crate) fn fmt_uuid(bytes: &[u8; 16], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for (index, byte) in bytes.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            f.write_str("-")?;
        }
        write!(f, "{byte:02x}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
