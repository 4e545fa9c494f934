//! The state of a machine, as one process sees it.
//!
//! Several machines in one process (a test with two programs, a backend beside a simulator) share no ordinals, counters
//! or faults.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::memory::{Arena, MemoryTable};
use crate::model::{Counters, EngineError, Fault, Instrumentation, MachineConfig, Operation};
use crate::shared::{Event, node};
use crate::streams::{StreamTable, on_stream_thread};
use crate::system::{ProcessId, lock};

/// A visible device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The number of the device in this process.
    pub ordinal: usize,
    /// The number of the device in the machine, equal in every process.
    pub physical: usize,
    /// The display name.
    pub name: String,
    /// The identity, equal in every process.
    pub uuid: [u8; 16],
    /// Size of the memory in bytes.
    pub memory_bytes: u64,
}

/// A visible device, and its arena after the first allocation.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) physical: usize,
    pub(crate) memory_bytes: u64,
    pub(crate) arena: Mutex<Option<Arc<Arena>>>,
}

/// The devices, memory, streams and events of a process.
///
/// All methods may be called from any thread. Dropping the machine cancels its streams, drops their queued work, and
/// frees and closes all memory.
#[derive(Debug)]
pub struct Machine {
    pub(crate) config: MachineConfig,
    pub(crate) process: ProcessId,
    /// The node, for memory accounting. `None`: only this process counts.
    pub(crate) node: Option<String>,
    pub(crate) calls: Arc<Instrumentation>,
    pub(crate) devices: Vec<Device>,
    pub(crate) memory: Mutex<MemoryTable>,
    pub(crate) streams: Mutex<StreamTable>,
    pub(crate) events: Mutex<HashMap<u64, Event>>,
    next_id: AtomicU64,
}

impl Machine {
    /// Creates the machine that `config` describes, of no node. Starts no thread and allocates no device memory.
    pub fn new(config: MachineConfig) -> Arc<Self> {
        Self::in_node(config, None)
    }

    /// Creates the machine that `config` describes, of a node with this name: the value of [`NODE_VARIABLE`](crate::NODE_VARIABLE),
    /// which the caller reads. An invalid name is ignored.
    pub fn in_node(config: MachineConfig, node: Option<String>) -> Arc<Self> {
        let devices: Vec<Device> = config
            .physical_order()
            .into_iter()
            .map(|physical| Device {
                physical,
                memory_bytes: config.devices[physical].memory_bytes,
                arena: Mutex::new(None),
            })
            .collect();
        Arc::new(Self {
            process: ProcessId::current(),
            node: node.filter(|name| node::is_valid(name)),
            calls: Arc::new(Instrumentation::new(&config.faults)),
            memory: Mutex::new(MemoryTable::new(devices.len())),
            devices,
            streams: Mutex::default(),
            events: Mutex::default(),
            next_id: AtomicU64::new(1),
            config,
        })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &MachineConfig {
        &self.config
    }

    /// Returns the visible devices, by ordinal.
    pub fn devices(&self) -> Vec<DeviceInfo> {
        self.devices
            .iter()
            .enumerate()
            .map(|(ordinal, device)| {
                let config = &self.config.devices[device.physical];
                DeviceInfo {
                    ordinal,
                    physical: device.physical,
                    name: config.name.clone(),
                    uuid: config.uuid,
                    memory_bytes: config.memory_bytes,
                }
            })
            .collect()
    }

    /// Returns whether device `from` may access memory of device `to`, both by ordinal.
    ///
    /// # Errors
    /// `InvalidDevice`.
    pub fn peer_access(&self, from: usize, to: usize) -> Result<bool, EngineError> {
        Ok(self.config.peers.allows(self.device(from)?.physical, self.device(to)?.physical))
    }

    /// Arms a fault: the `after`th call of `operation` from now on fails once with [`EngineError::Injected`]. 1 and
    /// 0 are the next call.
    pub fn inject(&self, operation: Operation, after: u32, code: i32) {
        self.calls.arm(Fault { operation, after, code });
    }

    /// Returns the number of calls of each operation.
    pub fn counters(&self) -> Counters {
        self.calls.snapshot()
    }

    /// Begins a call: counts it, and fails in a forked child or if a fault is due.
    pub(crate) fn enter(&self, operation: Operation) -> Result<(), EngineError> {
        if self.is_forked() {
            return Err(EngineError::Forked);
        }
        self.calls.on_call(operation)
    }

    /// Begins a call that may wait for streams, and fails on a stream's thread.
    pub(crate) fn enter_waiting(&self, operation: Operation) -> Result<(), EngineError> {
        self.enter(operation)?;
        if on_stream_thread() { Err(EngineError::NotPermitted { operation }) } else { Ok(()) }
    }

    pub(crate) fn device(&self, ordinal: usize) -> Result<&Device, EngineError> {
        self.devices.get(ordinal).ok_or(EngineError::InvalidDevice { ordinal, count: self.devices.len() })
    }

    /// Returns a generation that no other memory of this process has had, of any machine.
    pub(crate) fn next_generation(&self) -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    fn is_forked(&self) -> bool {
        std::process::id() != self.process.pid
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if self.is_forked() {
            return;
        }
        lock(&self.streams).stop_all();
        let memory = lock(&self.memory);
        memory.retire_all();
    }
}
