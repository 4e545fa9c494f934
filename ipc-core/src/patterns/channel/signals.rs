//! The signals that the tensors of messages are ready: one counter of each end, which its streams write.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::counters::{SharedCounters, Slot};
use crate::backend::stream::BorrowedStream;
use crate::backend::{DeviceIpc, timelines_of};
use crate::model::error::Result;
use crate::sharing::RuntimeRef;
use crate::sharing::timeline::{ENDED, OwnCounter, Poison, Termination, Timeline};

/// The counters of both ends, from the view of one.
pub(super) struct ReadySignals {
    counters: SharedCounters,
    backend: Arc<dyn DeviceIpc>,
    /// The peer's process id.
    peer: u32,
    /// Created on its first use by a stream: registering pages with devices is expensive.
    timeline: Mutex<Option<Timeline>>,
    /// Counts the arrived signals of this end. The shared words cannot be trusted, because the peer can write them.
    order: OnceLock<Arc<OwnCounter>>,
    /// The value of the peer's counter when the peer's process or its socket terminated. Set under the lock of `timeline`, so that
    /// either the thread that creates the timeline or the poller ends it.
    at_end: OnceLock<u64>,
}

impl ReadySignals {
    pub(super) fn new(counters: SharedCounters, backend: Arc<dyn DeviceIpc>, peer: u32) -> Self {
        let (timeline, order, at_end) = (Mutex::new(None), OnceLock::new(), OnceLock::new());
        Self { counters, backend, peer, timeline, order, at_end }
    }

    /// Returns whether streams of the device can signal and wait; the host waits otherwise.
    pub(super) fn are_supported_by(&self, stream: BorrowedStream<'_>) -> bool {
        timelines_of(&*self.backend, stream.device()).is_ok()
    }

    /// Makes the stream write the next value of this end's counter, after the signals of other streams. One thread at a time.
    pub(super) fn signal(&self, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let order = match self.order.get() {
            Some(order) => order,
            None => {
                let created = OwnCounter::new(&self.backend)?;
                self.order.get_or_init(|| created)
            }
        };
        self.timeline().signal_in_turn(value, stream, order)
    }

    /// Makes the stream wait until the peer's counter has reached a value.
    pub(super) fn wait_on_stream(&self, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        self.timeline().wait(value, &stream)
    }

    /// Returns whether the peer's counter has reached a value, or `None` if it never will.
    pub(super) fn have_reached(&self, value: u64) -> Option<bool> {
        if value == 0 {
            return Some(true);
        }
        let now = self.counters.peers(Slot::Ready).load(Ordering::Acquire);
        match self.at_end.get() {
            Some(reached) => (*reached >= value).then_some(true),
            None => (now < ENDED).then_some(now >= value),
        }
    }

    /// Returns the order of this end's signals if some have not arrived.
    pub(super) fn unfinished(&self) -> Option<&Arc<OwnCounter>> {
        self.order.get().filter(|order| !order.has_arrived())
    }

    /// Returns whether the peer's process or its socket has terminated.
    pub(super) fn have_ended(&self) -> bool {
        self.at_end.get().is_some()
    }

    /// Ends the peer's counter, as the peer's process or its socket has terminated. Returns `false` if it has been ended before.
    pub(super) fn end(&self, runtime: RuntimeRef) -> bool {
        let timeline = {
            let timeline = self.timeline.lock().unwrap_or_else(PoisonError::into_inner);
            let reached = self.counters.peers(Slot::Ready).load(Ordering::Acquire);
            if self.at_end.set(if reached < ENDED { reached } else { 0 }).is_err() {
                return false;
            }
            timeline.clone()
        };
        if let Some(timeline) = timeline {
            timeline.endpoint().end(Termination::Died);
            if let Some(runtime) = runtime.here()
                && timeline.endpoint().needs_poison()
            {
                runtime.poller.poison_again(Poison::Timeline(Arc::clone(timeline.endpoint())));
            }
        }
        true
    }

    fn timeline(&self) -> Timeline {
        let mut timeline = self.timeline.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*timeline {
            return known.clone();
        }
        let (place, side) = (self.counters.ready_place(), self.counters.side());
        let begun = Timeline::new(place, side, Arc::clone(&self.backend), self.peer);
        if self.have_ended() {
            begun.endpoint().end(Termination::Died);
        }
        timeline.insert(begun).clone()
    }
}
