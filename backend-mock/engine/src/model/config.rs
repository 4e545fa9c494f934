//! The configuration of a machine.
//!
//! Every rule in which vendors differ is one field, so that a test names the behaviour that it needs and
//! nothing else changes.

use std::time::Duration;

use super::operation::Fault;
use super::peers::PeerMatrix;

/// The lifetime of an importer's mapping.
///
/// It applies to handles of bytes. A file descriptor pins the memory with either lifetime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Lifetime {
    /// As CUDA: the mapping outlives the exporter's free and its termination.
    #[default]
    Pinning,
    /// As Ascend: the exporter's free, unexport or termination revokes the mapping. Work that accesses it
    /// fails with [`EngineError::Revoked`](crate::EngineError::Revoked).
    Revoking,
}

/// One physical device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceConfig {
    /// The display name.
    pub name: String,
    /// The identity: equal in all processes, unique for each physical device.
    pub uuid: [u8; 16],
    /// Size of the memory in bytes. Each process can allocate that much.
    pub memory_bytes: u64,
}

impl DeviceConfig {
    /// Describes the physical device number `physical`, with the same name and UUID in every process.
    pub fn numbered(physical: usize, memory_bytes: u64) -> Self {
        let mut uuid = *b"mockdev-\0\0\0\0\0\0\0\0";
        uuid[8..].copy_from_slice(&(physical as u64).to_be_bytes());
        Self { name: format!("Mock Device {physical}"), uuid, memory_bytes }
    }
}

/// The machine that a process sees.
///
/// Processes that share memory use equal configurations, except for `visible`, `check_generation`, `latency` and
/// `faults`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineConfig {
    /// The physical devices.
    pub devices: Vec<DeviceConfig>,
    /// The physical devices that this process sees, in this order, as with `CUDA_VISIBLE_DEVICES`.
    /// Ordinals are positions in this list. `None` means all. An index without a device ends the list.
    pub visible: Option<Vec<usize>>,
    /// Peer access between physical devices.
    pub peers: PeerMatrix,
    /// The lifetime of importers' mappings. The exporter's setting applies.
    pub lifetime: Lifetime,
    /// Whether [`RangeInfo::generation`](crate::RangeInfo::generation) is reported.
    pub generations: bool,
    /// Whether an open refuses a stale handle. If not, as with CUDA, a stale handle can open another allocation
    /// that has replaced the first one. Handles of a revoking exporter are always checked.
    pub check_generation: bool,
    /// Whether a process can open its own handles of bytes, as with Ascend. Otherwise the open fails with
    /// [`EngineError::OwnProcess`](crate::EngineError::OwnProcess).
    pub own_handles: bool,
    /// Whether events can be shared between processes.
    pub events: bool,
    /// A delay before every stream operation begins.
    pub latency: Duration,
    /// Faults that are armed when the machine is created.
    pub faults: Vec<Fault>,
}

impl Default for MachineConfig {
    /// Two devices of 1 GiB with mutual peer access, pinning lifetime, generations, shareable events, 200 µs latency.
    fn default() -> Self {
        const GIB: u64 = 1 << 30;
        Self {
            devices: (0..2).map(|physical| DeviceConfig::numbered(physical, GIB)).collect(),
            visible: None,
            peers: PeerMatrix::All,
            lifetime: Lifetime::Pinning,
            generations: true,
            check_generation: false,
            own_handles: false,
            events: true,
            latency: Duration::from_micros(200),
            faults: Vec::new(),
        }
    }
}

impl MachineConfig {
    /// Returns the visible physical devices, by ordinal.
    pub(crate) fn physical_order(&self) -> Vec<usize> {
        match &self.visible {
            None => (0..self.devices.len()).collect(),
            Some(list) => {
                list.iter().copied().take_while(|&physical| physical < self.devices.len()).collect()
            }
        }
    }
}
