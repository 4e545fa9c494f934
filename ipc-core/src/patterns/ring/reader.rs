//! A reader's guard, and its waits for publications.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::read_slot::RingReadSlot;
use super::releases::Releases;
use super::slots::{Slots, count_host_wait};
use super::writer::has_no_timelines;
use crate::backend::stream::{AsStream, BorrowedStream};
use crate::backend::{Access, DeviceIpc};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::os::kill::kill_point;
use crate::os::process::Owner;
use crate::sharing::export::check_backend;
use crate::sharing::import::Mapping;
use crate::sharing::timeline::{RingStart, Seen, TIMELINE_END, Timeline, pause};
use crate::transport::check_may_wait;
use crate::wire::ring::RingSlots;

/// Maximum number of polls for the termination reason of a timeline whose counter has ended.
const MAX_TERMINATION_POLLS: u32 = 1000;

/// A reader of a ring. It receives, in order, every publication made after the reader opened the ring.
///
/// # Examples
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let ipc = device_ipc_core::Ipc::with_backend(device_ipc_mock::MockBackend::from_spec("devices=1")?);
/// # let mut ring = ipc.ring(ipc.allocate(0, 512)?).start()?;
/// # let descriptor = ring.descriptor().clone();
/// use device_ipc_core::Error;
///
/// let stream = ipc.create_stream(0)?;
/// let mut reader = ipc.open_ring(&descriptor).on(&stream)?;
/// # for value in [1.0_f32, 2.0] {
/// #     let mut slot = ring.write(&stream)?;
/// #     slot.view_mut(&stream)?.copy_from(&[value; 64])?;
/// #     slot.publish(&stream)?;
/// # }
/// # drop(ring); // the writer publishes 1.0 and 2.0, and closes the ring
/// let mut values = Vec::new();
/// loop {
///     match reader.next(&stream) {
///         Ok(slot) => {
///             values.push(slot.view::<f32, _>(&stream)?.to_vec()?[0]);
///             slot.release(&stream)?; // the writer may reuse the slot when the stream reaches this point
///         }
///         Err(Error::RingClosed { .. }) => break, // the writer has closed the ring
///         Err(error) => return Err(error.into()),
///     }
/// }
/// assert_eq!(values, [1.0, 2.0]);
/// # Ok(())
/// # }
/// ```
///
/// # The end of the ring
///
/// [`next`](Self::next) returns a slot ahead of its publication, and the stream waits for the publication. The writer may
/// close the ring, or die, before it publishes that sequence; the stream then continues over bytes that were never written.
/// The first call after the end is known reports it: `next`, an access to the slot
/// ([`view`](RingReadSlot::view), [`tensor`](RingReadSlot::tensor)), or its release. The end is known as soon as the stream
/// has continued. So a result is valid if the work that computed it has finished before the slot's
/// [`release`](RingReadSlot::release) returned `Ok`. A slot that was accessed and released earlier is reported by `next` and
/// [`check`](Self::check), as [`Error::RingUnpublished`]. [`wait_next`](Self::wait_next) and [`try_next`](Self::try_next)
/// return published slots only.
///
/// A reader may take several slots at a time and release them in any order; the writer is notified of a release when all older
/// slots are released. Dropping the reader closes it when its slots are dropped and the work that released them has finished.
#[derive(Debug)]
pub struct RingReader {
    inner: Arc<ReaderState>,
    next: u64,
}

/// The state shared by a reader and its slots.
pub(super) struct ReaderState {
    /// `None` after the drop has moved it to the worker.
    pub(super) mapping: Option<Mapping>,
    pub(super) timeline: Timeline,
    pub(super) slots: Slots,
    pub(super) backend: Arc<dyn DeviceIpc>,
    writer: u32,
    pub(super) on_host: bool,
    timeout: Duration,
    pub(super) releases: Mutex<Releases>,
    /// Notified when a dropped slot has been released.
    pub(super) released: Condvar,
    pub(super) owner: Owner,
}

impl RingReader {
    /// Creates a reader of an open mapping. The first use of the lease's counters notifies the writer.
    pub(super) fn open(mapping: Mapping, ring: RingSlots, timeout: Duration) -> Result<Self> {
        let slots = Slots::new(mapping.range(), ring.slots(), ring.slot_bytes()).ok_or_else(|| {
            Error::InvalidRegion(format!(
                "{} slots of {} bytes do not lie in the {} bytes that were mapped",
                ring.slots(),
                ring.slot_bytes(),
                mapping.len()
            ))
        })?;
        let on_host = has_no_timelines(&**mapping.held().backend(), mapping.device())?;
        let timeline = mapping.held().words()?;
        let writer = mapping.descriptor().exporter().pid;
        let start = match timeline.start() {
            RingStart::At(start) => start,
            RingStart::Dismissed => return Err(Error::DismissedFromRing { pid: writer }),
            RingStart::None => {
                timeline.check()?;
                return Err(Error::Protocol(format!(
                    "process {writer} does not share this memory as a ring"
                )));
            }
        };
        kill_point!("importer:ring-joined");
        let inner = ReaderState {
            backend: Arc::clone(mapping.held().backend()),
            mapping: Some(mapping),
            timeline,
            slots,
            writer,
            on_host,
            timeout,
            releases: Mutex::new(Releases::from(start)),
            released: Condvar::new(),
            owner: Owner::current(),
        };
        Ok(Self { inner: Arc::new(inner), next: start })
    }

