//! Memory that other processes copy over the network.

#![allow(unsafe_code, reason = "registers memory with a transfer engine")]

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::sync::{Arc, OnceLock};

use anyhow::{Result, anyhow};
use device_ipc::backend::engine::{MemorySpace, RegisteredMemory, TransferEngine, TransferMemory};
use device_ipc::nixl::NixlEngine;
use device_ipc::{Export, Ipc, Remote};

use super::message::Reply;

/// Returns the engine of this process, loaded once.
pub(crate) fn engine() -> Result<Arc<dyn TransferEngine>> {
    static ENGINE: OnceLock<Result<Arc<NixlEngine>, String>> = OnceLock::new();
    let loaded = ENGINE.get_or_init(|| NixlEngine::load().map(Arc::new).map_err(|error| error.to_string()));
    loaded.clone().map(|engine| engine as _).map_err(|error| anyhow!(error))
}

/// The memory of one `ShareRemotely`.
pub(super) struct Served {
    _export: Export,
    /// Dropped before the memory.
    _registered: Box<dyn RegisteredMemory>,
    _memory: Arc<Vec<u8>>,
}

impl Served {
    pub(super) fn start(backend: &str, device: u32, bytes: u64) -> Result<(Self, Reply)> {
        let engine = engine()?;
        let remote = Remote::new(Arc::clone(&engine)).listen("127.0.0.1")?;
        let ipc = Ipc::builder().remote(remote).named(backend)?;
        let export = ipc.share(ipc.allocate(device, bytes)?).start()?;
        let memory = Arc::new(vec![1; usize::try_from(bytes)?]);
        let space = MemorySpace::Host;
        let range = TransferMemory { space, address: memory.as_ptr() as u64, len: bytes };
        // SAFETY: the memory is kept longer than the registration, and the importer finishes its reads before it ends this row.
        let registered = unsafe { engine.register(range) }?;
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let reply = Reply::SharedRemotely {
            descriptor: export.descriptor().to_string(),
            metadata: registered.metadata().to_vec(),
            socket: listener.local_addr()?,
        };
        let served = Arc::clone(&memory);
        // Ends with the connection. A failure is an error of the importer.
        std::thread::spawn(move || -> std::io::Result<()> {
            let mut socket = listener.accept()?.0;
            socket.set_nodelay(true)?;
            while socket.read(&mut [0])? == 1 {
                socket.write_all(&served)?;
            }
            Ok(())
        });
        Ok((Self { _export: export, _registered: registered, _memory: memory }, reply))
    }
}
