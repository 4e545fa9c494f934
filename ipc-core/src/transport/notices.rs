//! What an exporter has told about one of its exports, unasked.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::sharing::import::KnownLease;

/// The notices about one export. Shared by the link, which hears them, and the leases, which they concern.
#[derive(Debug, Default)]
pub(crate) struct ExportNotices {
    dropped: AtomicBool,
    recalled: AtomicBool,
    /// One for each device and access, so mostly one.
    leases: Mutex<Vec<KnownLease>>,
}

impl ExportNotices {
    /// The exporter has dropped the export: no newcomers.
    pub(crate) fn is_dropped(&self) -> bool {
        self.dropped.load(Ordering::Acquire)
    }

    /// May a lease be kept that nobody uses?
    pub(crate) fn may_keep(&self) -> bool {
        !self.recalled.load(Ordering::Acquire) && !self.is_dropped()
    }

    /// The exporter waits for its memory: leases that nobody uses go back. Returns whether this is new.
    pub(crate) fn recall(&self) -> bool {
        !self.recalled.swap(true, Ordering::AcqRel)
    }

    pub(super) fn drop_export(&self) -> bool {
        !self.dropped.swap(true, Ordering::AcqRel)
    }

    pub(super) fn add(&self, lease: &KnownLease) {
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        if !leases.contains(lease) {
            leases.reserve_exact(1);
            leases.push(lease.clone());
        }
    }

    /// Was this the last lease?
    pub(super) fn remove(&self, lease: &KnownLease) -> bool {
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        leases.retain(|known| known != lease);
        leases.is_empty()
    }

    /// Returns whether one of the leases is like this.
    pub(crate) fn any_lease(&self, is: impl Fn(&KnownLease) -> bool) -> bool {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner).iter().any(is)
    }

    pub(super) fn leases(&self) -> Vec<KnownLease> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
