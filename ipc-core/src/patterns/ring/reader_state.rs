//! The state that a reader and its slots share: the mapping, the publications, and the releases that have not been signalled.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::released::TakenSlots;
use super::replica::Replica;
use super::slots::{SlotRanges, count_host_wait};
use super::writer::StreamKey;
use crate::backend::stream::BorrowedStream;
use crate::backend::{DeviceIpc, DeviceStream};
use crate::model::error::{Error, Result};
use crate::os::{Condvar, wait_for_words};
use crate::sharing::import::Mapping;
use crate::sharing::timeline::{OwnCounter, Publication, Seen, TIMELINE_END, Timeline};
use crate::sharing::{PolledReadiness, RuntimeRef};
use crate::transport::check_may_wait;

/// Maximum number of polls for the termination reason of a timeline whose counter has ended.
const MAX_TERMINATION_POLLS: u32 = 1000;

/// The state shared by a reader and its slots.
pub(super) struct ReaderState {
    /// `None` after the drop has moved it to the worker.
    pub(super) mapping: Option<Mapping>,
    pub(super) timeline: Timeline,
    pub(super) slots: SlotRanges,
    pub(super) backend: Arc<dyn DeviceIpc>,
    pub(super) writer: u32,
    /// Present if the writer is on another host: the reader then reads a private ring of this process.
    pub(super) replica: Option<Replica>,
    pub(super) on_host: bool,
    pub(super) timeout: Duration,
    pub(super) releases: Mutex<Releases>,
    /// Notified when a dropped slot has been released.
    pub(super) released: Condvar,
    /// The descriptor of the reader, created by its first use.
    pub(super) readiness: PolledReadiness,
    pub(super) runtime: RuntimeRef,
}

/// The releases of a reader and the streams that signalled them.
pub(super) struct Releases {
    pub(super) taken: TakenSlots,
    /// The stream that signalled last.
    pub(super) last_stream: Option<StreamKey>,
    /// Counts the signals to the writer that have arrived. The shared counter cannot be trusted: the writer can write it.
    pub(super) signalled: Option<Arc<OwnCounter>>,
    /// Counts the releases that precede those of older slots.
    pub(super) own: Option<Arc<OwnCounter>>,
    /// The stream that incremented `own` last.
    pub(super) last_marked: Option<StreamKey>,
    /// The stream that releases dropped slots.
    pub(super) own_stream: Option<Box<dyn DeviceStream>>,
    /// The last sequence that was accessed and released ahead of its publication.
    pub(super) last_read_ahead: Option<u64>,
}

impl Releases {
    /// Creates the releases of a reader that begins with sequence `start`.
    pub(super) const fn from(start: u64) -> Self {
        Self {
            taken: TakenSlots::from(start),
            last_stream: None,
            signalled: None,
            own: None,
            last_marked: None,
            own_stream: None,
            last_read_ahead: None,
        }
    }
}

