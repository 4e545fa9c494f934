//! Timelines: counters that the streams of an exporter and of an importer write and wait on.
//!
//! Each lease has a slot of words in host memory that both processes map, and both register with their devices. A word
//! has one writer. The reasons for host memory stand at [`DeviceTimelines`](crate::DeviceTimelines): above all, a
//! stream that waits for a peer who has died is freed by a plain store, whatever the driver is doing.

#![allow(
    unsafe_code,
    reason = "addresses of registered words are handed to the backend while their page is held"
)]

mod follow_ups;
mod own;
mod page;
mod ring;
mod slots;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub(crate) use crate::wire::Returned;
pub(crate) use follow_ups::{Finish, FollowUp, FollowUps, Poison};
pub(crate) use own::{OwnCounter, drop_unused_own_pages, note_own_slot, return_own_slot, take_own_slot};
pub(crate) use page::{SLOTS, Word, WordPage};
pub(crate) use slots::{Place, Slots};

use crate::backend::stream::{AsStream, BorrowedStream};
use crate::backend::{DeviceIpc, check_backend};
use crate::model::error::{Error, Result};
use crate::os::process::Owner;
use crate::sharing::host_pages::{timeline_begun, timeline_ended};
use crate::transport::check_may_wait;
pub(crate) use page::timelines_of;
pub(crate) use ring::{RingStart, Seen};

/// Values of a timeline are below this one.
pub const TIMELINE_END: u64 = 1 << 62;

/// The value of a word whose timeline has ended: it satisfies every wait, as words are compared by their signed difference
/// and a word is a base and a value, both below [`TIMELINE_END`].
pub(crate) const ENDED: u64 = i64::MAX as u64;

/// The value of [`Word::Ready`], above its base, when the bytes are ready.
const READY: u64 = 1;

/// In [`Ends::at_end`] of a timeline that has not ended.
const NOT_ENDED: u64 = u64::MAX;

/// In [`Ends::uses`]: no operation touches the words any longer.
const SEALED: u32 = 1 << 31;

/// How long a wait on the host looks again and again before it begins to sleep, and its longest sleep.
const SPIN: Duration = Duration::from_micros(50);
const LONGEST_SLEEP: Duration = Duration::from_micros(200);

/// Two counters between an exporter and one of its importers: each side signals one and waits for the other.
///
/// For hand-overs that repeat: the exporter's stream signals that a buffer has been written, the importer's that it has
/// been read, and neither host waits. An importer takes it from its mapping
/// ([`Mapping::timeline`](crate::Mapping::timeline)), the exporter from its export
/// ([`Export::timelines`](crate::Export::timelines)). Clones are the same timeline.
///
/// A counter starts at 0, only grows, and stays below [`TIMELINE_END`].
///
/// # When the peer goes
///
/// When the other process dies, or its lease ends, the counter that it would have signalled is set to
/// [`TIMELINE_END`]: every stream that waits for it goes on, **also over memory that was never written**.
/// [`check`](Self::check) says whether that has happened; call it when the work behind a wait has finished, before its
/// result is used.
#[derive(Clone)]
pub struct Timeline {
    ends: Arc<Ends>,
}

/// Which process this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Exporter,
    Importer,
}

/// How a timeline ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The other process has ended.
    Died = 1,
    /// The lease has ended.
    Released = 2,
}

/// One process's part of a timeline.
pub(crate) struct Ends {
    pub(super) place: Place,
    side: Side,
    pub(super) backend: Arc<dyn DeviceIpc>,
    peer: u32,
    /// 0, or an [`End`].
    end: AtomicU8,
    /// The peer's process has ended, or its connection.
    peer_has_gone: AtomicBool,
    last_signalled: AtomicU64,
    /// The largest value that a stream of this process was made to wait for.
    awaited: AtomicU64,
    /// What the other side's counter was when the timeline ended here. What comes later counts no longer: streams may have
    /// gone on before it.
    at_end: AtomicU64,
    /// The largest value of the other side's counter that came after the end, and was replaced by [`ENDED`].
    after_end: AtomicU64,
    /// A stream was told to write [`Word::Ready`].
    ready_submitted: AtomicBool,
    /// This side's own counter was ended here, after everything that was signalled had arrived.
    finished: AtomicBool,
    /// Everything that the peer has signalled had arrived when the timeline ended.
    peer_has_finished: AtomicBool,
    /// Operations in progress, or [`SEALED`].
    uses: AtomicU32,
    owner: Owner,
}