    /// Returns the sequence of the slot that [`next`](Self::next) returns next.
    pub const fn sequence(&self) -> u64 {
        self.next
    }

    /// Returns the device that the ring is mapped on in this process.
    pub fn device(&self) -> DeviceOrdinal {
        self.inner.slots.device()
    }

    /// Returns the access of this process to the memory.
    pub fn access(&self) -> Access {
        self.inner.mapping().access()
    }

    /// Returns whether the host waits because the device has no timelines.
    ///
    /// Then [`next`](Self::next) waits for the publication, and a thread of the library signals releases.
    pub fn waits_on_host(&self) -> bool {
        self.inner.on_host
    }

    /// Takes the next slot. Later work on the stream waits until the slot is published.
    ///
    /// The host does not wait, unless the reader [waits on the host](Self::waits_on_host). The slot may never be published; see
    /// [the end of the ring](Self#the-end-of-the-ring).
    ///
    /// # Errors
    ///
    /// [`Error::RingClosed`] after the last publication; [`Error::ExporterGone`] after the last publication that arrived before
    /// the writer died; [`Error::RingUnpublished`] instead of these if an earlier slot was accessed and released but never
    /// published; [`Error::RingSlotsHeld`]; [`Error::DismissedFromRing`]; [`Error::WrongBackend`]; [`Error::StreamCapturing`];
    /// [`Error::Timeout`] if the host waits; [`Error::Unsupported`] for a stream of a device without timelines in a ring of a
    /// device with timelines; [`Error::Forked`]. After an error, the next call takes the same slot.
    pub fn next<M>(&mut self, stream: &impl AsStream<M>) -> Result<RingReadSlot> {
        let stream = stream.as_stream();
        let inner = &*self.inner;
        inner.owner.check()?;
        check_backend("the stream", stream.backend(), inner.backend.info().name)?;
        let wait = || if inner.may_take(self.next)? { Ok(()) } else { inner.wait_on(self.next, stream) };
        wait().map_err(|error| inner.end_of_ring(error))?;
        Ok(self.take())
    }

    /// Takes the next slot after waiting on the host for its publication. Work on any stream may then read it.
    ///
    /// The wait spins before it sleeps.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]; [`Error::OnWorkerThread`] in a callback; as for [`next`](Self::next). After an error, the next call
    /// takes the same slot.
    pub fn wait_next(&mut self, timeout: Duration) -> Result<RingReadSlot> {
        let inner = &*self.inner;
        inner.owner.check()?;
        let published = inner.may_take(self.next).and_then(|_| inner.wait_published(self.next, timeout));
        published.map_err(|error| inner.end_of_ring(error))?;
        Ok(self.take())
    }

    /// Takes the next slot if it has been published. Does not wait.
    ///
    /// # Errors
    ///
    /// As for [`next`](Self::next).
    pub fn try_next(&mut self) -> Result<Option<RingReadSlot>> {
        self.inner.owner.check()?;
        let published = self.inner.may_take(self.next).map_err(|error| self.inner.end_of_ring(error))?;
        Ok(if published { Some(self.take()) } else { None })
    }

    fn take(&mut self) -> RingReadSlot {
        let sequence = self.next;
        self.inner.lock().taken.take();
        self.next += 1;
        kill_point!("importer:ring-taken");
        RingReadSlot::new(Arc::clone(&self.inner), sequence)
    }

    /// Registers a callback that runs once when the writer's process has terminated; see [`Mapping::on_gone`].
    pub fn on_gone(&self, callback: impl FnOnce(&Error) + Send + 'static) {
        self.inner.mapping().on_gone(callback);
    }

    /// Returns an error if a slot that this reader accessed and released ahead of its publication was never published.
    ///
    /// [`next`](Self::next) reports the same. If a reader takes a fixed number of slots and releases them without waiting, call
    /// this when the work has finished, before its result is used.
    ///
    /// # Errors
    ///
    /// [`Error::RingUnpublished`]; [`Error::DismissedFromRing`]; [`Error::Forked`].
    pub fn check(&self) -> Result<()> {
        let inner = &*self.inner;
        inner.owner.check()?;
        let Some(last) = inner.lock().last_read_ahead else { return Ok(()) };
        inner.is_published(last).map(drop).map_err(|error| inner.end_of_ring(error))
    }

