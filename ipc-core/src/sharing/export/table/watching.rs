//! Waits for importers of an export, and callbacks for changes of its holders.

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use super::leases::Lease;
use super::{Entry, ExportTable};
use crate::backend::DeviceBound;
use crate::model::lease::Holders;
use crate::os::{Readiness, clock};
use crate::sharing::export::Shared;
use crate::transport::Worker;
use crate::wire::descriptor::ExportId;

/// A callback for changes of an export's holders.
pub(super) struct Watcher {
    callback: Arc<dyn Fn() + Send + Sync>,
    /// Runs the callback.
    worker: Worker,
    /// Whether a call is pending. An importer that opens and releases repeatedly causes one call for many changes.
    due: Arc<AtomicBool>,
}

thread_local! {
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// A call of a callback, on the worker. Leases of this process that begin meanwhile are no changes for callbacks: a callback that opens
/// its own export would cause its next call.
struct InCallback;

impl InCallback {
    fn begin() -> Self {
        IN_CALLBACK.set(true);
        Self
    }
}

impl Drop for InCallback {
    fn drop(&mut self) {
        IN_CALLBACK.set(false);
    }
}

/// Returns whether this thread is running a callback for changes.
pub(super) fn in_callback() -> bool {
    IN_CALLBACK.get()
}

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watcher")
    }
}

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
        let worker = runtime.worker.clone();
        let watcher = Watcher { callback: Arc::new(callback), worker, due: Arc::default() };
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
            let known = &mut entry.observers().readiness;
            known.retain(|known| known.strong_count() > 0);
            known.push(Arc::downgrade(readiness));
        }
        readiness.set();
    }

    /// Asks importers to return idle leases. Returns whether the export has been opened and has no lease any longer.
    pub(crate) fn try_wait_released(&self, export: ExportId) -> bool {
        self.wait_released(export, clock::now()).is_ok()
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
        let Some(Watcher { callback, worker, due }) = self.watcher() else { return };
        if due.swap(true, Ordering::AcqRel) {
            return;
        }
        let (callback, due) = (Arc::clone(callback), Arc::clone(due));
        worker.submit(move || {
            // Later changes cause another call.
            due.store(false, Ordering::Release);
            let _in_callback = InCallback::begin();
            callback();
        });
    }
}
