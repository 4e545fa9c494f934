//! Timelines: counters that the streams of an exporter and of an importer write and wait on.
//!
//! Each lease has a slot of words in host memory that both processes map, and both register with their devices. A word
//! has one writer. The reasons for host memory are listed at [`DeviceTimelines`](crate::backend::DeviceTimelines): above all, a
//! stream that waits for a terminated peer is freed by a plain store, whatever the driver is doing.

mod endpoint;
mod follow_ups;
mod own;
mod page;
mod ring;
mod slots;

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

pub(crate) use crate::wire::Returned;
pub(crate) use endpoint::{Endpoint, Termination};
pub(crate) use follow_ups::{Finish, FollowUp, FollowUps, Poison};
pub(crate) use own::{OwnCounter, note_own_slot, return_own_slot, take_own_slot};
pub(crate) use page::{ENDED, SLOTS, Side, TIMELINE_END, TimelineSlot, Word, WordPage};
pub(crate) use slots::Slots;

use crate::backend::stream::{AsStream, BorrowedStream};
use crate::backend::{DeviceIpc, timelines_of};
use crate::model::error::{Error, Result};
use crate::os::wait_for_words;
use crate::sharing::host_pages::timeline_begun;
use crate::transport::check_may_wait;
pub(crate) use ring::{Publication, RingStart, Seen};

use endpoint::READY;
use page::check_range;

/// Two counters between an exporter and one of its importers: each side signals one and waits for the other.
///
/// For hand-overs that repeat: the exporter's stream signals that a buffer has been written, the importer's that it has
/// been read, and neither host waits. An importer takes it from its mapping
/// ([`Mapping::timeline`](crate::Mapping::timeline)), the exporter from its export
/// ([`Export::timelines`](crate::Export::timelines)). Clones are the same timeline.
///
/// A counter starts at 0, only grows, and stays below [`END`](Self::END).
///
/// # Termination of the peer
///
/// When the peer terminates, or the lease ends, the counter that the peer would have signalled is set to
/// [`END`](Self::END): every stream that waits for it continues, **also over memory that was never written**. A wait that is
/// submitted later succeeds only for a value that the peer had signalled before.
/// [`check`](Self::check) reports whether that has happened; call it when the work behind a wait has finished, before its
/// result is used.
///
/// # Examples
///
/// ```no_run
/// # fn read(mapping: &device_ipc_core::Mapping, stream: &device_ipc_core::Stream) -> device_ipc_core::Result<()> {
/// let timeline = mapping.timeline()?; // the exporter has the other end: `Export::timelines`
/// for round in 1.. {
///     timeline.wait(round, stream)?; // the stream waits until the exporter has written
///     // ... submit work that reads the memory ...
///     timeline.signal(round, stream)?; // the exporter may write again
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Timeline {
    endpoint: Arc<Endpoint>,
}

impl Timeline {
    /// The end of the range of values: every value is below it.
    pub const END: u64 = TIMELINE_END;

    pub(crate) fn new(place: TimelineSlot, side: Side, backend: Arc<dyn DeviceIpc>, peer: u32) -> Self {
        let endpoint = Endpoint::new(place, side, backend, peer);
        timeline_begun();
        Self { endpoint: Arc::new(endpoint) }
    }

    /// Returns the timeline of an endpoint.
    pub(crate) const fn of(endpoint: Arc<Endpoint>) -> Self {
        Self { endpoint }
    }

    /// Returns the peer's process id in this pid namespace; 0 for a process of another one.
    pub fn peer(&self) -> u32 {
        self.endpoint.peer
    }

    /// Sets this side's counter to `value` when the stream reaches this point. Earlier work of the stream is then visible to
    /// every waiter. Does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`] for a value that is not above all earlier ones, or not below [`END`](Self::END);
    /// [`Error::ExporterGone`], [`Error::ImporterGone`] or [`Error::LeaseEnded`] where the peer has terminated or the lease has ended;
    /// [`Error::StreamCapturing`]; [`Error::Unsupported`] where the stream's device has no timelines.
    pub fn signal<M>(&self, value: u64, stream: &impl AsStream<M>) -> Result<()> {
        let endpoint = &*self.endpoint;
        endpoint.check_usable(stream.as_stream())?;
        let _in_use = endpoint.enter()?;
        endpoint.check()?;
        let before = endpoint.take_value(value)?;
        let signalled = endpoint.write_on(endpoint.outgoing(), value, stream.as_stream());
        if signalled.is_err() {
            // Nothing was submitted: the value may be used again.
            let _ =
                endpoint.last_signalled.compare_exchange(value, before, Ordering::AcqRel, Ordering::Relaxed);
        }
        signalled
    }

    /// Makes work that is submitted to the stream from now on wait until the peer's counter is at least `value`.
    /// Does not wait on the host.
    ///
    /// # Errors
    ///
    /// As [`signal`](Self::signal), unless the peer had signalled the value before the timeline ended.
    pub fn wait<M>(&self, value: u64, stream: &impl AsStream<M>) -> Result<()> {
        let endpoint = &*self.endpoint;
        endpoint.check_usable(stream.as_stream())?;
        check_range(value)?;
        let submit = || {
            let _in_use = endpoint.enter()?;
            endpoint.check()?;
            endpoint.wait_on(endpoint.incoming(), value, stream.as_stream())
        };
        match submit() {
            Err(_) if self.peer_had_signalled(value) => Ok(()),
            submitted => submitted,
        }
    }

