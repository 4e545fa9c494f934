//! The parts of a timeline that rings use beyond the two counters: the sequence at which a reader begins, the total number of
//! publications, and a counter that one side ends for itself.

use std::sync::atomic::Ordering;

use super::endpoint::NOT_ENDED;
use super::page::Word;
use super::{ENDED, OwnCounter, TIMELINE_END, Timeline};
use crate::backend::stream::BorrowedStream;
use crate::model::error::Result;

/// The value of [`Word::Start`] for a reader that the writer has dismissed.
const DISMISSED: u64 = TIMELINE_END;

/// The sequence at which a reader begins, as the writer has published it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RingStart {
    /// The peer has published no start: it does not share the memory as a ring.
    None,
    /// This sequence.
    At(u64),
    /// The writer has dismissed the reader.
    Dismissed,
}

/// The peer's counter, as the host sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// The counter.
    Live(u64),
    /// The timeline has ended; the counter at that time.
    Ended(u64),
}

/// The state of one sequence from the reader's view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Publication {
    Published,
    /// Not published yet.
    Pending,
    /// The writer closed the ring without publishing this sequence.
    Closed,
    /// The writer terminated without publishing this sequence.
    WriterGone,
    /// The writer has dismissed the reader: the slot may have been overwritten.
    Dismissed,
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

/// In the writer.
impl Timeline {
    /// Publishes the sequence at which the reader begins.
    pub(crate) fn store_start(&self, sequence: u64) {
        self.endpoint.store(Word::Start, sequence.saturating_add(1).min(DISMISSED - 1));
    }

    /// Notifies the reader that it is dismissed. The writer calls this before it reuses the slots that the reader holds.
    pub(crate) fn store_dismissed(&self) {
        self.endpoint.store(Word::Start, DISMISSED);
    }

    /// Publishes the total number of publications.
    pub(crate) fn store_total(&self, sequences: u64) {
        self.endpoint.store(Word::Total, sequences.saturating_add(1));
    }

    /// Ends this side's own counter for a reader that waits for more than will be published, once `least` has been signalled and
    /// all signals have arrived; after the timeline's end without the first condition. Returns whether there is nothing left to
    /// do. `order` counts the signals that have arrived; without it the host signals, and its signals arrive at once.
    pub(crate) fn finish_if_arrived(&self, least: u64, order: Option<&OwnCounter>) -> bool {
        let endpoint = &*self.endpoint;
        if endpoint.peer_has_gone.load(Ordering::Acquire) {
            return true;
        }
        let Ok(_in_use) = endpoint.enter() else { return true };
        let due = endpoint.end.load(Ordering::Acquire) != 0 || self.last_signalled() >= least;
        if !due || !order.is_none_or(|order| order.has_arrived()) {
            return false;
        }
        endpoint.word(endpoint.outgoing()).store(ENDED, Ordering::Release);
        endpoint.finished.store(true, Ordering::Release);
        true
    }
}

/// In the reader.
impl Timeline {
    /// Returns the sequence at which this reader begins.
    pub(crate) fn start(&self) -> RingStart {
        match self.endpoint.word(Word::Start).load(Ordering::Acquire) {
            0 => RingStart::None,
            DISMISSED.. => RingStart::Dismissed,
            published => RingStart::At(published - 1),
        }
    }

    /// Returns the state of a sequence.
    pub(crate) fn publication(&self, sequence: u64) -> Publication {
        let seen = self.seen();
        // Loaded after the counter: the writer marks the reader as dismissed before it ends the counter.
        if self.start() == RingStart::Dismissed {
            return Publication::Dismissed;
        }
        Publication::of(sequence, seen, self.total())
    }

    /// Returns the total number of publications, once the writer has closed the ring.
    pub(crate) fn total(&self) -> Option<u64> {
        self.endpoint.word(Word::Total).load(Ordering::Acquire).checked_sub(1)
    }
}

/// On either side.
impl Timeline {
    /// Returns the peer's counter, as the host sees it. One plain load where the timeline has not ended.
    pub(crate) fn seen(&self) -> Seen {
        let endpoint = &*self.endpoint;
        let value = endpoint.read(endpoint.incoming());
        // The timeline may have ended in between: the counter of that moment counts.
        if endpoint.end.load(Ordering::Acquire) == 0 {
            return Seen::Live(value);
        }
        loop {
            match endpoint.at_end.load(Ordering::Acquire) {
                // Another thread is ending it just now.
                NOT_ENDED => std::thread::yield_now(),
                at_end => return Seen::Ended(at_end),
            }
        }
    }

    /// Signals when the stream reaches this point and all signals of other streams have arrived. `same` where the stream is the one
    /// that signalled last.
    pub(crate) fn signal_behind(&self, value: u64, stream: BorrowedStream<'_>, same: bool) -> Result<()> {
        if !same {
            self.wait_for_own(value, stream)?;
        }
        self.signal(value, &stream)
    }

    /// Returns whether this side's own counter is at least `value`.
    pub(crate) fn has_come_to(&self, value: u64) -> bool {
        self.endpoint.read(self.endpoint.outgoing()) >= value
    }

    /// Makes the stream wait until this side's own counter is `value`, or until all signals have arrived. No driver call where it is
    /// already.
    pub(crate) fn wait_for_own(&self, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let endpoint = &*self.endpoint;
        endpoint.check_usable(stream)?;
        let value = value.min(self.last_signalled());
        if self.has_come_to(value) {
            return Ok(());
        }
        let _in_use = endpoint.enter()?;
        endpoint.wait_on(endpoint.outgoing(), value, stream)
    }
}

#[cfg(test)]
mod tests;
