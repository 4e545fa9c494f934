//! The state of the library: one value per process.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use device_ipc_mock_engine::{Machine, NODE_VARIABLE, StreamId};

use crate::block::Block;
use crate::config::Config;
use crate::event::Event;
use crate::ipc_memory::{DriverKeyTable, Export, Import};
use crate::notify::Notify;
use crate::peers::{PublishedPeers, is_enabled_by_any};
use crate::soc::Feature;
use crate::status::{Outcome, Status, refuse};
use crate::stream::Stream;
use crate::vmm::PhysicalMemory;

thread_local! {
    /// The calling thread's context.
    static CURRENT: Cell<Option<u64>> = const { Cell::new(None) };
}

/// The first handle of contexts, notifies and physical memory: none of them is an address or the number of a
/// stream.
const FIRST_HANDLE: u64 = 0x5A00_0000_0010;

/// The state between `aclInit` and `aclFinalize`.
#[derive(Debug, Default)]
pub(crate) struct Initialisation {
    pub(crate) count: u64,
    pub(crate) finalised: bool,
    /// The content of the first configuration file of the process; empty without a file.
    pub(crate) configuration: Option<Vec<u8>>,
}

/// The state of a device in this process.
#[derive(Debug, Default)]
pub(crate) struct DeviceState {
    /// Calls of `aclrtSetDevice` without an `aclrtResetDevice`.
    pub(crate) references: u64,
    pub(crate) default_context: Option<u64>,
    /// The stream of the synchronous copies, which are not ordered with other streams.
    pub(crate) copies: Option<StreamId>,
}

/// A context.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) device: usize,
    pub(crate) default_stream: Option<u64>,
}

/// The current context of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CurrentContext {
    pub(crate) context: u64,
    /// User id of its device.
    pub(crate) device: usize,
}

/// The objects of the process.
#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) init: Initialisation,
    pub(crate) devices: Vec<DeviceState>,
    /// Counts of peer access, by the physical ids of the accessing device and of the home device.
    pub(crate) peers: HashMap<(usize, usize), u64>,
    /// The counts of peer access, for the other processes of the machine.
    pub(crate) published_peers: Option<PublishedPeers>,
    pub(crate) contexts: HashMap<u64, Context>,
    pub(crate) streams: HashMap<u64, Stream>,
    pub(crate) events: HashMap<u64, Event>,
    pub(crate) notifies: HashMap<u64, Notify>,
    /// Memory by first address.
    pub(crate) blocks: BTreeMap<u64, Block>,
    pub(crate) exports: HashMap<Vec<u8>, Export>,
    pub(crate) driver_keys: DriverKeyTable,
    pub(crate) imports: HashMap<Vec<u8>, Import>,
    pub(crate) physical: HashMap<u64, PhysicalMemory>,
    /// The devices for which host memory was registered, by first address.
    pub(crate) registrations: HashMap<u64, HashSet<usize>>,
    handles: u64,
}

impl State {
    /// Returns a handle that was never used before.
    pub(crate) fn new_handle(&mut self) -> u64 {
        self.handles += 1;
        FIRST_HANDLE + self.handles * 16
    }
}

/// The library.
#[derive(Debug)]
pub(crate) struct Simulator {
    pub(crate) config: Config,
    pub(crate) machine: Arc<Machine>,
    /// The process that made the first call; calls in its forked children fail.
    process: u32,
    state: Mutex<State>,
}

