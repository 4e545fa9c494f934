//! Memory that other processes copy over the network.

#![allow(unsafe_code, reason = "registers memory with a transfer engine")]

use std::sync::{Arc, OnceLock};

use anyhow::{Result, anyhow};
use device_ipc::backend::engine::{MemorySpace, RegisteredMemory, TransferEngine, TransferMemory};
use device_ipc::nixl::NixlEngine;
use device_ipc::{Buffer, DeviceOrdinal, Export, Ipc, Remote};

use super::message::SharedRemotely;

/// Returns the engine of this process, loaded once.
pub(crate) fn engine() -> Result<Arc<dyn TransferEngine>> {
    static ENGINE: OnceLock<Result<Arc<NixlEngine>, String>> = OnceLock::new();
    let loaded = ENGINE.get_or_init(|| NixlEngine::load().map(Arc::new).map_err(|error| error.to_string()));
    loaded.clone().map(|engine| engine as _).map_err(|error| anyhow!(error))
}

/// Memory of the bare calls, of the same kind as the library's.
pub(crate) enum BareMemory {
    Host(Vec<u8>),
    Device(Buffer, MemorySpace),
}

impl BareMemory {
    pub(crate) fn new(ipc: &Ipc, device: u32, bytes: u64) -> Result<Self> {
        Ok(match ipc.backend().transfer_space(DeviceOrdinal::new(device)) {
            MemorySpace::Host => Self::Host(vec![1; usize::try_from(bytes)?]),
            space => Self::Device(ipc.allocate(device, bytes)?, space),
        })
    }

    pub(crate) fn range(&self) -> TransferMemory {
        match self {
            Self::Host(memory) => TransferMemory {
                space: MemorySpace::Host,
                address: memory.as_ptr() as u64,
                len: memory.len() as u64,
            },
            Self::Device(memory, space) => {
                let range = memory.range();
                TransferMemory { space: *space, address: range.ptr.get(), len: range.len }
            }
        }
    }
}

/// The memory of one `ShareRemotely`.
pub(super) struct Served {
    _export: Export,
    /// Dropped before the memory.
    _registered: Box<dyn RegisteredMemory>,
    _memory: BareMemory,
}

impl Served {
    pub(super) fn start(backend: &str, device: u32, bytes: u64) -> Result<(Self, SharedRemotely)> {
        let engine = engine()?;
        let remote = Remote::new(Arc::clone(&engine)).listen("127.0.0.1")?;
        let ipc = Ipc::builder().remote(remote).named(backend)?;
        let export = ipc.share(ipc.allocate(device, bytes)?).start()?;
        let memory = BareMemory::new(&ipc, device, bytes)?;
        // SAFETY: the memory is kept longer than the registration, and the importer finishes its reads before it ends this row.
        let registered = unsafe { engine.register(memory.range()) }?;
        let reply = SharedRemotely {
            descriptor: export.descriptor().clone(),
            metadata: registered.metadata().to_vec(),
        };
        Ok((Self { _export: export, _registered: registered, _memory: memory }, reply))
    }
}
