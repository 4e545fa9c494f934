//! One process's endpoint of a timeline: its words, and its termination.
//!
//! # Protocol
//!
//! The threads of a process share an endpoint. The peer and the devices see the words only, and may write anything to those that
//! they can write, so an endpoint keeps its own record:
//!
//! | field | written | read |
//! |---|---|---|
//! | `uses` | by each operation on the words, at its begin and its end; by `report` and `settle`, from 0 to `SEALED` | by each operation |
//! | `end` | once, by the first `end` | by each operation, after its begin; by `value` and `seen`, after the word |
//! | `at_end` | once, by the same call | by `seen`, which waits for it; by `seen_at_end` |
//! | `after_end` | by `poison`, with each value that it replaces | by `seen_at_end` |
//! | `last_signalled`, `awaited` | before a signal or a wait is submitted | by `settle`, `report`; `awaited` by `needs_poison` |
//! | `ready_submitted`, `finished` | after the operation that they name | by `settle` |
//! | `peer_has_gone` | by `end` | by `finish_if_arrived`, which then has no reader to end the counter for |
//! | `peer_has_finished` | by the exporter, when the importer has returned the slot | by `needs_poison` |
//!
//! Three pairs order them:
//!
//! *Operations and the seal, by `uses`.* The end of an operation releases, and the exchange of 0 for `SEALED` acquires. So the thread
//! that seals sees all that operations have stored and noted, and no operation begins later: the slot may have a new life.
//! `settle` evaluates its conditions before the seal, as a seal is final for the importer's threads, and again after it.
//!
//! *The end and its word.* `end` is stored before the incoming word is replaced by [`ENDED`], by a release that a read of the word
//! acquires. So a thread that reads a word, and then finds no end, has read neither that `ENDED` nor a word of a later life.
//!
//! *Waits and the poison.* After the peer's termination its device may still write a lower value over `ENDED`, and a stream that waits
//! would wait for ever, so the poller stores `ENDED` again for a while, where a stream waits. A wait notes its value, issues a
//! fence and checks for the end again; `needs_poison` issues a fence, after the end, and reads that value. At least one of them
//! observes the other: the wait is not submitted, or the word is poisoned again.

#![allow(
    unsafe_code,
    reason = "addresses of registered words are handed to the backend while their page is held"
)]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

use super::Returned;
use super::page::{ENDED, Side, TIMELINE_END, TimelineSlot, Word, check_range};
use crate::backend::stream::BorrowedStream;
use crate::backend::{DeviceIpc, check_backend, timelines_of};
use crate::model::error::{Error, Result};
use crate::os::process::Owner;
use crate::sharing::host_pages::timeline_ended;

/// The value of [`Word::Ready`], above its base, when the bytes are ready.
pub(super) const READY: u64 = 1;

/// The value of [`Endpoint::at_end`] of a timeline that has not ended.
pub(super) const NOT_ENDED: u64 = u64::MAX;

/// A bit of [`Endpoint::uses`]: no operation touches the words any longer.
const SEALED: u32 = 1 << 31;

/// The reason for which a timeline ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Termination {
    /// The peer's process has terminated.
    Died = 1,
    /// The lease has ended.
    Released = 2,
    /// The peer's process has exited in order: its device work with the memory has completed.
    Exited = 3,
}

impl Termination {
    /// Returns whether the peer's process no longer exists.
    pub(crate) const fn has_gone(self) -> bool {
        matches!(self, Self::Died | Self::Exited)
    }
}

