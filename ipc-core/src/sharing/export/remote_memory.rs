//! The memory of an export as importers of other hosts pull it: the registration of its regions with a transfer engine.

#![allow(unsafe_code, reason = "registers memory that the export keeps allocated")]

use std::sync::{Arc, Mutex, PoisonError};

use crate::backend::engine::{MemorySpace, RegisteredMemory, TransferEngine, TransferMemory};
use crate::backend::{DeviceIpc, with_device_context};
use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::model::error::Result;
use crate::transport::{ServerId, TcpServer};

/// The registration of an export's regions. It begins with the first open from another host, and ends with this value, which is
/// dropped before the owner of the memory.
#[derive(Debug)]
pub(crate) struct RemoteMemory {
    /// Dropped first.
    registered: Mutex<Option<RegisteredRegions>>,
    engine: Arc<dyn TransferEngine>,
    /// Listens as long as there is an export.
    server: Arc<TcpServer>,
}

/// The registered regions, in the order of the export's.
type RegisteredRegions = Arc<[Box<dyn RegisteredMemory>]>;

impl RemoteMemory {
    pub(crate) fn new(engine: Arc<dyn TransferEngine>, server: Arc<TcpServer>) -> Self {
        Self { registered: Mutex::default(), engine, server }
    }

    /// Returns the server at which importers open the export.
    pub(crate) fn server(&self) -> ServerId {
        self.server.id()
    }

    /// Registers the regions, unless they are registered. Returns the metadata of each.
    pub(super) fn register(
        &self,
        backend: &dyn DeviceIpc,
        device: DeviceOrdinal,
        ranges: &[DeviceRange],
    ) -> Result<Vec<Vec<u8>>> {
        let mut registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        let regions = match &*registered {
            Some(regions) => regions,
            None => {
                let register = || self.register_with(backend.transfer_space(device), ranges);
                registered.insert(with_device_context(backend, device, register)?)
            }
        };
        Ok(regions.iter().map(|region| region.metadata().to_vec()).collect())
    }

    fn register_with(&self, space: MemorySpace, ranges: &[DeviceRange]) -> Result<RegisteredRegions> {
        let regions = ranges.iter().map(|range| {
            let memory = TransferMemory { space, address: range.ptr.get(), len: range.len };
            // SAFETY: the owner keeps the region allocated and is dropped after the registration. A lease, which keeps the
            // owner, ends only after the importer has reported the end of its transfers, or its time limit has passed.
            unsafe { self.engine.register(memory) }
        });
        regions.collect()
    }
}
