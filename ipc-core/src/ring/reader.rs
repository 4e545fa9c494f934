//! The readers' guards.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::descriptor::RingDescriptor;
use super::released::{State, Taken};
use super::slots::Slots;
use super::writer::{StreamKey, event_on, has_no_timelines};
use crate::address::DeviceRange;
use crate::backend::{Access, DeviceIpc, DeviceStream};
use crate::device::DeviceOrdinal;
use crate::error::{Error, Result};
use crate::export::check_backend;
use crate::import::{Mapping, Tensor};
use crate::interop::{ViewStream, ViewTypes};
use crate::kill::kill_point;
use crate::process::Owner;
use crate::runtime::Runtime;
use crate::stream::{AsStream, BorrowedStream};
use crate::tensor::{Element, TensorTable};
use crate::timeline::{RingStart, Seen, TIMELINE_END, Timeline, pause};

/// How often it is looked for the end of a timeline whose counter says that it has come.
const LOOKS_FOR_THE_END: u32 = 1000;

/// A ring, seen from one of its readers. It gets every publication from the one on that came next when it joined, in order.
///
/// Several slots may be held at a time, and released in any order; the writer hears of a release when all older ones are
/// released. Dropping the reader leaves the ring when its slots are gone and the work that released them has been done.
#[derive(Debug)]
pub struct RingReader {
    inner: Arc<Inner>,
    next: u64,
}

/// What the reader and its slots share.
struct Inner {
    /// `None` once it has been handed on to be ended.
    mapping: Option<Mapping>,
    timeline: Timeline,
    slots: Slots,
    backend: Arc<dyn DeviceIpc>,
    writer: u32,
    on_host: bool,
    timeout: Duration,
    releases: Mutex<Releases>,
    /// A dropped slot has been released.
    released: Condvar,
    owner: Owner,
}

struct Releases {
    taken: Taken,
    /// The stream that signalled last.
    last_stream: Option<StreamKey>,
    /// Counts the releases that came before those of older slots, and the stream that did so last.
    own: Option<Timeline>,
    last_marked: Option<StreamKey>,
    /// For slots that are dropped.
    own_stream: Option<Box<dyn DeviceStream>>,
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
            releases: Mutex::new(Releases {
                taken: Taken::from(start),
                last_stream: None,
                own: None,
                last_marked: None,
                own_stream: None,
            }),
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
    /// A stream that waits goes on when the writer dies: [`RingReadSlot::check`] tells, before the bytes are used.
    ///
    /// # Errors
    ///
    /// [`Error::RingClosed`] behind the last publication; [`Error::ExporterGone`] behind the last that had come when the
    /// writer died; [`Error::RingSlotsHeld`]; [`Error::DismissedFromRing`]; [`Error::WrongBackend`];
    /// [`Error::StreamCapturing`]; [`Error::Timeout`] where the host waits; [`Error::Unsupported`] for a stream of a device
    /// without timelines, in a ring of one that has them; [`Error::Forked`]. The next call gives the same slot.
    pub fn next<M>(&mut self, stream: &impl AsStream<M>) -> Result<RingReadSlot> {
        let stream = stream.as_stream();
        let inner = &*self.inner;
        inner.owner.check()?;
        check_backend("the stream", stream.backend(), inner.backend.info().name)?;
        if !inner.may_take(self.next)? {
            inner.wait_on(self.next, stream)?;
        }
        Ok(self.take())
    }

    /// The next slot, once it has been published: waits on the host, which looks again and again at first. Work on any stream may
    /// read it then.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]; as [`next`](Self::next). The next call gives the same slot.
    pub fn wait_next(&mut self, timeout: Duration) -> Result<RingReadSlot> {
        self.inner.owner.check()?;
        self.inner.may_take(self.next)?;
        self.inner.wait_published(self.next, timeout)?;
        Ok(self.take())
    }

