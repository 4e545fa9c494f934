//! The backend of a process, and an engine that notes the begin of its transfers and can hold their end.

#![allow(unsafe_code, reason = "passes the calls of an engine on")]

use std::env;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use device_ipc_core::backend::engine::{
    MemorySpace, PullRequest, RegisteredMemory, Transfer, TransferEngine, TransferMemory,
};
use device_ipc_core::backend::{BACKEND_VARIABLE, BackendInfo};
use device_ipc_core::{DeviceOrdinal, Error, Ipc, IpcBuilder, Remote, Result};
use device_ipc_cuda::CudaBackend;
use device_ipc_mock::{MockBackend, NAME};

use crate::Load;

/// The specification of the mock's machine, whose memory an exporter can revoke.
const MACHINE: &str = "devices=1;lifetime=revoking";

/// The variable of the simulated driver of CUDA. The processor can access the memory of its devices.
const SIMULATOR_VARIABLE: &str = "DEVICE_IPC_SIM_CUDA";

/// The number of transfers that this process has begun.
static BEGUN: AtomicU64 = AtomicU64::new(0);

/// Whether bytes of the transfer that was begun last have arrived.
static ARRIVES: AtomicBool = AtomicBool::new(false);

/// Whether the transfers of this process are held.
static HELD: AtomicBool = AtomicBool::new(false);

/// Whether the next registration of memory fails.
static FAILS: AtomicBool = AtomicBool::new(false);

/// Has the next registration of memory fail, for lack of memory.
pub(crate) fn fail_registration() {
    FAILS.store(true, Ordering::SeqCst);
}

/// Holds the transfers of this process: none is over for the library, however fast the bytes arrive. Errors are not held.
pub(crate) fn hold_transfers(hold: bool) {
    HELD.store(hold, Ordering::SeqCst);
}

/// Returns the number of transfers that this process has begun.
pub(crate) fn begun_transfers() -> u64 {
    BEGUN.load(Ordering::SeqCst)
}

/// Returns whether bytes of the transfer that was begun last have arrived, as far as its engine knows.
pub(crate) fn bytes_arrive() -> bool {
    ARRIVES.load(Ordering::SeqCst)
}

/// Returns whether the tests run on the mock.
pub(crate) fn is_mock() -> bool {
    name() == NAME
}

/// Returns the name of the backend: that in `DEVICE_IPC_BACKEND`, by default the mock.
fn name() -> String {
    env::var(BACKEND_VARIABLE).ok().filter(|name| !name.is_empty()).unwrap_or_else(|| NAME.to_owned())
}

/// Returns the library on the backend of the tests.
pub(crate) fn on_backend(builder: IpcBuilder) -> Result<Ipc, String> {
    Ok(match &*name() {
        NAME => builder.with_backend(MockBackend::from_spec(MACHINE).expect("a valid machine")),
        "cuda" => builder.with_backend(CudaBackend::load().map_err(|error| error.to_string())?),
        other => return Err(format!("{BACKEND_VARIABLE}={other}: the tests run on mock and cuda")),
    })
}

/// Returns the settings for other hosts, with the engine of the test.
pub(crate) fn remote(load: Load) -> Result<Remote, String> {
    Ok(Remote::new(Arc::new(NotingEngine(load()?))))
}

/// A transfer that is not over while it is held.
#[derive(Debug)]
struct HeldTransfer {
    transfer: Box<dyn Transfer>,
    is_over: AtomicBool,
}

impl Transfer for HeldTransfer {
    fn is_finished(&self) -> Result<bool> {
        if !self.is_over.load(Ordering::SeqCst) && self.transfer.is_finished()? {
            self.is_over.store(true, Ordering::SeqCst);
        }
        if self.is_over.load(Ordering::SeqCst) || self.transfer.arrived_bytes() > 0 {
            ARRIVES.store(true, Ordering::SeqCst);
        }
        Ok(self.is_over.load(Ordering::SeqCst) && !HELD.load(Ordering::SeqCst))
    }

    fn cancel_rest(&self) {
        self.transfer.cancel_rest();
    }

    fn arrived_bytes(&self) -> u64 {
        self.transfer.arrived_bytes()
    }
}

/// An engine whose transfers are counted and can be held. It takes memory of a simulated device for host memory.
#[derive(Debug)]
struct NotingEngine(Arc<dyn TransferEngine>);

fn seen(space: MemorySpace) -> MemorySpace {
    match space {
        MemorySpace::Device { .. } if env::var_os(SIMULATOR_VARIABLE).is_some() => MemorySpace::Host,
        other => other,
    }
}

impl TransferEngine for NotingEngine {
    fn info(&self) -> &BackendInfo {
        self.0.info()
    }

    fn supports(&self, space: MemorySpace) -> bool {
        self.0.supports(seen(space))
    }

    unsafe fn register(&self, memory: TransferMemory) -> Result<Box<dyn RegisteredMemory>> {
        if FAILS.swap(false, Ordering::SeqCst) {
            let detail = "the registration fails".into();
            return Err(Error::OutOfMemory { device: DeviceOrdinal::new(0), bytes: memory.len, detail });
        }
        // SAFETY: as the caller promised.
        unsafe { self.0.register(TransferMemory { space: seen(memory.space), ..memory }) }
    }

    unsafe fn pull(&self, request: &PullRequest<'_>) -> Result<Box<dyn Transfer>> {
        let destinations: Vec<_> = request
            .destinations
            .iter()
            .map(|memory| TransferMemory { space: seen(memory.space), ..*memory })
            .collect();
        // SAFETY: as the caller promised.
        let transfer = unsafe { self.0.pull(&PullRequest { destinations: &destinations, ..*request })? };
        ARRIVES.store(false, Ordering::SeqCst);
        BEGUN.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(HeldTransfer { transfer, is_over: AtomicBool::new(false) }))
    }
}
