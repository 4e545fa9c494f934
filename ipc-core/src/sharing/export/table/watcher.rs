//! A callback for changes, and the calls of it.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::transport::Worker;

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

impl Watcher {
    pub(super) fn new(callback: impl Fn() + Send + Sync + 'static, worker: Worker) -> Self {
        Self { callback: Arc::new(callback), worker, due: Arc::default() }
    }

    /// Calls the callback on the worker: it is the user's code.
    pub(super) fn notify(&self) {
        let Self { callback, worker, due } = self;
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
