//! Timelines: counters that the streams of an exporter and of an importer write and wait on.
//!
//! Each lease has a slot of words in host memory that both processes map, and both register with their devices. A word
//! has one writer. The reasons for host memory stand at [`DeviceTimelines`](crate::DeviceTimelines): above all, a
//! stream that waits for a peer who has died is freed by a plain store, whatever the driver is doing.

#![allow(
    unsafe_code,
    reason = "addresses of registered words are handed to the backend while their page is held"
)]

mod page;
mod ring;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub(crate) use page::{SLOTS, Word, WordPage};

use crate::backend::DeviceIpc;
use crate::error::{Error, Result};
use crate::export::check_backend;
use crate::host_pages::{timeline_begun, timeline_ended};
use crate::process::Owner;
use crate::stream::{AsStream, BorrowedStream};
pub(crate) use page::timelines_of;
pub(crate) use ring::{RingStart, Seen};

/// Values of a timeline are below this one. A word that has reached it has ended.
pub const TIMELINE_END: u64 = 1 << 62;

/// What [`Word::Ready`] holds when the bytes are.
const READY: u64 = 1;

/// In [`Ends::at_end`] of a timeline that has not ended.
const NOT_ENDED: u64 = u64::MAX;

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
    page: Arc<WordPage>,
    slot: u32,
    side: Side,
    backend: Arc<dyn DeviceIpc>,
    peer: u32,
    /// 0, or an [`End`].
    end: AtomicU8,
    last_signalled: AtomicU64,
    /// What the other side's counter was when the timeline ended here. What comes later counts no longer: streams may have
    /// gone on before it.
    at_end: AtomicU64,
    owner: Owner,
}

impl Timeline {
    pub(crate) fn new(
        (page, slot): (Arc<WordPage>, u32),
        side: Side,
        backend: Arc<dyn DeviceIpc>,
        peer: u32,
    ) -> Self {
        let ends = Ends {
            page,
            slot,
            side,
            backend,
            peer,
            end: AtomicU8::new(0),
            last_signalled: AtomicU64::new(0),
            at_end: AtomicU64::new(NOT_ENDED),
            owner: Owner::current(),
        };
        timeline_begun();
        Self { ends: Arc::new(ends) }
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
        ends.check()?;
        let before = ends.take_value(value)?;
        let signalled = ends.submit(ends.outgoing(), stream.as_stream(), |timelines, word, stream| {
            // SAFETY: the word lies in a page that is registered for the stream's device, and is only unregistered
            // after the device has been waited for.
            unsafe { timelines.write_value(word, value, stream) }
        });
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
        ends.check()?;
        ends.submit(ends.incoming(), stream.as_stream(), |timelines, word, stream| {
            // SAFETY: as in `signal`.
            unsafe { timelines.wait_value(word, value, stream) }
        })
    }

    /// As [`signal`](Self::signal), behind all values that were signalled before, whatever stream they were submitted to: none
    /// overtakes another. Whether it is the same stream is not asked, as a handle may name another stream by now.
    pub(crate) fn signal_in_turn(&self, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let ends = &*self.ends;
        ends.check_usable(stream)?;
        ends.check()?;
        if !self.has_arrived() {
            let before = self.last_signalled();
            ends.submit(ends.outgoing(), stream, |timelines, word, stream| {
                // SAFETY: as in `signal`.
                unsafe { timelines.wait_value(word, before, stream) }
            })?;
        }
        self.signal(value, &stream)
    }

    /// Sets this side's counter at once. Whoever waits sees what this thread did before, on the host.
    ///
    /// # Errors
    ///
    /// As [`signal`](Self::signal), of what concerns values and the peer.
    pub fn signal_now(&self, value: u64) -> Result<()> {
        let ends = &*self.ends;
        ends.owner.check()?;
        ends.check()?;
        ends.take_value(value)?;
        ends.page.word(ends.slot, ends.outgoing()).store(value, Ordering::Release);
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
        let value = ends.page.word(ends.slot, ends.incoming()).load(Ordering::Acquire);
        // The end may have come in between.
        if value >= TIMELINE_END { Err(ends.error()) } else { Ok(value) }
    }