/// One process's endpoint of a timeline.
pub(crate) struct Endpoint {
    pub(super) place: TimelineSlot,
    pub(super) side: Side,
    pub(super) backend: Arc<dyn DeviceIpc>,
    pub(super) peer: u32,
    /// 0, or a [`Termination`].
    pub(super) end: AtomicU8,
    /// The peer's process has terminated, or its connection has closed.
    pub(super) peer_has_gone: AtomicBool,
    pub(super) last_signalled: AtomicU64,
    /// Largest value that a stream of this process was made to wait for.
    pub(super) awaited: AtomicU64,
    /// The peer's counter when the timeline ended here. Later values do not count: streams may have continued before them.
    pub(super) at_end: AtomicU64,
    /// Largest value of the peer's counter that arrived after the end, and was replaced by [`ENDED`].
    pub(super) after_end: AtomicU64,
    /// A write of [`Word::Ready`] was submitted to a stream.
    pub(super) ready_submitted: AtomicBool,
    /// This side's own counter was ended here, after all its signals had arrived.
    pub(super) finished: AtomicBool,
    /// All signals of the peer had arrived when the timeline ended.
    pub(super) peer_has_finished: AtomicBool,
    /// Operations in progress, or [`SEALED`].
    pub(super) uses: AtomicU32,
    pub(super) owner: Owner,
}