/// An operation on the words of a timeline: the slot is not given to another one meanwhile.
struct InUse<'a>(&'a Ends);

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        self.0.uses.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Timeline {
    pub(crate) fn new(place: Place, side: Side, backend: Arc<dyn DeviceIpc>, peer: u32) -> Self {
        let ends = Ends {
            place,
            side,
            backend,
            peer,
            end: AtomicU8::new(0),
            peer_has_gone: AtomicBool::new(false),
            last_signalled: AtomicU64::new(0),
            awaited: AtomicU64::new(0),
            at_end: AtomicU64::new(NOT_ENDED),
            after_end: AtomicU64::new(0),
            ready_submitted: AtomicBool::new(false),
            finished: AtomicBool::new(false),
            peer_has_finished: AtomicBool::new(false),
            uses: AtomicU32::new(0),
            owner: Owner::current(),
        };
        timeline_begun();
        Self { ends: Arc::new(ends) }
    }

    /// The timeline that this is one process's part of.
    pub(crate) const fn of(ends: Arc<Ends>) -> Self {
        Self { ends }
    }

    /// The other process's id, as the kernel tells it here; 0 for a process of another pid namespace.
    pub fn peer(&self) -> u32 {
        self.ends.peer
    }

    /// Sets this side's counter to `value` when the stream gets there. What the stream did before is then visible to
    /// whoever waits for it. Does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::TimelineValue`] for a value that is not above all earlier ones, or not below [`TIMELINE_END`];
    /// [`Error::ExporterGone`], [`Error::ImporterGone`] or [`Error::LeaseEnded`] where nobody waits any longer;
    /// [`Error::StreamCapturing`]; [`Error::Unsupported`] where the stream's device has no timelines.
    pub fn signal<M>(&self, value: u64, stream: &impl AsStream<M>) -> Result<()> {
        let ends = &*self.ends;
        ends.check_usable(stream.as_stream())?;
        let _in_use = ends.enter()?;
        ends.check()?;
        let before = ends.take_value(value)?;
        let signalled = ends.write_on(ends.outgoing(), value, stream.as_stream());
        if signalled.is_err() {
            // Nothing was submitted: the value may be used again.
            let _ = ends.last_signalled.compare_exchange(value, before, Ordering::AcqRel, Ordering::Relaxed);
        }
        signalled
    }

    /// Makes work that is submitted to the stream from now on wait until the other side's counter is at least `value`.
    /// Does not wait on the host.
    ///
    /// # Errors
    ///
    /// As [`signal`](Self::signal), also for a value that a peer which has gone had signalled before. Waits that were submitted
    /// before it went are let through.
    pub fn wait<M>(&self, value: u64, stream: &impl AsStream<M>) -> Result<()> {
        let ends = &*self.ends;
        ends.check_usable(stream.as_stream())?;
        check_range(value)?;
        let _in_use = ends.enter()?;
        ends.check()?;
        ends.wait_on(ends.incoming(), value, stream.as_stream())
    }

    /// As [`signal`](Self::signal), behind everything that was signalled in this way before, on whatever stream: no value
    /// overtakes another. `order` counts what has arrived; a peer can write this timeline's own words. Streams are not told
    /// apart, as a handle may name another stream by now.
    pub(crate) fn signal_in_turn(
        &self,
        value: u64,
        stream: BorrowedStream<'_>,
        order: &OwnCounter,
    ) -> Result<()> {
        self.ends.check_usable(stream)?;
        self.ends.check()?;
        order.wait_for_all(stream)?;
        self.signal(value, &stream)?;
        order.mark(value, stream);
        Ok(())
    }

    /// Sets this side's counter at once. Whoever waits sees what this thread did before, on the host.
    ///
    /// # Errors
    ///
    /// As [`signal`](Self::signal), of what concerns values and the peer.
    pub fn signal_now(&self, value: u64) -> Result<()> {
        let ends = &*self.ends;
        ends.owner.check()?;
        let _in_use = ends.enter()?;
        ends.check()?;
        ends.take_value(value)?;
        ends.word(ends.outgoing()).store(ends.place.base + value, Ordering::Release);
        Ok(())
    }

    /// The other side's counter, as the host sees it now.
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    pub fn value(&self) -> Result<u64> {
        let ends = &*self.ends;
        ends.owner.check()?;
        ends.check()?;
        let value = ends.read(ends.incoming());
        // The end may have come in between, and another lease may have the words by now.
        ends.check()?;
        if value >= TIMELINE_END { Err(ends.error()) } else { Ok(value) }
    }

    /// Waits on the host until the other side's counter is at least `value`.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]; [`Error::OnWorkerThread`] in a callback; as [`check`](Self::check).
    pub fn wait_now(&self, value: u64, timeout: Duration) -> Result<()> {
        check_range(value)?;
        let begin = Instant::now();
        loop {
            let reached = self.value()?;
            if reached >= value {
                return Ok(());
            }
            check_may_wait("Timeline::wait_now", timeout)?;
            let waited = begin.elapsed();
            if waited >= timeout {
                return Err(Error::Timeout {
                    what: format!("value {value} of the timeline"),
                    after: timeout,
                    detail: format!("; process {} has signalled {reached}", self.peer()),
                });
            }
            pause(waited, timeout);
        }
    }

    /// Is the other side still there? After its end every wait has been let through.
    ///
    /// # Errors
    ///
    /// [`Error::ExporterGone`] or [`Error::ImporterGone`] where the other process has ended, [`Error::LeaseEnded`] where
    /// the lease has.
    pub fn check(&self) -> Result<()> {
        self.ends.owner.check()?;
        self.ends.check()
    }

    /// The largest value that this side has signalled, or submitted to a stream.
    pub fn last_signalled(&self) -> u64 {
        self.ends.last_signalled.load(Ordering::Acquire)
    }

    /// Has everything arrived that this side has signalled, or submitted to a stream? The peer can write the word: only for
    /// counters of this process alone.
    pub(crate) fn has_arrived(&self) -> bool {
        self.ends.read(self.ends.outgoing()) >= self.last_signalled()
    }

    pub(crate) fn ends(&self) -> &Arc<Ends> {
        &self.ends
    }

    /// The stream waits until the exporter says that the bytes are ready.
    pub(crate) fn wait_ready_on(&self, stream: BorrowedStream<'_>) -> Result<()> {
        let ends = &*self.ends;
        ends.check_ready()?;
        if ends.is_ready() {
            return Ok(());
        }
        let _in_use = ends.enter()?;
        ends.wait_on(Word::Ready, READY, stream)
    }

    /// The host waits until the exporter says that the bytes are ready.
    pub(crate) fn wait_ready(&self, timeout: Duration) -> Result<()> {
        let begin = Instant::now();
        loop {
            self.ends.check_ready()?;
            if self.ends.is_ready() {
                return Ok(());
            }
            let waited = begin.elapsed();
            if waited >= timeout {
                return Err(Error::Timeout {
                    what: "the exporter's word that the bytes are ready".into(),
                    after: timeout,
                    detail: "; the stream that writes them has not got there yet".into(),
                });
            }
            pause(waited, timeout);
        }
    }

    /// In the exporter: the word is written when the event has been reached. Calls the driver; waits for nothing.
    pub(crate) fn signal_ready(&self, event: &dyn crate::backend::DeviceEvent) -> Result<()> {
        let ends = &*self.ends;
        let _in_use = ends.enter()?;
        ends.check()?;
        if ends.ready_submitted.load(Ordering::Acquire) {
            return Ok(());
        }
        let device = event.device();
        timelines_of(&*ends.backend, device)?;
        if event.query()? {
            ends.word(Word::Ready).store(ends.place.base + READY, Ordering::Release);
            return Ok(());
        }
        // A stream of its own, so that bytes that are ready early do not wait behind those that are late.
        let stream = ends.backend.memory().create_stream(device)?;
        event.wait_on(stream.as_borrowed())?;
        ends.write_on(Word::Ready, READY, stream.as_borrowed())?;
        ends.ready_submitted.store(true, Ordering::Release);
        Ok(())
    }
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timeline")
            .field("side", &self.ends.side)
            .field("peer", &self.ends.peer)
            .field("last_signalled", &self.last_signalled())
            .finish_non_exhaustive()
    }
}

