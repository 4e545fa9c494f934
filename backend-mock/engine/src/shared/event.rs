//! Events of this process, private or shared.

use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::event_state::{EventState, Record};
use super::page::Page;

/// Where an event's state lies.
#[derive(Debug)]
pub(crate) enum EventStorage {
    Local(Box<EventState>),
    Shared(Page),
    /// Shared with processes whose pids mean nothing here.
    Foreign(Page),
}

impl EventStorage {
    /// Whether the end of a recording process can be seen.
    pub(crate) fn sees_recorders(&self) -> bool {
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

/// An event that this process made or opened.
#[derive(Debug)]
pub(crate) struct Event {
    pub(crate) cell: Arc<EventStorage>,
    pub(crate) device: usize,
    /// What others reach, if it was made to be shared: the file, and its number.
    pub(crate) shared: Option<(OwnedFd, u64)>,
}

/// A record on its way. Dropped unrun, because its stream failed or went, it fails, and those who wait are told.
pub(crate) struct PendingRecord {
    pub(crate) cell: Arc<EventStorage>,
    pub(crate) record: Record,
    pub(crate) succeeded: bool,
}

impl PendingRecord {
    /// Takes the whole pending, so that a closure that calls this owns it, and drops it when it is dropped unrun.
    pub(crate) fn succeed(mut self) {
        self.succeeded = true;
    }
}

impl Drop for PendingRecord {
    fn drop(&mut self) {
        self.cell.complete(self.record, self.succeeded);
    }
}
