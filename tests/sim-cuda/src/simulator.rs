//! The driver of the process, and its table of objects.
//!
//! Handles are numbers, never addresses, so that a destroyed or invalid handle is rejected without dereferencing
//! it.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use device_ipc_mock_engine::{Machine, NODE_VARIABLE};

use crate::config::Config;
use crate::context::{Context, PrimaryContext};
use crate::directory::Directory;
use crate::event::Event;
use crate::memory::MemoryTable;
use crate::module::{Function, Module};
use crate::pool::PoolTable;
use crate::status::{Result, Status};
use crate::stream::Stream;

/// The driver.
pub(crate) struct Simulator {
    pub(crate) config: Config,
    pub(crate) machine: Arc<Machine>,
    /// The number of visible devices.
    pub(crate) devices: usize,
    /// For each device, a lock for creating and destroying its primary context: a concurrent retain gets the next
    /// one.
    pub(crate) changing: Vec<Mutex<()>>,
    objects: Mutex<Objects>,
}

/// All objects that handles and addresses name.
#[derive(Default)]
pub(crate) struct Objects {
    pub(crate) primaries: Vec<PrimaryContext>,
    pub(crate) contexts: HashMap<u64, Arc<Context>>,
    pub(crate) streams: HashMap<u64, Arc<Stream>>,
    pub(crate) events: HashMap<u64, Arc<Event>>,
    pub(crate) modules: HashMap<u64, Arc<Module>>,
    pub(crate) functions: HashMap<u64, Function>,
    pub(crate) graphs: BTreeMap<u64, usize>,
    /// Streams and events of reset contexts.
    pub(crate) reset_objects: HashMap<u64, ResetObject>,
    pub(crate) memory: MemoryTable,
    pub(crate) pools: PoolTable,
    pub(crate) directory: Option<Directory>,
}

/// The state of a handle whose context was reset: the driver does not always reject it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResetObject {
    Stream,
    Event,
}

/// Prints the reason and aborts the process, where the driver crashes by a segmentation fault.
pub(crate) fn crash(why: &str) -> ! {
    eprintln!("device-ipc-sim-cuda: {why}: the real driver crashes with SIGSEGV here");
    std::process::abort()
}

static SIMULATOR: OnceLock<Simulator> = OnceLock::new();

impl Simulator {
    pub(crate) fn objects(&self) -> MutexGuard<'_, Objects> {
        lock(&self.objects)
    }
}

/// Initializes the driver once.
///
/// # Errors
/// `NO_DEVICE`; `OPERATING_SYSTEM` without the `/proc` of the process's pid namespace; `UNKNOWN` for an invalid
/// configuration, which is printed on stderr.
pub(crate) fn initialise() -> Result {
    static MAKING: Mutex<()> = Mutex::new(());
    let _making = lock(&MAKING);
    if SIMULATOR.get().is_some() {
        return simulator().map(drop);
    }
    let own_proc = std::fs::read_link("/proc/self").ok();
    if own_proc.and_then(|pid| pid.to_str()?.parse().ok()) != Some(std::process::id()) {
        return Err(Status::OPERATING_SYSTEM);
    }
    let config = Config::from_environment().map_err(|why| {
        eprintln!("device-ipc-sim-cuda: {why}");
        Status::UNKNOWN
    })?;
    let machine = Machine::in_node(config.machine.clone(), std::env::var(NODE_VARIABLE).ok());
    let devices = machine.devices().len();
    if devices == 0 {
        return Err(Status::NO_DEVICE);
    }
    let objects = Objects {
        primaries: (0..devices).map(PrimaryContext::new).collect(),
        memory: MemoryTable::new(devices),
        pools: PoolTable::new(devices),
        ..Objects::default()
    };
    let changing = (0..devices).map(|_| Mutex::default()).collect();
    let _ = SIMULATOR.set(Simulator { config, machine, devices, changing, objects: Mutex::new(objects) });
    Ok(())
}

/// Returns the driver after `cuInit`.
///
/// # Errors
/// `NOT_INITIALIZED`, also in a forked child.
pub(crate) fn simulator() -> Result<&'static Simulator> {
    static PID: OnceLock<u32> = OnceLock::new();
    let simulator = SIMULATOR.get().ok_or(Status::NOT_INITIALIZED)?;
    if *PID.get_or_init(std::process::id) != std::process::id() {
        return Err(Status::NOT_INITIALIZED);
    }
    Ok(simulator)
}

/// Returns the driver, if it is initialized.
pub(crate) fn simulator_if_any() -> Option<&'static Simulator> {
    SIMULATOR.get()
}

/// Returns a new number for a handle, different from all others and from addresses of this process.
pub(crate) fn next_handle() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    const FIRST: u64 = 0x0c0d_a000_0000_0000;
    FIRST + 16 * NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Locks a mutex, also a poisoned one: every table is consistent between two statements.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