    /// The next slot, if it has been published; waits for nothing.
    ///
    /// # Errors
    ///
    /// As [`next`](Self::next).
    pub fn try_next(&mut self) -> Result<Option<RingReadSlot>> {
        self.inner.owner.check()?;
        let published = self.inner.may_take(self.next)?;
        Ok(if published { Some(self.take()) } else { None })
    }

    fn take(&mut self) -> RingReadSlot {
        let sequence = self.next;
        self.inner.lock().taken.take();
        self.next += 1;
        kill_point!("importer:ring-taken");
        RingReadSlot { inner: Arc::clone(&self.inner), sequence, released: false }
    }

    /// Has `callback` run, once, when the writer's process has ended; as [`Mapping::on_gone`].
    pub fn on_gone(&self, callback: impl FnOnce(&Error) + Send + 'static) {
        self.inner.mapping().on_gone(callback);
    }

    /// Leaves the ring; what a drop does, by name. Does not wait.
    pub fn close(self) {}
}

impl Inner {
    fn mapping(&self) -> &Mapping {
        self.mapping.as_ref().expect("taken when the last guard goes")
    }

    fn lock(&self) -> MutexGuard<'_, Releases> {
        self.releases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn dismissed(&self) -> Error {
        Error::DismissedFromRing { pid: self.writer }
    }

    fn check_dismissed(&self) -> Result<()> {
        if self.timeline.start() == RingStart::Dismissed { Err(self.dismissed()) } else { Ok(()) }
    }

    /// Has this sequence been published? An error where it never will be, or may have been written over.
    fn is_published(&self, sequence: u64) -> Result<bool> {
        for _ in 0..LOOKS_FOR_THE_END {
            let (value, ended) = match self.timeline.seen() {
                Seen::Live(value) => (value, false),
                Seen::Ended(value) => (value, true),
            };
            // Looked at behind the counter: whoever is dismissed is told so before its counter ends.
            self.check_dismissed()?;
            let total = self.timeline.total();
            let closed = || Err(Error::RingClosed { pid: self.writer });
            match total {
                // The counter ends when everything has arrived.
                Some(total) if value >= TIMELINE_END => {
                    return if sequence < total { Ok(true) } else { closed() };
                }
                Some(total) if !ended && sequence >= total => return closed(),
                _ if value < TIMELINE_END && value > sequence => return Ok(true),
                _ if ended => {
                    self.timeline.check()?;
                    return Ok(false);
                }
                _ if value < TIMELINE_END => return Ok(false),
                // It is ending just now.
                _ => std::thread::yield_now(),
            }
        }
        self.timeline.check()?;
        Err(Error::Protocol("the ring's counter has ended, and nothing says why".into()))
    }

