//! The settings of copies between hosts that all parts of a process share, for programs that users run.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use device_ipc_core::backend::BackendInfo;
use device_ipc_core::backend::engine::{
    MemorySpace, PullRequest, RegisteredMemory, Transfer, TransferEngine, TransferMemory,
};
use device_ipc_core::backend::environment;
use device_ipc_core::{Error, Remote, Result};

use crate::engine::NixlEngine;
use crate::library::NAME;

/// The environment variable with the address for [`remote`]: `IP` or `IP:PORT` of a network interface of this host.
pub const REMOTE_VARIABLE: &str = "DEVICE_IPC_REMOTE";

/// The settings of this process. A process has one engine: each one listens on ports of its own.
static REMOTE: Mutex<Option<Remote>> = Mutex::new(None);

/// Returns the settings of this process, for [`IpcBuilder::remote`](device_ipc_core::IpcBuilder::remote).
///
/// If [`REMOTE_VARIABLE`] is set, or after [`listen`], NIXL is loaded, and other hosts can copy the exports. Otherwise NIXL is
/// loaded by the first copy from another host. On [trusted networks](crate#security) only.
///
/// ```no_run
/// # use device_ipc_core::{Ipc, Result};
/// # fn ipc() -> Result<Ipc> {
/// Ipc::builder().remote(device_ipc_nixl::remote()?).auto()
/// # }
/// ```
///
/// # Errors
///
/// As for [`listen`], if the variable is set.
pub fn remote() -> Result<Remote> {
    let mut remote = REMOTE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(remote) = &*remote {
        return Ok(remote.clone());
    }
    let created = match environment::variable(REMOTE_VARIABLE).filter(|value| !value.is_empty()) {
        Some(address) => listening(&address.to_string_lossy()).map_err(of_variable)?,
        None => Remote::new(Arc::<LoadedByUse>::default()),
    };
    Ok(remote.insert(created).clone())
}

/// Loads NIXL and listens at an address of a network interface, `IP` or `IP:PORT`: other hosts can copy what the process
/// exports with the settings that [`remote`] returns from now on. [`REMOTE_VARIABLE`] has no effect then. On
/// [trusted networks](crate#security) only.
///
/// # Errors
///
/// [`Error::Unsupported`] if NIXL cannot be loaded, with the reason and the remedy; as for [`Remote::listen`].
pub fn listen(address: &str) -> Result<Remote> {
    let mut remote = REMOTE.lock().unwrap_or_else(PoisonError::into_inner);
    Ok(remote.insert(listening(address)?).clone())
}

/// Adds the name of the variable to an error of its address.
fn of_variable(error: Error) -> Error {
    match error {
        Error::Io { what, cause } => Error::Io { what: format!("{what} ({REMOTE_VARIABLE})"), cause },
        other => other,
    }
}

fn listening(address: &str) -> Result<Remote> {
    let engine = LoadedByUse::default();
    engine.load("listen for importers of other hosts")?;
    Remote::new(Arc::new(engine)).listen(address)
}

/// The engine of this process.
static ENGINE: OnceLock<NixlEngine> = OnceLock::new();

/// [`NixlEngine`], loaded when it is used.
#[derive(Debug)]
struct LoadedByUse {
    info: BackendInfo,
}

impl Default for LoadedByUse {
    fn default() -> Self {
        Self { info: BackendInfo::new(NAME, "unknown version", None) }
    }
}

impl LoadedByUse {
    fn load(&self, purpose: &str) -> Result<&'static NixlEngine> {
        static LOADING: Mutex<()> = Mutex::new(());
        let _loading = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(engine) = ENGINE.get() {
            return Ok(engine);
        }
        let engine = NixlEngine::load().map_err(|reason| Error::Unsupported {
            backend: NAME,
            what: purpose.to_owned(),
            why: reason.to_string(),
        })?;
        Ok(ENGINE.get_or_init(|| engine))
    }
}

impl TransferEngine for LoadedByUse {
    fn info(&self) -> &BackendInfo {
        &self.info
    }

    fn supports(&self, space: MemorySpace) -> bool {
        // A reason that NIXL cannot be loaded is the error of the transfer.
        self.load("").map_or(true, |engine| engine.supports(space))
    }

    unsafe fn register(&self, memory: TransferMemory) -> Result<Box<dyn RegisteredMemory>> {
        let engine = self.load("register memory")?;
        // SAFETY: as the caller promised.
        unsafe { engine.register(memory) }
    }

    unsafe fn pull(&self, request: &PullRequest<'_>) -> Result<Box<dyn Transfer>> {
        let engine = self.load("copy memory of another host")?;
        // SAFETY: as the caller promised.
        unsafe { engine.pull(request) }
    }
}
