//! A reader's guard, and how it waits for publications.

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
use crate::wire::ring::RingDescriptor;

/// How often it is looked for the end of a timeline whose counter says that it has come.
const LOOKS_FOR_THE_END: u32 = 1000;

/// A ring, seen from one of its readers. It gets every publication from the one on that came next when it joined, in order.
///
/// # The end of the ring
///
/// [`next`](Self::next) returns a slot ahead of its publication, and the stream waits for the publication. The writer may
/// close the ring, or die, before it publishes that sequence; the stream then continues, over bytes that were never written.
/// The call that comes first after the end is known reports it: `next`, an access to the slot
/// ([`view`](RingReadSlot::view), [`tensor`](RingReadSlot::tensor)), or its release. The end is known as soon as the stream
/// has continued. So a result is valid if the work that computed it has finished before the slot's
/// [`release`](RingReadSlot::release) returned `Ok`. A slot that was accessed and released earlier is reported by `next` and
/// [`check`](Self::check), as [`Error::RingUnpublished`]. [`wait_next`](Self::wait_next) and [`try_next`](Self::try_next)
/// return published slots only.
///
/// Several slots may be held at a time, and released in any order; the writer hears of a release when all older ones are
/// released. Dropping the reader leaves the ring when its slots are gone and the work that released them has been done.
#[derive(Debug)]
pub struct RingReader {
    inner: Arc<Inner>,
    next: u64,
}

/// What the reader and its slots share.
pub(super) struct Inner {
    /// `None` once it has been handed on to be ended.
    pub(super) mapping: Option<Mapping>,
    pub(super) timeline: Timeline,
    pub(super) slots: Slots,
    pub(super) backend: Arc<dyn DeviceIpc>,
    writer: u32,
    pub(super) on_host: bool,
    timeout: Duration,
    pub(super) releases: Mutex<Releases>,
    /// A dropped slot has been released.
    pub(super) released: Condvar,
    pub(super) owner: Owner,
}

