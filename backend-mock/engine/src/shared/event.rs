//! Events of this process, private or shared.

use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::event_state::{EventState, Record};
use super::page::Page;

/// The memory of an event's state.
#[derive(Debug)]
pub(crate) enum EventStorage {
    /// Private to this process.
    Local(Box<EventState>),
    /// Shared with other processes.
    Shared(Page),
    /// Shared with processes of other pid namespaces.
    Foreign(Page),
}

impl EventStorage {
    /// Returns whether this process can detect the death of a recorder.
    pub(crate) fn recorder_visible(&self) -> bool {
        !matches!(self, Self::Foreign(_))
    }
}

impl Deref for EventStorage {
    type Target = EventState;

    fn deref(&self) -> &EventState {
        match self {
            Self::Local(state) => state,
            Self::Shared(page) | Self::Foreign(page) => page.event(),
        }
    }
}

/// An event that this process created or opened.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) cell: Arc<EventStorage>,
    pub(crate) device: usize,
    /// The file and the number of an event that was created for sharing.
    pub(crate) shared: Option<(OwnedFd, u64)>,
}

/// A record that its stream has not reached yet.
///
/// When its stream fails or is destroyed, it is dropped, which marks the record as failed and wakes the waiters.
pub(crate) struct PendingRecord {
    pub(crate) cell: Arc<EventStorage>,
    pub(crate) record: Record,
    pub(crate) succeeded: bool,
}

impl PendingRecord {
    /// Marks the record as complete. Takes `self`, so that the closure of the work owns the record and drops it with
    /// the work.
    pub(crate) fn succeed(mut self) {
        self.succeeded = true;
    }
}

impl Drop for PendingRecord {
    fn drop(&mut self) {
        self.cell.complete(self.record, self.succeeded);
    }
}