    /// Sets this side's counter at once. Earlier host work of this thread is visible to every waiter.
    ///
    /// # Errors
    ///
    /// As [`signal`](Self::signal), those about values and the peer.
    pub fn signal_now(&self, value: u64) -> Result<()> {
        let endpoint = &*self.endpoint;
        endpoint.owner.check()?;
        let _in_use = endpoint.enter()?;
        endpoint.check()?;
        endpoint.take_value(value)?;
        endpoint.word(endpoint.outgoing()).store(endpoint.place.base + value, Ordering::Release);
        Ok(())
    }

    /// Returns the peer's counter, as the host sees it now.
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    pub fn value(&self) -> Result<u64> {
        let endpoint = &*self.endpoint;
        endpoint.owner.check()?;
        endpoint.check()?;
        let value = endpoint.read(endpoint.incoming());
        // The timeline may have ended in between, and another lease may use the words by now.
        endpoint.check()?;
        if value >= TIMELINE_END { Err(endpoint.error()) } else { Ok(value) }
    }

    /// Waits on the host until the peer's counter is at least `value`.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]; [`Error::OnWorkerThread`] in a callback; as [`check`](Self::check), unless the peer had signalled the value
    /// before the timeline ended.
    pub fn wait_now(&self, value: u64, timeout: Duration) -> Result<()> {
        check_range(value)?;
        self.endpoint.owner.check()?;
        let reached = Cell::new(0);
        let holds = || {
            match self.value() {
                Err(_) if self.peer_had_signalled(value) => return Ok(true),
                seen => reached.set(seen?),
            }
            let holds = reached.get() >= value;
            if !holds {
                check_may_wait("waiting for a timeline", timeout)?;
            }
            Ok(holds)
        };
        wait_for_words(timeout, holds, || Error::Timeout {
            what: format!("value {value} of the timeline"),
            after: timeout,
            detail: format!("; process {} has signalled {}", self.peer(), reached.get()),
        })
    }

    /// Returns whether the timeline has ended, and the peer had signalled the value before.
    fn peer_had_signalled(&self, value: u64) -> bool {
        matches!(self.seen(), Seen::Ended(last) if (value..TIMELINE_END).contains(&last))
    }

    /// Checks that the timeline has not ended. The end satisfies every wait that was submitted before.
    ///
    /// # Errors
    ///
    /// [`Error::ExporterGone`] or [`Error::ImporterGone`] where the peer has terminated, [`Error::LeaseEnded`] where
    /// the lease has ended.
    pub fn check(&self) -> Result<()> {
        self.endpoint.owner.check()?;
        self.endpoint.check()
    }

    /// Returns the largest value that this side has signalled, or submitted to a stream.
    pub fn last_signalled(&self) -> u64 {
        self.endpoint.last_signalled.load(Ordering::Acquire)
    }

    /// Returns whether all signals of this side have arrived. The peer can write the word: only for counters of this process
    /// alone.
    pub(crate) fn has_arrived(&self) -> bool {
        self.endpoint.read(self.endpoint.outgoing()) >= self.last_signalled()
    }

    /// Returns this process's endpoint.
    pub(crate) fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    /// Returns whether the exporter has signalled that the bytes are ready.
    pub(crate) fn is_ready(&self) -> bool {
        self.endpoint.is_ready()
    }

    /// Makes the stream wait until the exporter signals that the bytes are ready.
    pub(crate) fn wait_ready_on(&self, stream: BorrowedStream<'_>) -> Result<()> {
        let endpoint = &*self.endpoint;
        endpoint.check_ready()?;
        if endpoint.is_ready() {
            return Ok(());
        }
        let _in_use = endpoint.enter()?;
        endpoint.wait_on(Word::Ready, READY, stream)
    }

    /// Waits on the host until the exporter signals that the bytes are ready.
    pub(crate) fn wait_ready(&self, timeout: Duration) -> Result<()> {
        let holds = || {
            self.endpoint.check_ready()?;
            Ok(self.endpoint.is_ready())
        };
        wait_for_words(timeout, holds, || Error::Timeout {
            what: "the exporter's signal that the bytes are ready".into(),
            after: timeout,
            detail: "; the stream that writes them has not reached it yet".into(),
        })
    }

    /// Writes the ready word, in the exporter, when the event has been reached. Calls the driver; does not wait.
    pub(crate) fn signal_ready(&self, event: &dyn crate::backend::DeviceEvent) -> Result<()> {
        let endpoint = &*self.endpoint;
        let _in_use = endpoint.enter()?;
        endpoint.check()?;
        if endpoint.ready_submitted.load(Ordering::Acquire) {
            return Ok(());
        }
        let device = event.device();
        timelines_of(&*endpoint.backend, device)?;
        if event.query()? {
            endpoint.word(Word::Ready).store(endpoint.place.base + READY, Ordering::Release);
            return Ok(());
        }
        // A dedicated stream, so that bytes that are ready early do not wait behind later ones.
        let stream = endpoint.backend.memory().create_stream(device)?;
        event.wait_on(stream.as_borrowed())?;
        endpoint.write_on(Word::Ready, READY, stream.as_borrowed())?;
        endpoint.ready_submitted.store(true, Ordering::Release);
        Ok(())
    }
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timeline")
            .field("side", &self.endpoint.side)
            .field("peer", &self.endpoint.peer)
            .field("last_signalled", &self.last_signalled())
            .finish_non_exhaustive()
    }
}
