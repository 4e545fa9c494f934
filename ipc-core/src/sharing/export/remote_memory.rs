//! The memory of an export as importers of other hosts pull it: the registration of its regions with a transfer engine.

#![allow(unsafe_code, reason = "registers memory that the export keeps allocated")]

use std::sync::{Arc, Mutex, PoisonError};

use super::Shared;
use crate::backend::engine::{RegisteredMemory, TransferEngine, TransferMemory};
use crate::backend::with_device_context;
use crate::model::error::Result;
use crate::transport::{ServerId, TcpServer};

/// The registration of an export's regions. It begins with the first open from another host, and ends with this value, which is
/// dropped before the owner of the memory.
#[derive(Debug)]
pub(crate) struct RemoteMemory {
    /// Dropped first.
    registered: Mutex<Option<Regions>>,
    engine: Arc<dyn TransferEngine>,
    /// Listens as long as there is an export.
    server: Arc<TcpServer>,
}

/// The registered regions, in the order of the export's.
type Regions = Arc<[Box<dyn RegisteredMemory>]>;

impl RemoteMemory {
    pub(crate) fn new(engine: Arc<dyn TransferEngine>, server: Arc<TcpServer>) -> Self {
        Self { registered: Mutex::default(), engine, server }
    }

    /// Returns the server at which importers open the export.
    pub(crate) fn server(&self) -> ServerId {
        self.server.id()
    }
}

impl Shared {
    /// Registers the regions, unless they are registered. Returns the metadata of each.
    pub(crate) fn register(&self) -> Result<Vec<Vec<u8>>> {
        let (Some(remote), Some((backend, device))) = (&self.remote, self.place()) else {
            return Ok(Vec::new());
        };
        let mut registered = remote.registered.lock().unwrap_or_else(PoisonError::into_inner);
        let regions = match &*registered {
            Some(regions) => regions,
            None => {
                let register = || self.register_with(&*remote.engine, backend.transfer_space(device));
                registered.insert(with_device_context(&**backend, device, register)?)
            }
        };
        Ok(regions.iter().map(|region| region.metadata().to_vec()).collect())
    }

    fn register_with(
        &self,
        engine: &dyn TransferEngine,
        space: crate::backend::engine::MemorySpace,
    ) -> Result<Regions> {
        let regions = self.regions.iter().map(|range| {
            let memory = TransferMemory { space, address: range.ptr.get(), len: range.len };
            // SAFETY: the owner keeps the region allocated and is dropped after the registration. A lease, which keeps the
            // owner, ends only after the importer has reported the end of its transfers, or its time limit has passed.
            unsafe { engine.register(memory) }
        });
        regions.collect()
    }
}
