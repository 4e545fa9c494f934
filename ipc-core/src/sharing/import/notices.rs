//! The notifications of an exporter about one of its exports.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::sharing::Runtime;
use crate::wire::Token;

/// A lease, as far as notifications about its export concern it.
pub(crate) trait NotifiedLease: Send + Sync {
    /// Returns the token that it was opened with, if it is open.
    fn open_token(&self) -> Option<Token>;

    /// Returns whether it is open and the exporter states in its word that the export has been dropped.
    fn is_dropped(&self) -> bool;

    /// Closes it if it is idle.
    fn close_if_idle(self: Arc<Self>, runtime: &Runtime);
}

/// The notifications about one export. Shared by the link, which receives them, and the leases, which they concern.
#[derive(Debug, Default)]
pub(crate) struct ExportNotices {
    dropped: AtomicBool,
    recalled: AtomicBool,
    /// One lease for each device and access, so usually one.
    leases: Mutex<Vec<Weak<dyn NotifiedLease>>>,
    callbacks: Mutex<Callbacks>,
}

/// A callback for the drop of an export.
pub(super) type DroppedCallback = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Callbacks {
    registered: Vec<(u64, DroppedCallback)>,
    last: u64,
}

impl std::fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Callbacks({})", self.registered.len())
    }
}

impl ExportNotices {
    /// Returns whether the exporter has dropped the export, so that there are no new leases.
    pub(crate) fn is_dropped(&self) -> bool {
        self.dropped.load(Ordering::Acquire)
    }

    /// Returns whether an idle lease may be kept.
    pub(crate) fn may_keep(&self) -> bool {
        !self.recalled.load(Ordering::Acquire) && !self.is_dropped()
    }

    /// Records that the exporter waits for its memory: idle leases are returned. Returns whether this is new.
    pub(crate) fn recall(&self) -> bool {
        !self.recalled.swap(true, Ordering::AcqRel)
    }

    /// Records that the exporter has dropped the export. Returns whether this is new.
    pub(super) fn drop_export(&self) -> bool {
        !self.dropped.swap(true, Ordering::AcqRel)
    }

    /// Registers a callback for the drop of the export. Returns its number, or the callback if the export has been dropped.
    pub(super) fn on_dropped(&self, callback: DroppedCallback) -> Result<u64, DroppedCallback> {
        let mut callbacks = self.callbacks.lock().unwrap_or_else(PoisonError::into_inner);
        // The notification takes the callbacks under the same lock.
        if self.is_dropped() {
            return Err(callback);
        }
        callbacks.last += 1;
        let id = callbacks.last;
        callbacks.registered.push((id, callback));
        Ok(id)
    }

    /// Takes the callbacks, after the export was dropped.
    pub(super) fn take_callbacks(&self) -> Vec<(u64, DroppedCallback)> {
        std::mem::take(&mut self.callbacks.lock().unwrap_or_else(PoisonError::into_inner).registered)
    }

    /// Removes a callback.
    pub(super) fn forget_callback(&self, id: u64) {
        let mut callbacks = self.callbacks.lock().unwrap_or_else(PoisonError::into_inner);
        let forgotten: Vec<_> = callbacks.registered.extract_if(.., |(known, _)| *known == id).collect();
        // Dropped without the lock: captured values may call the library.
        drop(callbacks);
        drop(forgotten);
    }

    /// Adds a lease on the export.
    pub(super) fn add(&self, lease: &Weak<dyn NotifiedLease>) {
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        if !leases.iter().any(|known| known.ptr_eq(lease)) {
            leases.reserve_exact(1);
            leases.push(lease.clone());
        }
    }

    /// Removes a lease. Returns whether it was the last.
    pub(super) fn remove(&self, lease: &Weak<dyn NotifiedLease>) -> bool {
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        leases.retain(|known| !known.ptr_eq(lease));
        leases.is_empty()
    }

    /// Returns whether the condition holds for one of the leases.
    pub(crate) fn any_lease(&self, is: impl Fn(Arc<dyn NotifiedLease>) -> bool) -> bool {
        let leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        leases.iter().filter_map(Weak::upgrade).any(is)
    }

    pub(super) fn leases(&self) -> Vec<Weak<dyn NotifiedLease>> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