impl ReaderState {
    pub(super) fn mapping(&self) -> &Mapping {
        self.mapping.as_ref().expect("only the drop takes the mapping")
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Releases> {
        self.releases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the error at the end of a ring that has been closed: that of a writer on another host, if it has not closed it.
    fn closed(&self) -> Error {
        let failure = self.replica.as_ref().and_then(Replica::failure);
        failure.unwrap_or(Error::RingClosed { pid: self.writer })
    }

    fn dismissed(&self) -> Error {
        Error::DismissedFromRing { pid: self.writer }
    }

    /// Returns whether a sequence has been published. Fails if it never will be, or may have been overwritten.
    pub(super) fn is_published(&self, sequence: u64) -> Result<bool> {
        for _ in 0..MAX_TERMINATION_POLLS {
            match self.timeline.publication(sequence) {
                Publication::Published => return Ok(true),
                Publication::Pending => return Ok(false),
                Publication::Closed => return Err(self.closed()),
                Publication::Dismissed => return Err(self.dismissed()),
                Publication::WriterGone => {
                    self.timeline.check()?;
                    return Ok(false);
                }
                Publication::Ending => std::thread::yield_now(),
            }
        }
        self.timeline.check()?;
        Err(Error::Protocol("the counter of the ring ended without a reason".into()))
    }

    /// Makes the reader's descriptor unreadable until a sequence is no longer pending. Does nothing without a descriptor.
    pub(super) fn watch_publication(&self, sequence: u64) {
        self.readiness.watch(self.runtime, || {
            let timeline = self.timeline.clone();
            move || timeline.publication(sequence) != Publication::Pending
        });
    }

    /// Returns the error at the end of the ring, which names a sequence that was accessed and released but never published.
    pub(super) fn end_of_ring(&self, end: Error) -> Error {
        use Error::{ExporterGone, InPull, LeaseEnded, RingClosed};
        if !matches!(end, RingClosed { .. } | ExporterGone { .. } | LeaseEnded { .. } | InPull { .. }) {
            return end;
        }
        let published = match (self.timeline.seen(), self.timeline.total()) {
            (Seen::Ended(value), _) if value < TIMELINE_END => value,
            (_, total) => total.unwrap_or(0),
        };
        match self.lock().last_read_ahead {
            Some(last) if last >= published => {
                Error::RingUnpublished { first: published, last, source: Box::new(end) }
            }
            _ => end,
        }
    }

    /// Returns whether a sequence has been published. Fails if it cannot be published before this reader releases a slot.
    pub(super) fn may_take(&self, sequence: u64) -> Result<bool> {
        if self.is_published(sequence)? {
            return Ok(true);
        }
        let before = self.slots.previous_in_slot(sequence);
        if before.is_some_and(|before| self.lock().taken.is_held(before)) {
            return Err(Error::RingSlotsHeld { slots: self.slots.count() });
        }
        Ok(false)
    }

    /// Waits until dropped slots have been released: the worker waits for the device to release them, and a stream of the device
    /// must not wait for a publication that depends on the release.
    fn wait_dropped(&self) -> Result<()> {
        let releases = self.lock();
        if !releases.taken.any_dropped() {
            return Ok(());
        }
        check_may_wait("taking a slot ahead of its publication", self.timeout)?;
        let dropped = |releases: &mut Releases| releases.taken.any_dropped();
        let releases = self.released.wait_timeout_while(&self.releases, releases, self.timeout, dropped);
        if !releases.taken.any_dropped() {
            return Ok(());
        }
        Err(Error::Timeout {
            what: format!("the release of sequence {}, which was dropped", releases.taken.first()),
            after: self.timeout,
            detail: "; a dropped slot waits for all work of the device: release slots on the stream that reads them"
                .into(),
        })
    }

    pub(super) fn wait_on(&self, sequence: u64, stream: BorrowedStream<'_>) -> Result<()> {
        if self.on_host {
            return self.wait_published("taking a slot ahead of its publication", sequence, self.timeout);
        }
        self.wait_dropped()?;
        match self.timeline.wait(sequence + 1, &stream) {
            // The counter may have ended meanwhile, after this publication.
            Err(error) => {
                if self.is_published(sequence)? {
                    Ok(())
                } else {
                    Err(error)
                }
            }
            result => result,
        }
    }

    pub(super) fn wait_published(&self, call: &'static str, sequence: u64, timeout: Duration) -> Result<()> {
        check_may_wait(call, timeout)?;
        count_host_wait(self.runtime);
        wait_for_words(
            timeout,
            || self.is_published(sequence),
            || Error::Timeout {
                what: format!("the publication of sequence {sequence}"),
                after: timeout,
                detail: format!("; process {} has not published it yet", self.writer),
            },
        )
    }
}

impl fmt::Debug for ReaderState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingReader")
            .field("mapping", &self.mapping)
            .field("slots", &self.slots)
            .finish_non_exhaustive()
    }
}