impl Ends {
    fn outgoing(&self) -> Word {
        if self.side == Side::Exporter { Word::FromExporter } else { Word::FromImporter }
    }

    fn incoming(&self) -> Word {
        if self.side == Side::Exporter { Word::FromImporter } else { Word::FromExporter }
    }

    fn word(&self, word: Word) -> &AtomicU64 {
        self.place.page.word(self.place.slot, word)
    }

    /// A counter as this life of the slot counts it: [`TIMELINE_END`] where it has ended.
    fn read(&self, word: Word) -> u64 {
        self.value_of(self.word(word).load(Ordering::Acquire))
    }

    fn value_of(&self, word: u64) -> u64 {
        if word >= ENDED { TIMELINE_END } else { word.saturating_sub(self.place.base).min(TIMELINE_END) }
    }

    /// Holds the slot for an operation. An error where another lease may have it by now.
    fn enter(&self) -> Result<InUse<'_>> {
        let one_more = |uses| if uses & SEALED == 0 { Some(uses + 1) } else { None };
        match self.uses.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more) {
            Ok(_) => Ok(InUse(self)),
            Err(_) => Err(self.error()),
        }
    }

    /// Stores a word, unless another lease may have the slot by now.
    fn store(&self, word: Word, value: u64) {
        if let Ok(_in_use) = self.enter() {
            self.word(word).store(value, Ordering::Release);
        }
    }

    /// The stream writes the value when it reaches this point.
    fn write_on(&self, word: Word, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let Place { page, slot, base } = &self.place;
        let address = page.word_on(&self.backend, stream.device(), *slot, word)?;
        // SAFETY: the word lies in a page that is registered for the stream's device, and is only unregistered after the
        // device has been waited for.
        unsafe { timelines_of(&*self.backend, stream.device())?.write_value(address, base + value, stream) }
    }

    /// The stream waits for the value. It may reach the wait after the timeline has ended, so what was awaited is noted.
    fn wait_on(&self, word: Word, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let Place { page, slot, base } = &self.place;
        let address = page.word_on(&self.backend, stream.device(), *slot, word)?;
        let timelines = timelines_of(&*self.backend, stream.device())?;
        self.awaited.fetch_max(value, Ordering::AcqRel);
        page.note_awaited();
        // SAFETY: as in `write_on`.
        unsafe { timelines.wait_value(address, base + value, stream) }
    }

    fn check_usable(&self, stream: BorrowedStream<'_>) -> Result<()> {
        self.owner.check()?;
        check_backend("the stream", stream.backend(), self.backend.info().name)
    }

    fn check(&self) -> Result<()> {
        if self.end.load(Ordering::Acquire) == 0 { Ok(()) } else { Err(self.error()) }
    }

    /// Bytes that were ready stay so whatever becomes of the exporter.
    fn check_ready(&self) -> Result<()> {
        if self.read(Word::Ready) >= TIMELINE_END { Err(self.error()) } else { Ok(()) }
    }

    fn is_ready(&self) -> bool {
        self.read(Word::Ready) == READY
    }

    fn error(&self) -> Error {
        let pid = self.peer;
        match (self.end.load(Ordering::Acquire), self.side) {
            (died, Side::Importer) if died == End::Died as u8 => Error::ExporterGone { pid },
            (died, Side::Exporter) if died == End::Died as u8 => Error::ImporterGone { pid },
            _ => Error::LeaseEnded { pid },
        }
    }

    /// Notes the value if it is one that may come next; the one before.
    fn take_value(&self, value: u64) -> Result<u64> {
        check_range(value)?;
        let grown = |last| (value > last).then_some(value);
        let taken = self.last_signalled.fetch_update(Ordering::AcqRel, Ordering::Acquire, grown);
        taken.map_err(|last| Error::TimelineValue {
            value,
            why: format!("{last} was signalled before, and waiters rely on values that grow"),
        })
    }

    /// Lets every waiter of this process through, and says why from now on. A signal of the peer that is still on its way
    /// would take that back: [`poison`](Self::poison) is called again for a while.
    pub(crate) fn end(&self, how: End) {
        if how == End::Died {
            self.peer_has_gone.store(true, Ordering::Release);
        }
        let in_use = self.enter();
        if self.end.compare_exchange(0, how as u8, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return;
        }
        let last = match &in_use {
            Ok(_) if self.owner.is_here() => self.word(self.incoming()).swap(ENDED, Ordering::AcqRel),
            _ => self.place.base,
        };
        self.at_end.store(self.value_of(last), Ordering::Release);
        drop(in_use);
        if self.owner.is_here() {
            self.poison();
            timeline_ended();
        }
    }

    /// Ends the words that this process waits for, again, unless another lease has them by now.
    pub(crate) fn poison(&self) {
        if !self.owner.is_here() {
            return;
        }
        let Ok(_in_use) = self.enter() else { return };
        let before = self.word(self.incoming()).swap(ENDED, Ordering::AcqRel);
        if before < ENDED {
            self.after_end.fetch_max(self.value_of(before), Ordering::AcqRel);
        }
        if self.side == Side::Importer {
            // Bytes that were ready stay so.
            let base = self.place.base;
            let _ = self.word(Word::Ready).compare_exchange(base, ENDED, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// May the words that streams of this process wait for be written by the peer after the end? Then they have to be ended
    /// again for a while.
    pub(crate) fn needs_poison(&self) -> bool {
        self.awaited.load(Ordering::Acquire) > 0 && !self.peer_has_finished.load(Ordering::Acquire)
    }

    /// Can no operation touch the words any longer?
    pub(crate) fn is_sealed(&self) -> bool {
        self.uses.load(Ordering::Acquire) & SEALED != 0
    }

    /// The other side's counter at the end, with what came later.
    fn seen_at_end(&self) -> u64 {
        let at_end = self.at_end.load(Ordering::Acquire);
        let at_end = if at_end == NOT_ENDED { 0 } else { at_end };
        at_end.max(self.after_end.load(Ordering::Acquire))
    }

    /// The importer's report on a timeline that has ended, after which it does not touch the words any longer. `None` while
    /// a thread is in the middle of an operation.
    pub(crate) fn report(&self) -> Option<Returned> {
        self.uses.compare_exchange(0, SEALED, Ordering::AcqRel, Ordering::Acquire).ok()?;
        Some(Returned {
            awaited: self.awaited.load(Ordering::Acquire),
            signalled: self.last_signalled(),
            seen: self.seen_at_end(),
        })
    }

    fn last_signalled(&self) -> u64 {
        self.last_signalled.load(Ordering::Acquire)
    }

    /// In the exporter: the importer has returned its slot, and submits nothing more.
    fn peer_has_finished(&self, returned: &Returned) {
        if self.has_arrived(Word::FromImporter, returned.signalled, self.seen_at_end()) {
            self.peer_has_finished.store(true, Ordering::Release);
        }
    }

    /// Has the last value that a side has submitted been written? Either that is in the word, or it was when `seen` was
    /// read and replaced.
    fn has_arrived(&self, word: Word, last: u64, seen: u64) -> bool {
        last == 0
            || seen >= last
            || self.word(word).load(Ordering::Acquire) == self.place.base.saturating_add(last)
    }

    /// In the exporter: seals a slot that the importer has returned, once nothing touches its words any longer (see
    /// [`slots`]), and ends them. The base of its next life.
    fn settle(&self, returned: &Returned) -> Option<u64> {
        let quiet = || {
            let own = self.finished.load(Ordering::Acquire)
                || self.has_arrived(Word::FromExporter, self.last_signalled(), returned.seen);
            let ready =
                !self.ready_submitted.load(Ordering::Acquire) || self.has_arrived(Word::Ready, READY, 0);
            let peers = self.has_arrived(Word::FromImporter, returned.signalled, self.seen_at_end());
            self.end.load(Ordering::Acquire) != 0 && own && ready && peers
        };
        if !quiet() || self.uses.compare_exchange(0, SEALED, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return None;
        }
        if !quiet() {
            // An operation has ended in between.
            self.uses.store(0, Ordering::Release);
            return None;
        }
        self.place.end_life();
        let awaited = self.awaited.load(Ordering::Acquire).max(returned.awaited).max(READY);
        Some(self.place.base.saturating_add(awaited))
    }

    pub(crate) fn place(&self) -> &Place {
        &self.place
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        if self.end.load(Ordering::Acquire) == 0 && self.owner.is_here() {
            timeline_ended();
        }
    }
}

impl fmt::Debug for Ends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ends")
            .field("slot", &self.place.slot)
            .field("side", &self.side)
            .finish_non_exhaustive()
    }
}

fn check_range(value: u64) -> Result<()> {
    if value < TIMELINE_END {
        return Ok(());
    }
    Err(Error::TimelineValue { value, why: "values are below 2^62, which marks the end".into() })
}

/// A moment of a wait on the host: spins at first.
pub(crate) fn pause(waited: Duration, timeout: Duration) {
    if waited < SPIN {
        std::hint::spin_loop();
    } else {
        std::thread::sleep((waited / 8).min(LONGEST_SLEEP).min(timeout - waited));
    }
}