impl Simulator {
    /// Returns the simulator of this process, and creates it at the first call.
    ///
    /// # Errors
    /// 500000 for an invalid description of the machine.
    pub(crate) fn get() -> Outcome<&'static Self> {
        static SIMULATOR: OnceLock<Result<Simulator, String>> = OnceLock::new();
        let made = SIMULATOR.get_or_init(|| match Config::from_environment() {
            Ok(config) => Ok(Self::new(config)),
            Err(error) => {
                // The status and its message report the error too.
                let _ = writeln!(std::io::stderr(), "{error}");
                Err(error.to_string())
            }
        });
        match made {
            Ok(simulator) if simulator.process != std::process::id() => refuse(
                Status::RT_DEV_SETUP_ERROR,
                "the library does not work in a forked child: start another program (fork and exec)",
            ),
            Ok(simulator) => Ok(simulator),
            Err(text) => refuse(Status::INTERNAL_ERROR, text.clone()),
        }
    }

    fn new(config: Config) -> Self {
        let machine = Machine::in_node(config.machine.clone(), std::env::var(NODE_VARIABLE).ok());
        let devices = machine.devices().iter().map(|_| DeviceState::default()).collect();
        let process = std::process::id();
        Self { config, machine, process, state: Mutex::new(State { devices, ..State::default() }) }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(crate) fn is_initialised(&self) -> bool {
        self.state().init.count > 0
    }

    /// Returns the calling thread's context.
    ///
    /// # Errors
    /// 107002 without a context, and for a destroyed one.
    pub(crate) fn current(&self) -> Outcome<CurrentContext> {
        let state = self.state();
        let found = CURRENT.get().and_then(|id| state.contexts.get(&id).map(|context| (id, context.device)));
        match found {
            Some((context, device)) => Ok(CurrentContext { context, device }),
            None => refuse(Status::RT_CONTEXT_NULL, "this thread has no context: call aclrtSetDevice on it"),
        }
    }

    /// Makes a context current on the calling thread.
    pub(crate) fn make_current(&self, context: Option<u64>) {
        CURRENT.set(context);
    }

    /// Returns the device with this user id.
    ///
    /// # Errors
    /// 107001.
    pub(crate) fn device(&self, user: i32) -> Outcome<usize> {
        let count = self.machine.devices().len();
        match usize::try_from(user).ok().filter(|&device| device < count && !self.config.no_driver) {
            Some(device) => Ok(device),
            None => refuse(
                Status::RT_INVALID_DEVICEID,
                format!("no device {user}: {count} device(s) are visible"),
            ),
        }
    }

    /// Returns the physical id of a device.
    pub(crate) fn physical(&self, device: usize) -> usize {
        self.machine.devices()[device].physical
    }

    /// # Errors
    /// 207000 where the chip does not have the feature.
    pub(crate) fn require(&self, feature: Feature) -> Outcome {
        if self.config.soc.has(feature) {
            return Ok(());
        }
        let name = self.config.soc.vendor_name().to_string_lossy();
        refuse(Status::RT_FEATURE_NOT_SUPPORT, format!("{name} does not support {feature:?}"))
    }

    /// Returns whether streams of a device have access to memory of a physical device.
    pub(crate) fn has_access(&self, device: usize, home: usize) -> bool {
        let own = self.physical(device);
        own == home || self.is_one_chip(own, home) || self.has_peer_access(own, home)
    }

    /// Returns whether two physical devices are dies of one chip behind one PCIe link, which have no peer access
    /// (hicann/driver, `devdrv_is_two_dev_on_same_chip`).
    pub(crate) fn is_one_chip(&self, one: usize, other: usize) -> bool {
        self.config.dies_share_a_link() && one / 2 == other / 2
    }

    /// Returns whether peer access between two physical devices is in effect: both directions were enabled
    /// (hicann/driver, `devdrv_is_p2p_enabled_inner`, `ubdrv_is_p2p_enabled`), by this process or, on a machine
    /// with shared counts, by any process.
    pub(crate) fn has_peer_access(&self, one: usize, other: usize) -> bool {
        let enabled = |pair| {
            let here = self.state().peers.get(&pair).is_some_and(|&count| count > 0);
            here || self.config.shared_peers.as_ref().is_some_and(|name| is_enabled_by_any(name, pair))
        };
        enabled((one, other)) && enabled((other, one))
    }

    /// Changes the counts of peer access, and publishes them to the other processes of the machine.
    pub(crate) fn change_peers<T>(
        &self,
        change: impl FnOnce(&mut HashMap<(usize, usize), u64>) -> T,
    ) -> Outcome<T> {
        let mut state = self.state();
        let changed = change(&mut state.peers);
        if let Some(name) = &self.config.shared_peers {
            if state.published_peers.is_none() {
                state.published_peers = Some(PublishedPeers::new(name)?);
            }
            if let Some(published) = &state.published_peers {
                published.set(state.peers.iter().filter(|(_, count)| **count > 0).map(|(pair, _)| *pair))?;
            }
        }
        Ok(changed)
    }

    /// Enables one direction, and increments its count.
    ///
    /// # Errors
    /// 507899 for devices that are not connected, or are dies of one chip.
    pub(crate) fn enable_peer(&self, own: usize, home: usize) -> Outcome {
        if own == home {
            return Ok(());
        }
        if self.is_one_chip(own, home) {
            let text = format!("physical devices {own} and {home} are on the same chip");
            return refuse(Status::RT_DRV_INTERNAL_ERROR, text);
        }
        if !self.config.machine.peers.allows(own, home) {
            let text = format!("physical device {own} has no link to {home}");
            return refuse(Status::RT_DRV_INTERNAL_ERROR, text);
        }
        self.change_peers(|peers| *peers.entry((own, home)).or_default() += 1)
    }

    /// Enables both directions, also where the other device is not visible to this process.
    pub(crate) fn enable_peer_both_ways(&self, device: usize, home: usize) -> Outcome {
        let own = self.physical(device);
        self.enable_peer(home, own)?;
        self.enable_peer(own, home)
    }
}

/// Locks a mutex, also a poisoned one: every table is consistent between two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
