//! Driver mappings, each opened once.

use std::sync::{Arc, Mutex, PoisonError};

use super::keys::RangeKey;
use crate::backend::{DeviceIpc, Imported, Opened};
use crate::model::address::DeviceRange;
use crate::sharing::import::cache::{CacheEntry, Cached};
use crate::sharing::import::place::Place;
use crate::sharing::{Runtime, RuntimeRef};

/// A reference to a driver mapping.
pub(super) type RangeRef = Arc<CacheEntry<RangeKey, OpenRange>>;

/// A driver mapping.
#[derive(Debug)]
pub(super) struct OpenRange {
    pub(super) runtime: RuntimeRef,
    pub(super) backend: Arc<dyn DeviceIpc>,
    pub(super) content: Mutex<Content>,
    pub(super) range: DeviceRange,
    /// The reserved addresses, if the mapping has an import.
    pub(super) place: Option<Arc<Place>>,
}

/// The vendor's object that a driver mapping closes.
#[derive(Debug)]
pub(super) enum Content {
    /// None: it has been closed, or the memory is of this process.
    None,
    /// A range at addresses of the driver's choice.
    Opened(Opened),
    /// An import for reserved addresses.
    Imported(ReservedImport),
}

/// An import of a region, which is mapped in its reserved range or not.
#[derive(Debug)]
pub(super) struct ReservedImport {
    pub(super) imported: Imported,
    pub(super) is_mapped: bool,
}

impl Cached for OpenRange {
    /// The leases are kept idle; a driver mapping without a lease is not.
    fn may_be_kept(&self) -> bool {
        false
    }

    fn bytes(&self) -> u64 {
        self.range.len
    }
}

impl OpenRange {
    pub(super) fn new(
        runtime: &'static Runtime,
        backend: &Arc<dyn DeviceIpc>,
        range: DeviceRange,
        content: Content,
        place: Option<Arc<Place>>,
    ) -> Self {
        let (runtime, backend) = (runtime.for_guard(), Arc::clone(backend));
        Self { runtime, backend, content: Mutex::new(content), range, place }
    }

    /// Closes the vendor's object, unless that has been done.
    pub(super) fn close(&self) {
        let mut content = self.content.lock().unwrap_or_else(PoisonError::into_inner);
        let content = std::mem::replace(&mut *content, Content::None);
        let runtime = self.runtime.here().filter(|_| !matches!(content, Content::None));
        let closed = match content {
            Content::None => Ok(()),
            Content::Opened(opened) => {
                if let Some(runtime) = runtime {
                    runtime.metrics.mapped_bytes.subtract(self.range.len);
                    // Before the driver may assign the addresses again.
                    runtime.imports.addresses.remove(self.range);
                }
                self.backend.close(opened)
            }
            Content::Imported(import) => self.close_import(import),
        };
        if let Err(error) = closed {
            tracing::warn!(target: crate::os::log::IMPORT, %error, "a mapping could not be closed");
        }
        // Whoever waits for this count relies on the close: a driver may import a handle once at a time.
        if let Some(runtime) = runtime {
            runtime.metrics.driver_closes_total.add(1);
        }
    }
}
