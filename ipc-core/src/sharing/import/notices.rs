//! The notifications of an exporter about one of its exports.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use super::table::KnownLease;

/// The notifications about one export. Shared by the link, which receives them, and the leases, which they concern.
#[derive(Debug, Default)]
pub(crate) struct ExportNotices {
    dropped: AtomicBool,
    recalled: AtomicBool,
    /// One for each device and access, so mostly one.
    leases: Mutex<Vec<KnownLease>>,
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

    /// Notes that the exporter waits for its memory: idle leases go back. Returns whether this is new.
    pub(crate) fn recall(&self) -> bool {
        !self.recalled.swap(true, Ordering::AcqRel)
    }

    /// Notes that the exporter has dropped the export. Returns whether this is new.
    pub(super) fn drop_export(&self) -> bool {
        !self.dropped.swap(true, Ordering::AcqRel)
    }

    /// Adds a lease on the export.
    pub(super) fn add(&self, lease: &KnownLease) {
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        if !leases.contains(lease) {
            leases.reserve_exact(1);
            leases.push(lease.clone());
        }
    }

    /// Removes a lease. Returns whether it was the last.
    pub(super) fn remove(&self, lease: &KnownLease) -> bool {
        let mut leases = self.leases.lock().unwrap_or_else(PoisonError::into_inner);
        leases.retain(|known| known != lease);
        leases.is_empty()
    }

    /// Returns whether the condition holds for one of the leases.
    pub(crate) fn any_lease(&self, is: impl Fn(&KnownLease) -> bool) -> bool {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner).iter().any(is)
    }

    pub(super) fn leases(&self) -> Vec<KnownLease> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
