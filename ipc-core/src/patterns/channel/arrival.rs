//! The common state of the exports of a message: when they are ready, where they may be opened, and whether they have been.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::connection::ChannelConnection;
use super::counters::Slot;
use crate::backend::stream::BorrowedStream;
use crate::model::device::DeviceOrdinal;
use crate::model::error::Result;
use crate::os::kill::kill_point;
use crate::os::wait_for_words;
use crate::sharing::import::UnusedGrant;
use crate::transport::Deadline;

/// The devices on which memory may be opened.
#[derive(Clone, Copy, Debug)]
pub(super) enum OpenDevice {
    /// Any device: there is no map, or the memory belongs to this process.
    Anywhere,
    /// The device that the map names.
    On(DeviceOrdinal),
    /// No device: the map has no entry for the memory.
    Nowhere,
}

impl OpenDevice {
    /// Returns the device that the map names.
    pub(super) const fn device(self) -> Option<DeviceOrdinal> {
        match self {
            Self::On(device) => Some(device),
            Self::Anywhere | Self::Nowhere => None,
        }
    }
}

/// An export of a message, until it has been opened or discarded.
pub(super) struct Arrival {
    pub(super) connection: Arc<ChannelConnection>,
    /// The value of the sender's counter at which the bytes are ready.
    ready: u64,
    /// Held by the thread that opens the export, so that a grant is presented once.
    opening: Mutex<()>,
    settled: AtomicBool,
}

impl Arrival {
    pub(super) fn new(connection: &Arc<ChannelConnection>, ready: u64) -> Self {
        let (opening, settled) = (Mutex::new(()), AtomicBool::new(false));
        Self { connection: Arc::clone(connection), ready, opening, settled }
    }

    /// Opens the export by these grants, one thread at a time.
    pub(super) fn open<T>(&self, grants: &[UnusedGrant], open: impl FnOnce() -> Result<T>) -> Result<T> {
        self.connection.runtime.check()?;
        let _opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        kill_point!("receiver:channel-opening");
        let opened = open();
        kill_point!("receiver:channel-opened");
        if opened.is_ok() {
            grants.iter().for_each(UnusedGrant::copied);
        }
        let used = !grants.is_empty() && grants.iter().all(|grant| grant.token().is_none());
        if opened.is_ok() || used {
            self.settle();
        }
        opened
    }

    /// Waits on the host until the bytes are ready.
    pub(super) fn wait_ready(&self, deadline: Deadline) -> Result<()> {
        let late = || {
            let pid = self.connection.peer.pid();
            let detail = format!("; the stream of process {pid} has not reached its signal yet");
            deadline.passed("the completion of the work on the message's tensors", &detail)
        };
        wait_for_words(deadline.left(), || self.connection.is_ready(self.ready), late)
    }

    /// Makes the stream wait until the bytes are ready; the host waits if the device has no timelines.
    pub(super) fn wait_ready_on(&self, stream: BorrowedStream<'_>, deadline: Deadline) -> Result<()> {
        let connection = &*self.connection;
        if connection.is_ready(self.ready)? {
            return Ok(());
        }
        if !connection.signals.are_supported_by(stream) {
            return self.wait_ready(deadline);
        }
        match connection.signals.wait_on_stream(self.ready, stream) {
            // The counter may have reached the value, or the peer may have terminated, meanwhile.
            Err(error) if !connection.is_ready(self.ready)? => Err(error),
            _ => Ok(()),
        }
    }

    /// Counts the export as settled: a lease keeps the memory, or the grants have ended.
    fn settle(&self) {
        if self.connection.runtime.is_here() && !self.settled.swap(true, Ordering::AcqRel) {
            self.connection.link.counters.own(Slot::Settled).fetch_add(1, Ordering::AcqRel);
            if let Some(relay) = &self.connection.relay {
                relay.wake();
            }
        }
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        if !*self.settled.get_mut() {
            kill_point!("receiver:channel-discarding");
        }
        self.settle();
    }
}