    /// Waits on the host until the other side's counter is at least `value`.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]; as [`check`](Self::check).
    pub fn wait_now(&self, value: u64, timeout: Duration) -> Result<()> {
        check_range(value)?;
        let begin = Instant::now();
        loop {
            let reached = self.value()?;
            if reached >= value {
                return Ok(());
            }
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

    /// Has everything arrived that this side has signalled, or submitted to a stream?
    pub(crate) fn has_arrived(&self) -> bool {
        let ends = &*self.ends;
        ends.page.word(ends.slot, ends.outgoing()).load(Ordering::Acquire) >= self.last_signalled()
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
        ends.submit(Word::Ready, stream, |timelines, word, stream| {
            // SAFETY: as in `signal`.
            unsafe { timelines.wait_value(word, READY, stream) }
        })
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
        let device = event.device();
        timelines_of(&*ends.backend, device)?;
        // A stream of its own, so that bytes that are ready early do not wait behind those that are late.
        let stream = ends.backend.memory().create_stream(device)?;
        event.wait_on(stream.as_borrowed())?;
        ends.submit(Word::Ready, stream.as_borrowed(), |timelines, word, stream| {
            // SAFETY: as in `signal`.
            unsafe { timelines.write_value(word, READY, stream) }
        })
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

    fn submit(
        &self,
        word: Word,
        stream: BorrowedStream<'_>,
        what: impl FnOnce(
            &dyn crate::backend::DeviceTimelines,
            crate::DevicePtr,
            BorrowedStream<'_>,
        ) -> Result<()>,
    ) -> Result<()> {
        let address = self.page.word_on(&self.backend, stream.device(), self.slot, word)?;
        what(timelines_of(&*self.backend, stream.device())?, address, stream)
    }

    fn check_usable(&self, stream: BorrowedStream<'_>) -> Result<()> {
        self.owner.check()?;
        check_backend("the stream", stream.backend(), self.backend.info().name)
    }

    fn check(&self) -> Result<()> {
        if self.end.load(Ordering::Acquire) == 0 { Ok(()) } else { Err(self.error()) }
    }

    /// What was ready stays so whatever becomes of the exporter.
    fn check_ready(&self) -> Result<()> {
        let poisoned = self.page.word(self.slot, Word::Ready).load(Ordering::Acquire) >= TIMELINE_END;
        if poisoned { Err(self.error()) } else { Ok(()) }
    }

    fn is_ready(&self) -> bool {
        self.page.word(self.slot, Word::Ready).load(Ordering::Acquire) == READY
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
        if self.owner.is_here() && self.end.load(Ordering::Acquire) == 0 {
            let last = self.page.word(self.slot, self.incoming()).swap(TIMELINE_END, Ordering::AcqRel);
            let _ = self.at_end.compare_exchange(NOT_ENDED, last, Ordering::AcqRel, Ordering::Relaxed);
        }
        let first = self.end.compare_exchange(0, how as u8, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        self.poison();
        if first && self.owner.is_here() {
            timeline_ended();
        }
    }

    /// Sets the words that this process waits for to their end.
    pub(crate) fn poison(&self) {
        if !self.owner.is_here() {
            return;
        }
        self.page.word(self.slot, self.incoming()).store(TIMELINE_END, Ordering::Release);
        if self.side == Side::Importer {
            // Bytes that were ready stay so.
            let ready = self.page.word(self.slot, Word::Ready);
            let _ = ready.compare_exchange(0, TIMELINE_END, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }

    pub(crate) fn page(&self) -> &Arc<WordPage> {
        &self.page
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
        f.debug_struct("Ends").field("slot", &self.slot).field("side", &self.side).finish_non_exhaustive()
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