    /// Is there a slot for this sequence, or will there be one without this reader's doing? Then: has it been published?
    fn may_take(&self, sequence: u64) -> Result<bool> {
        if self.is_published(sequence)? {
            return Ok(true);
        }
        let mut releases = self.lock();
        if releases.taken.any_dropped() {
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

    fn release_on(self: &Arc<Self>, sequence: u64, stream: BorrowedStream<'_>) -> Result<()> {
        self.owner.check()?;
        check_backend("the stream", stream.backend(), self.backend.info().name)?;
        self.check_dismissed()?;
        kill_point!("importer:ring-releasing");
        if self.timeline.check().is_ok() {
            if self.on_host {
                self.release_by_host(sequence, stream)?;
            } else {
                self.signal_release(&mut self.lock(), sequence, stream)?;
            }
        }
        kill_point!("importer:ring-released");
        Ok(())
    }

    /// The stream tells the writer; of a slot that is not the oldest, the stream that releases the oldest does.
    fn signal_release(
        &self,
        releases: &mut Releases,
        sequence: u64,
        stream: BorrowedStream<'_>,
    ) -> Result<()> {
        let key = StreamKey::of(stream);
        if sequence != releases.taken.first() {
            let value = self.mark(releases, stream)?;
            releases.taken.set(sequence, State::ReleasedOn(key, value));
            return Ok(());
        }
        let (mut together, mut behind) = (0, None);
        for state in releases.taken.behind_first() {
            if let State::ReleasedOn(on, value) = state
                && *on != key
            {
                behind = behind.max(Some(*value));
            }
            together += 1;
        }
        if let (Some(own), Some(value)) = (&releases.own, behind) {
            own.wait_for_own(value, stream)?;
        }
        let same = releases.last_stream == Some(key);
        match self.timeline.signal_behind(sequence + 1 + together as u64, stream, same) {
            // Nobody waits for it any longer.
            Err(_) if self.timeline.check().is_err() => return Ok(()),
            signalled => signalled?,
        }
        releases.taken.forget(together);
        releases.last_stream = Some(key);
        Ok(())
    }

    fn release_now(&self, sequence: u64) -> Result<()> {
        self.owner.check()?;
        self.check_dismissed()?;
        kill_point!("importer:ring-releasing");
        if self.timeline.check().is_ok() {
            let mut releases = self.lock();
            if self.on_host {
                self.tell_released(&mut releases, sequence);
            } else {
                self.signal_release_now(&mut releases, sequence)?;
            }
        }
        kill_point!("importer:ring-released");
        Ok(())
    }

    /// The host tells the writer; of a slot that is not the oldest, whoever releases the oldest does.
    fn signal_release_now(&self, releases: &mut Releases, sequence: u64) -> Result<()> {
        if sequence != releases.taken.first() {
            releases.taken.set(sequence, State::Released);
            return Ok(());
        }
        let has_come = |value| releases.own.as_ref().is_none_or(|own| own.has_come_to(value));
        let (mut together, mut all_there) = (0, self.timeline.has_arrived());
        for state in releases.taken.behind_first() {
            all_there &= !matches!(state, State::ReleasedOn(_, value) if !has_come(*value));
            together += 1;
        }
        if !all_there {
            let why = "a stream has yet to get to the release of another one; synchronise that stream, or release this one \
                       on a stream";
            return Err(Error::RingNotYet { sequence, what: "released", why: why.into() });
        }
        match self.timeline.signal_now(sequence + 1 + together as u64) {
            // Nobody waits for it any longer.
            Err(_) if self.timeline.check().is_err() => return Ok(()),
            signalled => signalled?,
        }
        releases.taken.forget(together);
        releases.last_stream = None;
        Ok(())
    }

    /// Counts on when the stream gets here, and streams that did so before have; the count.
    fn mark(&self, releases: &mut Releases, stream: BorrowedStream<'_>) -> Result<u64> {
        let own = match releases.own.take() {
            Some(own) => own,
            None => Timeline::own(&self.backend)?,
        };
        let (key, value) = (StreamKey::of(stream), own.last_signalled() + 1);
        let marked = own.signal_behind(value, stream, releases.last_marked == Some(key));
        releases.own = Some(own);
        marked?;
        releases.last_marked = Some(key);
        Ok(value)
    }

    /// A thread of the library tells the writer, when the stream has got there.
    fn release_by_host(self: &Arc<Self>, sequence: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let runtime = Runtime::get()?;
        match event_on(&*self.backend, stream)? {
            None => self.tell_released(&mut self.lock(), sequence),
            Some(event) => {
                self.lock().taken.set(sequence, State::Passing);
                let inner = Arc::clone(self);
                runtime.worker.submit_when(event, move || inner.tell_released(&mut inner.lock(), sequence));
            }
        }
        Ok(())
    }

    fn tell_released(&self, releases: &mut Releases, sequence: u64) {
        releases.taken.set(sequence, State::Released);
        let first = releases.taken.forget_released();
        if first > self.timeline.last_signalled() {
            // Whoever has gone waits for nothing.
            let _ = self.timeline.signal_now(first);
        }
    }

    /// A slot was dropped without a release: when its bytes have come and the device has been waited for, it counts as released.
    fn let_go(self: &Arc<Self>, sequence: u64) {
        let Some(runtime) = Runtime::of_guard(&self.owner) else { return };
        self.lock().taken.set(sequence, State::Dropped);
        let (asks, inner) = (Arc::clone(self), Arc::clone(self));
        let has_come = move || Ok(asks.is_published(sequence).unwrap_or(true));
        runtime.worker.submit_once(has_come, move || inner.release_dropped(sequence));
    }

    fn release_dropped(&self, sequence: u64) {
        if let Err(error) = self.backend.synchronize_device(self.slots.device()) {
            tracing::warn!(%error, "the device could not be waited for before a slot of a ring was released");
        }
        let mut releases = self.lock();
        let told = if self.timeline.check().is_err() {
            releases.taken.set(sequence, State::Held);
            Ok(())
        } else if self.on_host {
            self.tell_released(&mut releases, sequence);
            Ok(())
        } else if sequence != releases.taken.first() {
            releases.taken.set(sequence, State::Released);
            Ok(())
        } else {
            self.release_on_own_stream(&mut releases, sequence)
        };
        if let Err(error) = told {
            tracing::warn!(%error, sequence, "a slot of a ring that was dropped cannot be released");
            releases.taken.set(sequence, State::Held);
        }
        drop(releases);
        self.released.notify_all();
    }

    fn release_on_own_stream(&self, releases: &mut Releases, sequence: u64) -> Result<()> {
        let stream = match releases.own_stream.take() {
            Some(stream) => stream,
            None => self.backend.memory().create_stream(self.slots.device())?,
        };
        let told = self.signal_release(releases, sequence, stream.as_borrowed());
        releases.own_stream = Some(stream);
        told
    }
}

impl Drop for Inner {
    /// The work that reads slots has been done when the releases behind it have arrived; then the memory is closed without
    /// waiting for the device, whose other streams may wait for what this very ring has yet to bring.
    fn drop(&mut self) {
        let Some(mapping) = self.mapping.take() else { return };
        kill_point!("importer:ring-left");
        let releases = self.releases.get_mut().unwrap_or_else(PoisonError::into_inner);
        let all_released = releases.taken.is_empty() && self.timeline.start() != RingStart::Dismissed;
        let runtime = Runtime::of_guard(&self.owner);
        let (Some(runtime), true) = (runtime, all_released && self.timeline.check().is_ok()) else {
            // A plain drop waits for the device.
            return drop(mapping);
        };
        let timeline = self.timeline.clone();
        let arrives = timeline.clone();
        runtime.worker.submit_once(
            move || Ok(arrives.has_arrived() || arrives.check().is_err()),
            move || if timeline.check().is_ok() { mapping.end_finished() } else { drop(mapping) },
        );
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

/// A slot that is being read. It keeps the memory mapped.
///
/// [`release`](Self::release) lets the writer write it again when a stream gets there. Dropping it does so when everything that
/// had been submitted to the device has finished, off the caller's thread; the reader's next call waits for that.
#[derive(Debug)]
#[must_use = "a slot that is dropped at once has not been read"]
pub struct RingReadSlot {
    inner: Arc<Inner>,
    sequence: u64,
    released: bool,
}

impl RingReadSlot {
    /// Its sequence: 0 for the ring's first publication, then 1, 2, …
    pub const fn sequence(&self) -> u64 {
        self.sequence
    }

    /// The bytes, at an address of this process.
    pub fn range(&self) -> DeviceRange {
        self.inner.slots.of(self.sequence)
    }

    /// Has it been published, as the host sees it?
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    pub fn is_published(&self) -> Result<bool> {
        self.inner.owner.check()?;
        self.inner.is_published(self.sequence)
    }

    /// Are the bytes what was published? To be asked when the work that reads them has finished, before its result is used: a
    /// stream that waited for a writer who has died has gone on over bytes that were never written.
    ///
    /// # Errors
    ///
    /// [`Error::ExporterGone`] or [`Error::RingClosed`] where it was never published, [`Error::DismissedFromRing`] where it may have
    /// been written over, [`Error::Forked`].
    pub fn check(&self) -> Result<()> {
        self.is_published().map(drop)
    }

    /// The elements, to be read by work on `stream`: the one that [`RingReader::next`] was given, or one that has been ordered
    /// behind it.
    ///
    /// # Errors
    ///
    /// [`Error::WrongStream`] for a stream of another device than the reader's; [`Error::Layout`] where the bytes are not whole,
    /// aligned elements.
    pub fn view<T: Element, M: ViewTypes>(&self, stream: &impl ViewStream<M>) -> Result<M::View<'_, T>> {
        self.inner.mapping().held().view(self.range(), None, stream)
    }

    /// The tensor of this name in a table of what lies in each slot, which came by any road. Its [`view`](Tensor::view) is for the
    /// stream that [`RingReader::next`] was given, or one that has been ordered behind it.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`]; [`Error::Descriptor`] for one that does not fit the slot.
    pub fn tensor<'s>(&'s self, table: &'s TensorTable, name: &str) -> Result<Tensor<'s>> {
        Tensor::in_table(self.inner.mapping().held(), self.range(), table, name)
    }

    /// Lets the writer write the slot again when the stream gets here: work that was submitted to it so far may still read the
    /// slot. Work on other streams must have been ordered before that, by an event. Does not wait.
    ///
    /// The writer hears of it when all older slots are released too. Releases on different streams are told in order: a stream
    /// waits for the release before. Streams are told apart by their handle, so do not destroy one before its release has
    /// arrived to go on with another. Where the writer has gone this does nothing.
    ///
    /// # Errors
    ///
    /// [`RingReleaseError`], which gives the slot back: [`Error::DismissedFromRing`]; [`Error::WrongBackend`];
    /// [`Error::StreamCapturing`]; [`Error::Unsupported`] for a stream of a device without timelines, in a ring of one that has
    /// them; else what the vendor says.
    pub fn release<M>(self, stream: &impl AsStream<M>) -> Result<(), RingReleaseError> {
        let released = self.inner.release_on(self.sequence, stream.as_stream());
        self.end(released)
    }

    /// Lets the writer write the slot again at once. The caller says that it has finished with it: that no work which reads the
    /// slot is left on any stream. For hosts that hand over to hosts; does not wait, and neither calls the driver nor the
    /// system, nor allocates.
    ///
    /// The writer hears of it when all older slots are released too. It takes its turn among releases on streams: where
    /// [`RingReader::waits_on_host`], it is told when the streams have got to the older ones; else they have to have.
    ///
    /// # Errors
    ///
    /// [`RingReleaseError`], which gives the slot back: [`Error::RingNotYet`] where a stream has yet to get to the release of
    /// another slot; [`Error::DismissedFromRing`]; [`Error::Forked`].
    pub fn release_now(self) -> Result<(), RingReleaseError> {
        let released = self.inner.release_now(self.sequence);
        self.end(released)
    }

    fn end(mut self, released: Result<()>) -> Result<(), RingReleaseError> {
        match released {
            Ok(()) => {
                self.released = true;
                Ok(())
            }
            Err(error) => Err(RingReleaseError { error, slot: Box::new(self) }),
        }
    }
}

impl Drop for RingReadSlot {
    fn drop(&mut self) {
        if !self.released {
            self.inner.let_go(self.sequence);
        }
    }
}

/// Why a slot was not released on a stream, and the slot.
pub struct RingReleaseError {
    error: Error,
    slot: Box<RingReadSlot>,
}

impl RingReleaseError {
    /// Why.
    pub const fn error(&self) -> &Error {
        &self.error
    }

    /// Gives the slot back.
    pub fn into_slot(self) -> RingReadSlot {
        *self.slot
    }
}

impl fmt::Debug for RingReleaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl fmt::Display for RingReleaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl std::error::Error for RingReleaseError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

/// The slot is released as by a plain drop.
impl From<RingReleaseError> for Error {
    fn from(failed: RingReleaseError) -> Self {
        failed.error
    }
}
