//! The targets of the library's log events, and a limit on how often events are logged that other processes cause.
//!
//! A target is public: users filter by it. `docs/guide/operations.md` lists all targets.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::clock;

/// Allocation and the selection of backends.
pub(crate) const BACKEND: &str = "device_ipc::backend";
/// Environment variables.
pub(crate) const ENVIRONMENT: &str = "device_ipc::environment";
/// Exports, their leases, and the importers that hold them.
pub(crate) const EXPORT: &str = "device_ipc::export";
/// Mappings, the import cache, and the exporters of opened memory.
pub(crate) const IMPORT: &str = "device_ipc::import";
/// Sockets, connections, and the threads of the library.
pub(crate) const TRANSPORT: &str = "device_ipc::transport";
/// Ready events and timelines.
pub(crate) const TIMELINE: &str = "device_ipc::timeline";
/// Copies through host memory.
pub(crate) const STAGING: &str = "device_ipc::staging";
/// Rings.
pub(crate) const RING: &str = "device_ipc::ring";
/// Channels.
pub(crate) const CHANNEL: &str = "device_ipc::channel";

/// Minimum time between two events of one kind that another process can cause at will.
const PERIOD: Duration = Duration::from_secs(1);

/// A rate limit for log events of one kind: one per second, with the number of suppressed ones.
#[derive(Debug, Default)]
pub(crate) struct Throttle {
    last: Mutex<Option<Instant>>,
    since: AtomicU64,
}

impl Throttle {
    pub(crate) const fn new() -> Self {
        Self { last: Mutex::new(None), since: AtomicU64::new(0) }
    }

    /// Counts an event. Returns the number of events since the last logged one, including this one, if it is to be logged.
    pub(crate) fn count(&self) -> Option<u64> {
        self.count_at(clock::now())
    }

    fn count_at(&self, now: Instant) -> Option<u64> {
        self.since.fetch_add(1, Ordering::Relaxed);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let due = last.is_none_or(|last| now.saturating_duration_since(last) >= PERIOD);
        due.then(|| {
            *last = Some(now);
            self.since.swap(0, Ordering::Relaxed)
        })
    }
}

#[cfg(test)]
mod tests;
