//! Descriptors for conditions on shared words, which a device changes and no system call reports.
//!
//! The poller evaluates the condition repeatedly, from the call that found it false until it is true. Nothing is created and
//! nothing is polled for an object whose descriptor was never requested.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::RuntimeRef;
use crate::model::error::{Error, Result};
use crate::os::{Backoff, Readiness, clock};

/// The intervals between two evaluations.
const POLL: Backoff =
    Backoff::eighth(Duration::from_micros(50), Duration::from_millis(1)).idle(Duration::from_millis(10));

/// A descriptor that is readable until a call has found a condition false, and again once the condition is true.
#[derive(Debug, Default)]
pub(crate) struct PolledReadiness(OnceLock<Arc<PolledDescriptor>>);

#[derive(Debug)]
struct PolledDescriptor {
    readiness: Readiness,
    /// Whether the poller evaluates a condition.
    is_watched: AtomicBool,
}

/// A condition that the poller evaluates until it is true, or until the descriptor's object has been dropped.
pub(crate) struct Watch {
    descriptor: Arc<PolledDescriptor>,
    condition: Box<dyn Fn() -> bool + Send>,
    since: Instant,
}

impl PolledReadiness {
    /// Returns the descriptor, which the first call creates, readable.
    ///
    /// # Errors
    ///
    /// [`Error::Io`](crate::Error::Io) if the process cannot create a descriptor.
    pub(crate) fn fd(&self) -> Result<BorrowedFd<'_>> {
        let created = match self.0.get() {
            Some(known) => known,
            None => {
                let readiness = Readiness::new().map_err(|error| Error::io("creating an eventfd", error))?;
                readiness.set();
                let is_watched = AtomicBool::new(false);
                self.0.get_or_init(|| Arc::new(PolledDescriptor { readiness, is_watched }))
            }
        };
        Ok(created.readiness.as_fd())
    }

    /// Makes the descriptor unreadable until the condition is true. Does nothing if no descriptor was requested.
    ///
    /// A condition that is being watched stays: it becomes true no later than the new one does, and the object's next call
    /// finds out which. The poller runs the condition, so it may not block or call a driver.
    pub(crate) fn watch<C: Fn() -> bool + Send + 'static>(
        &self,
        runtime: RuntimeRef,
        condition: impl FnOnce() -> C,
    ) {
        let (Some(descriptor), Some(runtime)) = (self.0.get(), runtime.here()) else { return };
        // In this order: a watch that ends meanwhile makes the descriptor readable after it has ended.
        descriptor.readiness.clear();
        if !descriptor.is_watched.swap(true, Ordering::AcqRel) {
            let descriptor = Arc::clone(descriptor);
            let (condition, since) = (Box::new(condition()), clock::now());
            runtime.poller.watch_condition(Watch { descriptor, condition, since });
        }
    }
}

impl Watch {
    /// Evaluates the condition. Returns true when the watch has ended: then the descriptor is readable, or unused.
    pub(crate) fn is_over(&self) -> bool {
        if Arc::strong_count(&self.descriptor) == 1 {
            return true;
        }
        let is_true = (self.condition)();
        if is_true {
            self.descriptor.is_watched.store(false, Ordering::Release);
            self.descriptor.readiness.set();
        }
        is_true
    }

    /// Returns the time until the next evaluation.
    pub(crate) fn interval(&self, now: Instant) -> Duration {
        POLL.interval(now.saturating_duration_since(self.since))
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("since", &self.since).finish_non_exhaustive()
    }
}