    /// Closes the reader, as dropping it does. Does not wait.
    pub fn close(self) {}
}

/// The state of one sequence from the reader's view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Publication {
    Published,
    /// Not published yet.
    Pending,
    /// The writer closed the ring without publishing this sequence.
    Closed,
    /// The writer terminated without publishing this sequence.
    WriterGone,
    /// The counter has ended, but the reason is not visible yet.
    Ending,
}

impl Publication {
    fn of(sequence: u64, seen: Seen, total: Option<u64>) -> Self {
        let (value, ended) = match seen {
            Seen::Live(value) => (value, false),
            Seen::Ended(value) => (value, true),
        };
        match total {
            // The counter ends when everything has arrived.
            Some(total) if value >= TIMELINE_END => {
                if sequence < total {
                    Self::Published
                } else {
                    Self::Closed
                }
            }
            Some(total) if !ended && sequence >= total => Self::Closed,
            _ if value < TIMELINE_END && value > sequence => Self::Published,
            _ if ended => Self::WriterGone,
            _ if value < TIMELINE_END => Self::Pending,
            _ => Self::Ending,
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

    fn dismissed(&self) -> Error {
        Error::DismissedFromRing { pid: self.writer }
    }

    pub(super) fn check_dismissed(&self) -> Result<()> {
        if self.timeline.start() == RingStart::Dismissed { Err(self.dismissed()) } else { Ok(()) }
    }

    /// Returns whether a sequence has been published. Fails if it never will be, or may have been overwritten.
    pub(super) fn is_published(&self, sequence: u64) -> Result<bool> {
        for _ in 0..MAX_TERMINATION_POLLS {
            let seen = self.timeline.seen();
            // Loaded after the counter: the writer marks the reader as dismissed before it ends the counter.
            self.check_dismissed()?;
            match Publication::of(sequence, seen, self.timeline.total()) {
                Publication::Published => return Ok(true),
                Publication::Pending => return Ok(false),
                Publication::Closed => return Err(Error::RingClosed { pid: self.writer }),
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

    /// Returns the error at the end of the ring, which names a sequence that was accessed and released but never published.
    fn end_of_ring(&self, end: Error) -> Error {
        if !matches!(end, Error::RingClosed { .. } | Error::ExporterGone { .. } | Error::LeaseEnded { .. }) {
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

    /// Checks that the slot of a sequence does not wait for this reader, and returns whether the sequence has been published.
    fn may_take(&self, sequence: u64) -> Result<bool> {
        if self.is_published(sequence)? {
            return Ok(true);
        }
        let mut releases = self.lock();
        if releases.taken.any_dropped() {
            check_may_wait("RingReader::next", self.timeout)?;
            // The worker waits for the device, which must not get new work that depends on the release.
            let dropped = |releases: &mut Releases| releases.taken.any_dropped();
            let waited = self.released.wait_timeout_while(releases, self.timeout, dropped);
            releases = waited.unwrap_or_else(PoisonError::into_inner).0;
            if releases.taken.any_dropped() {
                return Err(Error::Timeout {
                    what: format!("the release of sequence {}, which was dropped,", releases.taken.first()),
                    after: self.timeout,
                    detail: "; a dropped slot waits for all work of the device: release slots on the stream that reads \
                             them"
                        .into(),
                });
            }
        }
        let before = self.slots.previous_in_slot(sequence);
        if before.is_some_and(|before| releases.taken.is_held(before)) {
            return Err(Error::RingSlotsHeld { slots: self.slots.count() });
        }
        drop(releases);
        self.is_published(sequence)
    }

    fn wait_on(&self, sequence: u64, stream: BorrowedStream<'_>) -> Result<()> {
        if self.on_host {
            return self.wait_published(sequence, self.timeout);
        }
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

    fn wait_published(&self, sequence: u64, timeout: Duration) -> Result<()> {
        if self.is_published(sequence)? {
            return Ok(());
        }
        check_may_wait("RingReader::wait_next", timeout)?;
        count_host_wait();
        let begun = Instant::now();
        while !self.is_published(sequence)? {
            let waited = begun.elapsed();
            if waited >= timeout {
                return Err(Error::Timeout {
                    what: format!("the publication of sequence {sequence}"),
                    after: timeout,
                    detail: format!("; process {} has not published it yet", self.writer),
                });
            }
            pause(waited, timeout);
        }
        Ok(())
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

#[cfg(test)]
mod tests;
