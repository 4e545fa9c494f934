//! The machine as one process sees it.
//!
//! Why one value: several machines in one process (a test that plays two programs, a
//! backend beside a simulator) must not share ordinals, counters or faults.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::memory::{Arena, MemoryTable};
use crate::model::{Counters, EngineError, Fault, Instrumentation, Lifetime, MachineConfig, Operation};
use crate::shared::{Event, node};
use crate::streams::{StreamTable, on_stream_thread};
use crate::system::{ProcessId, lock};

/// A visible device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number in this process.
    pub ordinal: usize,
    /// Its number in the machine, the same in every process.
    pub physical: usize,
    /// The name shown to people.
    pub name: String,
    /// The identity, the same in every process.
    pub uuid: [u8; 16],
    /// Size of its memory, in bytes.
    pub memory_bytes: u64,
}

/// A visible device, and the addresses of its memory once there are any.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) physical: usize,
    pub(crate) memory_bytes: u64,
    pub(crate) arena: Mutex<Option<Arc<Arena>>>,
}

/// Devices, memory, streams and events of this process.
///
/// All calls may be made from any thread. Dropping the machine ends its streams after the work that is
/// running, drops what is still queued, and frees and closes all memory.
#[derive(Debug)]
pub struct Machine {
    pub(crate) config: MachineConfig,
    pub(crate) process: ProcessId,
    /// `None`: the memory of other processes does not count.
    pub(crate) node: Option<String>,
    pub(crate) calls: Arc<Instrumentation>,
    pub(crate) devices: Vec<Device>,
    pub(crate) memory: Mutex<MemoryTable>,
    pub(crate) streams: Mutex<StreamTable>,
    pub(crate) events: Mutex<HashMap<u64, Event>>,
    next_id: AtomicU64,
}

impl Machine {
    /// The machine that `config` describes. Starts no thread and takes no memory.
    pub fn new(config: MachineConfig) -> Arc<Self> {
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
            node: node::of_this_process(),
            calls: Arc::new(Instrumentation::new(&config.faults)),
            memory: Mutex::new(MemoryTable::new(devices.len())),
            devices,
            streams: Mutex::default(),
            events: Mutex::default(),
            next_id: AtomicU64::new(1),
            config,
        })
    }

    /// The configuration it was made with.
    pub fn config(&self) -> &MachineConfig {
        &self.config
    }

    /// The visible devices, by ordinal.
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

    /// Whether device `from` may access memory of device `to`, both by ordinal.
    ///
    /// # Errors
    /// `InvalidDevice`.
    pub fn peer_access(&self, from: usize, to: usize) -> Result<bool, EngineError> {
        Ok(self.config.peers.reaches(self.device(from)?.physical, self.device(to)?.physical))
    }

    /// Makes the `after`-th call of `operation` from now on fail once with
    /// [`EngineError::Injected`]. 1 is the next call; 0 means the same.
    pub fn inject(&self, operation: Operation, after: u32, code: i32) {
        self.calls.arm(Fault { operation, after, code });
    }

    /// How often each operation was called.
    pub fn counters(&self) -> Counters {
        self.calls.snapshot()
    }

    /// Begins a call: counts it, and refuses it in a forked child or if a fault is due.
    pub(crate) fn enter(&self, operation: Operation) -> Result<(), EngineError> {
        if self.is_forked() {
            return Err(EngineError::Forked);
        }
        self.calls.call(operation)
    }

    /// Begins a call that may wait for streams, which a stream's own thread cannot do.
    pub(crate) fn enter_waiting(&self, operation: Operation) -> Result<(), EngineError> {
        self.enter(operation)?;
        if on_stream_thread() { Err(EngineError::NotPermitted { operation }) } else { Ok(()) }
    }

    pub(crate) fn device(&self, ordinal: usize) -> Result<&Device, EngineError> {
        self.devices.get(ordinal).ok_or(EngineError::InvalidDevice { ordinal, count: self.devices.len() })
    }

    /// Returns a number that no other memory of this process has had, of whichever machine.
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
        memory.retire_all(self.config.lifetime == Lifetime::Revoking);
    }
}
