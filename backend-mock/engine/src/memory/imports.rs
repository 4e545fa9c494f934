//! Memory that this process has opened from other processes.

use std::collections::HashMap;

use crate::model::{Access, Address, EngineError};
use crate::shared::ExportEpoch;
use crate::system::ProcessId;

/// The properties in which two opens agree that share one mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ImportKey {
    pub(crate) owner: ProcessId,
    pub(crate) generation: u64,
    /// Number of the memory file's descriptor in the exporter. Copies of this crate in one process have equal generations.
    pub(crate) slot: u32,
    pub(crate) device: usize,
    pub(crate) access: Access,
    /// The epoch of the export, for memory that its exporter can revoke.
    pub(crate) epoch: Option<ExportEpoch>,
}

/// One opened range.
#[derive(Debug)]
pub(crate) struct Import {
    /// Opens that have not been closed yet.
    pub(crate) opens: u32,
    /// First addresses of all its mappings.
    pub(crate) bases: Vec<u64>,
    pub(crate) device: usize,
    /// `None` for a range that no second open shares.
    pub(crate) key: Option<ImportKey>,
}

/// The opened ranges of a process, by first address.
#[derive(Debug, Default)]
pub(crate) struct ImportTable {
    pub(crate) open: HashMap<u64, Import>,
    pub(crate) by_key: HashMap<ImportKey, u64>,
}

impl ImportTable {
    /// Returns the range that begins at `address`.
    ///
    /// # Errors
    /// `NotBase` for the first address of a later part of a range, else `UnknownAddress`.
    pub(crate) fn get(&self, address: Address) -> Result<&Import, EngineError> {
        let import = self.open.get(&address.get());
        import.ok_or_else(|| {
            let group = self.open.iter().find(|(_, import)| import.bases.contains(&address.get()));
            match group {
                Some((&base, _)) => EngineError::NotBase { address, base: Address::new(base) },
                None => EngineError::UnknownAddress { address },
            }
        })
    }
}