/// An operation on the words of a timeline, during which the slot is not reused.
pub(super) struct Operation<'a>(&'a Endpoint);

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        self.0.uses.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Endpoint {
    pub(super) fn new(place: TimelineSlot, side: Side, backend: Arc<dyn DeviceIpc>, peer: u32) -> Self {
        Self {
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
        }
    }

    pub(super) fn outgoing(&self) -> Word {
        if self.side == Side::Exporter { Word::FromExporter } else { Word::FromImporter }
    }

    pub(super) fn incoming(&self) -> Word {
        if self.side == Side::Exporter { Word::FromImporter } else { Word::FromExporter }
    }

    pub(super) fn word(&self, word: Word) -> &AtomicU64 {
        self.place.page.word(self.place.slot, word)
    }

    /// Reads a counter relative to the base of this life of the slot: [`TIMELINE_END`] where it has ended.
    pub(super) fn read(&self, word: Word) -> u64 {
        self.value_of(self.word(word).load(Ordering::Acquire))
    }

    pub(super) fn value_of(&self, word: u64) -> u64 {
        if word >= ENDED { TIMELINE_END } else { word.saturating_sub(self.place.base).min(TIMELINE_END) }
    }

    /// Begins an operation. An error where another lease may use the slot by now.
    pub(super) fn enter(&self) -> Result<Operation<'_>> {
        let one_more = |uses| if uses & SEALED == 0 { Some(uses + 1) } else { None };
        match self.uses.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more) {
            Ok(_) => Ok(Operation(self)),
            Err(_) => Err(self.error()),
        }
    }

    /// Stores a word, unless another lease may use the slot by now.
    pub(super) fn store(&self, word: Word, value: u64) {
        if let Ok(_in_use) = self.enter() {
            self.word(word).store(value, Ordering::Release);
        }
    }

    /// Makes the stream write the value when it reaches this point.
    pub(super) fn write_on(&self, word: Word, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let TimelineSlot { page, slot, base } = &self.place;
        let address = page.word_on(&self.backend, stream.device(), *slot, word)?;
        // SAFETY: the word lies in a page that is registered for the stream's device, and is only unregistered after the
        // device has been waited for.
        unsafe { timelines_of(&*self.backend, stream.device())?.write_value(address, base + value, stream) }
    }

    /// Makes the stream wait for the value. It may reach the wait after the timeline has ended, so the value is noted.
    ///
    /// # Errors
    ///
    /// That of [`check`](Self::check) or [`check_ready`](Self::check_ready) if the timeline has ended meanwhile.
    pub(super) fn wait_on(&self, word: Word, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let TimelineSlot { page, slot, base } = &self.place;
        let address = page.word_on(&self.backend, stream.device(), *slot, word)?;
        let timelines = timelines_of(&*self.backend, stream.device())?;
        self.awaited.fetch_max(value, Ordering::AcqRel);
        page.note_awaited();
        fence(Ordering::SeqCst);
        if word == Word::Ready {
            // Bytes that were ready stay so after the end.
            self.check_ready()?;
        } else if word == self.incoming() {
            self.check()?;
        }
        // SAFETY: as in `write_on`.
        unsafe { timelines.wait_value(address, base + value, stream) }
    }

    pub(super) fn check_usable(&self, stream: BorrowedStream<'_>) -> Result<()> {
        self.owner.check()?;
        check_backend("the stream", stream.backend(), self.backend.info().name)
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.end.load(Ordering::Acquire) == 0 { Ok(()) } else { Err(self.error()) }
    }

    /// Checks that the exporter may still write the ready word. Bytes that were ready stay ready, whatever the exporter does.
    pub(super) fn check_ready(&self) -> Result<()> {
        if self.read(Word::Ready) >= TIMELINE_END { Err(self.error()) } else { Ok(()) }
    }

    pub(super) fn is_ready(&self) -> bool {
        self.read(Word::Ready) == READY
    }

    pub(super) fn error(&self) -> Error {
        let (pid, end) = (self.peer, self.end.load(Ordering::Acquire));
        let has_gone = end == Termination::Died as u8 || end == Termination::Exited as u8;
        match self.side {
            Side::Importer if has_gone => Error::ExporterGone { pid },
            Side::Exporter if has_gone => Error::ImporterGone { pid },
            _ => Error::LeaseEnded { pid },
        }
    }

    /// Notes a value to signal, where it may come next. Returns the one before.
    pub(super) fn take_value(&self, value: u64) -> Result<u64> {
        check_range(value)?;
        let grown = |last| (value > last).then_some(value);
        let taken = self.last_signalled.fetch_update(Ordering::AcqRel, Ordering::Acquire, grown);
        taken.map_err(|last| {
            let why = format!("{last} was signalled before, and waiters rely on values that grow");
            Error::invalid_input(format!("timeline value {value}"), why)
        })
    }

    /// Ends the timeline here: every wait of this process is satisfied, and later calls return the reason. A signal of the peer
    /// that is still in flight would undo that, so [`poison`](Self::poison) is called again for a while.
    pub(crate) fn end(&self, how: Termination) {
        if how.has_gone() {
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

    /// Ends the words that this process waits for again, unless another lease uses them by now.
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

    /// Returns whether the peer may still write words that streams of this process wait for, so that they have to be poisoned again
    /// for a while.
    pub(crate) fn needs_poison(&self) -> bool {
        fence(Ordering::SeqCst);
        self.awaited.load(Ordering::Acquire) > 0 && !self.peer_has_finished.load(Ordering::Acquire)
    }

    /// Returns whether no operation can touch the words any longer.
    pub(crate) fn is_sealed(&self) -> bool {
        self.uses.load(Ordering::Acquire) & SEALED != 0
    }

    /// Returns the peer's counter at the end, or a later value.
    pub(super) fn seen_at_end(&self) -> u64 {
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

    pub(super) fn last_signalled(&self) -> u64 {
        self.last_signalled.load(Ordering::Acquire)
    }

    /// Notes in the exporter that the importer has returned its slot, and submits nothing more.
    pub(super) fn peer_has_finished(&self, returned: &Returned) {
        if self.has_arrived(Word::FromImporter, returned.signalled, self.seen_at_end()) {
            self.peer_has_finished.store(true, Ordering::Release);
        }
    }

    /// Returns whether the last value that a side has submitted has been written: it is in the word, or was when `seen` was read and
    /// replaced.
    pub(super) fn has_arrived(&self, word: Word, last: u64, seen: u64) -> bool {
        last == 0
            || seen >= last
            || self.word(word).load(Ordering::Acquire) == self.place.base.saturating_add(last)
    }

    /// In the exporter: seals a slot that the importer has returned, once nothing touches its words any longer (see
    /// [`slots`](super::slots)), and ends them. Returns the base of its next life.
    pub(super) fn settle(&self, returned: &Returned) -> Option<u64> {
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
            // An operation has changed something in between.
            self.uses.store(0, Ordering::Release);
            return None;
        }
        self.place.end_life();
        let awaited = self.awaited.load(Ordering::Acquire).max(returned.awaited).max(READY);
        Some(self.place.base.saturating_add(awaited))
    }

    pub(crate) fn place(&self) -> &TimelineSlot {
        &self.place
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if self.end.load(Ordering::Acquire) == 0 && self.owner.is_here() {
            timeline_ended();
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("slot", &self.place.slot)
            .field("side", &self.side)
            .finish_non_exhaustive()
    }
}