impl RingReader {
    /// The writer's process hears of it here.
    pub(super) fn join(mapping: Mapping, descriptor: &RingDescriptor, timeout: Duration) -> Result<Self> {
        let slots =
            Slots::new(mapping.range(), descriptor.slots(), descriptor.slot_bytes()).ok_or_else(|| {
                Error::InvalidRegion(format!(
                    "{} slots of {} bytes do not lie in the {} bytes that were mapped",
                    descriptor.slots(),
                    descriptor.slot_bytes(),
                    mapping.len()
                ))
            })?;
        let on_host = has_no_timelines(&**mapping.held().backend(), mapping.device())?;
        let timeline = mapping.held().words()?;
        let writer = descriptor.writer().pid;
        let start = match timeline.start() {
            RingStart::At(start) => start,
            RingStart::Dismissed => return Err(Error::DismissedFromRing { pid: writer }),
            RingStart::None => {
                timeline.check()?;
                return Err(Error::Protocol(format!(
                    "process {writer} shares this memory, but not as a ring"
                )));
            }
        };
        kill_point!("importer:ring-joined");
        let inner = Inner {
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

    /// The sequence that [`next`](Self::next) gives.
    pub const fn sequence(&self) -> u64 {
        self.next
    }

    /// The device in whose address space the ring is here.
    pub fn device(&self) -> DeviceOrdinal {
        self.inner.slots.device()
    }

    /// What this process may do with the memory.
    pub fn access(&self) -> Access {
        self.inner.mapping().access()
    }

    /// Does the host do the waiting, as the device has no timelines? Then [`next`](Self::next) waits for the publication, and a
    /// release is told of by a thread of the library.
    pub fn waits_on_host(&self) -> bool {
        self.inner.on_host
    }

    /// The next slot. Work that is submitted to the stream from now on waits until it has been published; the host does not
    /// wait, but where [`waits_on_host`](Self::waits_on_host).
    ///
    /// The slot may never be published; see [the end of the ring](Self#the-end-of-the-ring).
    ///
    /// # Errors
    ///
    /// [`Error::RingClosed`] behind the last publication; [`Error::ExporterGone`] behind the last that had come when the
    /// writer died; [`Error::RingUnpublished`] in place of these where an earlier slot was accessed and released, and never
    /// published; [`Error::RingSlotsHeld`]; [`Error::DismissedFromRing`]; [`Error::WrongBackend`];
    /// [`Error::StreamCapturing`]; [`Error::Timeout`] where the host waits; [`Error::Unsupported`] for a stream of a device
    /// without timelines, in a ring of one that has them; [`Error::Forked`]. The next call gives the same slot.
    pub fn next<M>(&mut self, stream: &impl AsStream<M>) -> Result<RingReadSlot> {
        let stream = stream.as_stream();
        let inner = &*self.inner;
        inner.owner.check()?;
        check_backend("the stream", stream.backend(), inner.backend.info().name)?;
        let waits = || if inner.may_take(self.next)? { Ok(()) } else { inner.wait_on(self.next, stream) };
        waits().map_err(|error| inner.end_of_ring(error))?;
        Ok(self.take())
    }

    /// The next slot, once it has been published: waits on the host, which looks again and again at first. Work on any stream may
    /// read it then.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]; [`Error::OnWorkerThread`] in a callback; as [`next`](Self::next). The next call gives the same slot.
    pub fn wait_next(&mut self, timeout: Duration) -> Result<RingReadSlot> {
        let inner = &*self.inner;
        inner.owner.check()?;
        let published = inner.may_take(self.next).and_then(|_| inner.wait_published(self.next, timeout));
        published.map_err(|error| inner.end_of_ring(error))?;
        Ok(self.take())
    }

    /// The next slot, if it has been published; waits for nothing.
    ///
    /// # Errors
    ///
    /// As [`next`](Self::next).
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

    /// Has `callback` run, once, when the writer's process has ended; as [`Mapping::on_gone`].
    pub fn on_gone(&self, callback: impl FnOnce(&Error) + Send + 'static) {
        self.inner.mapping().on_gone(callback);
    }

    /// Returns an error if a slot that this reader accessed and released ahead of its publication was never published.
    ///
    /// [`next`](Self::next) reports the same. Call this once the work has finished, before its result is used, where a reader
    /// takes a fixed number of slots and releases them without waiting.
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

    /// Leaves the ring; what a drop does, by name. Does not wait.
    pub fn close(self) {}
}

/// The state of one sequence, as its reader sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Publication {
    Published,
    /// Not published yet.
    Pending,
    /// The writer has closed the ring, and this sequence is not among its publications.
    Closed,
    /// The timeline has ended without this publication.
    WriterGone,
    /// The counter has ended, and the reason is not visible yet.
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

impl Inner {
    pub(super) fn mapping(&self) -> &Mapping {
        self.mapping.as_ref().expect("taken when the last guard goes")
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

    /// Has this sequence been published? An error where it never will be, or may have been written over.
    pub(super) fn is_published(&self, sequence: u64) -> Result<bool> {
        for _ in 0..LOOKS_FOR_THE_END {
            let seen = self.timeline.seen();
            // Looked at behind the counter: whoever is dismissed is told so before its counter ends.
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
        Err(Error::Protocol("the ring's counter has ended, and nothing says why".into()))
    }

    /// The error of a reader at the end of the ring: where a sequence was accessed and released, and never published, it names
    /// that one.
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

    /// Is there a slot for this sequence, or will there be one without this reader's doing? Then: has it been published?
    fn may_take(&self, sequence: u64) -> Result<bool> {
        if self.is_published(sequence)? {
            return Ok(true);
        }
        let mut releases = self.lock();
        if releases.taken.any_dropped() {
            check_may_wait("RingReader::next", self.timeout)?;
            // The device is waited for, and may not get new work that waits for what comes behind the release.
            let dropped = |releases: &mut Releases| releases.taken.any_dropped();
            let waited = self.released.wait_timeout_while(releases, self.timeout, dropped);
            releases = waited.unwrap_or_else(PoisonError::into_inner).0;
            if releases.taken.any_dropped() {
                return Err(Error::Timeout {
                    what: format!("the release of sequence {}, which was dropped,", releases.taken.first()),
                    after: self.timeout,
                    detail: "; a slot that is dropped waits for all work of the device: release slots on the stream \
                             that reads them"
                        .into(),
                });
            }
        }
        let before = self.slots.takes_the_place_of(sequence);
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
            // The end may have come in between, behind this publication.
            Err(error) => {
                if self.is_published(sequence)? {
                    Ok(())
                } else {
                    Err(error)
                }
            }
            waits => waits,
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

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingReader")
            .field("mapping", &self.mapping)
            .field("slots", &self.slots)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
