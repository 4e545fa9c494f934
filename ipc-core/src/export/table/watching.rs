//! Watching an export: who waits for its importers, or wants to be told of them.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use super::{Entry, ExportTable};
use crate::descriptor::ExportId;
use crate::lease::Holders;
use crate::runtime::Runtime;

/// What is called when the holders of an export have changed.
pub(super) struct Watcher(Arc<dyn Fn() + Send + Sync>);

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watcher")
    }
}

impl ExportTable {
    /// Waits until the export has been opened so many times; else who holds it.
    pub(crate) fn wait_opened(&self, export: ExportId, count: u64, until: Instant) -> Result<(), Holders> {
        self.wait(export, until, |entry| entry.is_none_or(|entry| entry.opened >= count))
    }

    /// From now on `callback` hears of every change of who holds the export.
    pub(crate) fn watch(&self, export: ExportId, callback: impl Fn() + Send + Sync + 'static) {
        let mut state = self.lock();
        let Some(entry) = state.exports.get_mut(&export) else { return };
        let before = entry.watcher.replace(Watcher(Arc::new(callback)));
        // What the one before held may ask the table when it is dropped.
        drop(state);
        drop(before);
    }
}

impl Entry {
    /// The worker calls: the watcher is the user's code.
    pub(super) fn tell_change(&self) {
        if let (Some(Watcher(callback)), Some(runtime)) = (&self.watcher, Runtime::existing()) {
            let callback = Arc::clone(callback);
            runtime.worker.submit(move || callback());
        }
    }
}
