//! Waits for importers of an export, and callbacks for changes of its holders.

use std::sync::{Arc, Weak};
use std::time::Instant;

use super::leases::Lease;
use super::watcher::Watcher;
use super::{Entry, ExportTable, Observers};
use crate::backend::DeviceBound;
use crate::model::lease::Holders;
use crate::os::{Readiness, clock};
use crate::sharing::export::Shared;
use crate::wire::descriptor::ExportId;

impl ExportTable {
    /// Waits until the export has been opened `count` times. The error lists the holders.
    pub(crate) fn wait_opened(&self, export: ExportId, count: u64, until: Instant) -> Result<(), Holders> {
        self.wait(export, until, |entry| entry.is_none_or(|entry| entry.opened >= count))
    }

    /// Calls `callback` after every change of the export's holders, from now on.
    pub(crate) fn watch(&self, export: ExportId, callback: impl Fn() + Send + Sync + 'static) {
        let mut state = self.lock();
        let Some(entry) = state.exports.get_mut(&export) else { return };
        let Some((backend, device)) = entry.shared.as_deref().and_then(Shared::place) else { return };
        let callback = DeviceBound::new(backend, device, callback);
        let callback = move || {
            callback.with(|callback| callback());
        };
        let Some(runtime) = self.home.here() else { return };
        let watcher = Watcher::new(callback, runtime.worker.clone());
        let before = entry.observers().watcher.replace(watcher);
        entry.leases.values().for_each(Lease::watch);
        // Values that the previous callback captured may call the table when they are dropped.
        drop(state);
        drop(before);
    }
}

impl ExportTable {
    /// Sets a descriptor at every change of the export's holders, from now on. It is set now for the changes so far.
    pub(crate) fn report_changes(&self, export: ExportId, readiness: &Arc<Readiness>) {
        if let Some(entry) = self.lock().exports.get_mut(&export) {
            entry.observers().add(readiness);
        }
        readiness.set();
    }

    /// Asks importers to return idle leases. Returns whether the export has been opened and has no lease any longer.
    pub(crate) fn try_wait_released(&self, export: ExportId) -> bool {
        self.wait_released(export, clock::now()).is_ok()
    }
}

impl Observers {
    /// Adds a descriptor, and forgets the descriptors that no caller has any longer.
    fn add(&mut self, readiness: &Arc<Readiness>) {
        self.readiness.retain(|known| known.strong_count() > 0);
        self.readiness.push(Arc::downgrade(readiness));
    }
}

impl Entry {
    /// Makes the descriptors for changes readable.
    pub(super) fn set_readiness(&self) {
        let known = self.observers.iter().flat_map(|observers| &observers.readiness);
        known.filter_map(Weak::upgrade).for_each(|readiness| readiness.set());
    }

    /// Reports a change; to the watcher only if no callback has caused it.
    pub(super) fn notify_watchers_unless(&self, by_callback: bool) {
        if by_callback { self.set_readiness() } else { self.notify_watchers() }
    }

    /// Calls the watcher on the worker: it is the user's code.
    pub(super) fn notify_watchers(&self) {
        self.set_readiness();
        if let Some(watcher) = self.watcher() {
            watcher.notify();
        }
    }
}

#[cfg(test)]
mod tests;
