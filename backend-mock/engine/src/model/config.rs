//! What machine to play.
//!
//! Why: every rule in which vendors differ is a field here, so that a test names
//! the behaviour it needs and nothing else changes.

use std::time::Duration;

use super::operation::Fault;
use super::peers::PeerMatrix;

/// What happens to an importer's mapping when the exporter ends it.
///
/// Concerns handles of bytes; memory that was passed as a file descriptor is pinned in both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Lifetime {
    /// As CUDA: the mapping outlives the exporter's free and its death.
    #[default]
    Pinning,
    /// As Ascend: the exporter's free, unexport or end takes the mapping away. Work that touches it
    /// fails with [`EngineError::Revoked`](crate::EngineError::Revoked).
    Revoking,
}

/// One physical device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceConfig {
    /// The name shown to people.
    pub name: String,
    /// The identity: equal in all processes, different for each physical device.
    pub uuid: [u8; 16],
    /// Size of its memory, in bytes. Each process can allocate as much.
    pub memory_bytes: u64,
}

impl DeviceConfig {
    /// Physical device number `physical` with the name and the UUID that every process gives it.
    pub fn numbered(physical: usize, memory_bytes: u64) -> Self {
        let mut uuid = *b"mockdev-\0\0\0\0\0\0\0\0";
        uuid[8..].copy_from_slice(&(physical as u64).to_be_bytes());
        Self { name: format!("Mock Device {physical}"), uuid, memory_bytes }
    }
}

/// The machine that a process sees. Processes that share memory should use the same one, but for
/// `visible`, `check_generation`, `latency` and `faults`, which are each process's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineConfig {
    /// The physical devices.
    pub devices: Vec<DeviceConfig>,
    /// The physical devices that this process sees, in this order, as with `CUDA_VISIBLE_DEVICES`.
    /// Ordinals are positions in this list. `None`: all. An index without a device ends the list.
    pub visible: Option<Vec<usize>>,
    /// Who reaches whom, by physical device.
    pub peers: PeerMatrix,
    /// What the end of an export does to importers. The exporter's setting counts.
    pub lifetime: Lifetime,
    /// Whether [`RangeInfo::generation`](crate::RangeInfo::generation) is told.
    pub generations: bool,
    /// Whether opening refuses a stale handle. Off, as with CUDA, a stale handle can silently open
    /// another block that took its place. A revoking exporter's handles are always checked.
    pub check_generation: bool,
    /// Whether a process can open what it exported itself as bytes, as with Ascend; otherwise
    /// [`EngineError::OwnProcess`](crate::EngineError::OwnProcess).
    pub own_handles: bool,
    /// Whether events can be shared between processes.
    pub events: bool,
    /// A delay before every stream operation begins.
    pub latency: Duration,
    /// Faults that are armed from the start.
    pub faults: Vec<Fault>,
}

impl Default for MachineConfig {
    /// Two devices of 1 GiB that reach each other, pinning, generations told, events shared, 200 µs latency.
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
    /// The physical devices that are visible, by ordinal.
    pub(crate) fn physical_order(&self) -> Vec<usize> {
        match &self.visible {
            None => (0..self.devices.len()).collect(),
            Some(list) => {
                list.iter().copied().take_while(|&physical| physical < self.devices.len()).collect()
            }
        }
    }
}
