//! What a ring asks of a lease's words beyond the two counters: where a reader begins, how many publications there will have
//! been, and a counter that one side ends for itself.

use std::sync::atomic::Ordering;

use super::page::Word;
use super::{ENDED, NOT_ENDED, OwnCounter, TIMELINE_END, Timeline};
use crate::backend::stream::BorrowedStream;
use crate::model::error::Result;

/// What [`Word::Start`] holds for a reader that the writer goes on without.
const DISMISSED: u64 = TIMELINE_END;

/// Where a reader begins, as the writer has told it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RingStart {
    /// The writer has told nothing: it is none.
    None,
    /// With this sequence.
    At(u64),
    /// The writer goes on without it.
    Dismissed,
}

/// What the host sees of the other side's counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// The counter.
    Live(u64),
    /// The timeline has ended, and this is what the counter was then.
    Ended(u64),
}

/// In the writer.
impl Timeline {
    /// Tells the reader with which sequence it begins.
    pub(crate) fn tell_start(&self, sequence: u64) {
        self.ends.store(Word::Start, sequence.saturating_add(1).min(DISMISSED - 1));
    }

    /// Tells the reader that the writer goes on without it, before it does.
    pub(crate) fn tell_dismissed(&self) {
        self.ends.store(Word::Start, DISMISSED);
    }

    /// Tells the reader that there will have been so many publications, and no more.
    pub(crate) fn tell_total(&self, sequences: u64) {
        self.ends.store(Word::Total, sequences.saturating_add(1));
    }

    /// Ends this side's own counter for a reader that waits for more than will be published, once `least` has been signalled
    /// and everything has arrived; at the timeline's end without the first. Returns whether there is nothing left to do.
    /// `order` counts what has arrived; without it the host signals, and what is signalled has arrived.
    pub(crate) fn finish_if_arrived(&self, least: u64, order: Option<&OwnCounter>) -> bool {
        let ends = &*self.ends;
        if ends.peer_has_gone.load(Ordering::Acquire) {
            return true;
        }
        let Ok(_in_use) = ends.enter() else { return true };
        let due = ends.end.load(Ordering::Acquire) != 0 || self.last_signalled() >= least;
        if !due || !order.is_none_or(|order| order.has_arrived()) {
            return false;
        }
        ends.word(ends.outgoing()).store(ENDED, Ordering::Release);
        ends.finished.store(true, Ordering::Release);
        true
    }
}

/// In the reader.
impl Timeline {
    /// Where this reader begins.
    pub(crate) fn start(&self) -> RingStart {
        match self.ends.word(Word::Start).load(Ordering::Acquire) {
            0 => RingStart::None,
            DISMISSED.. => RingStart::Dismissed,
            told => RingStart::At(told - 1),
        }
    }

    /// How many publications there will have been, once the writer has closed the ring.
    pub(crate) fn total(&self) -> Option<u64> {
        self.ends.word(Word::Total).load(Ordering::Acquire).checked_sub(1)
    }
}

/// On either side.
impl Timeline {
    /// What the host sees of the other side's counter. One plain load where the timeline has not ended.
    pub(crate) fn seen(&self) -> Seen {
        let ends = &*self.ends;
        let value = ends.read(ends.incoming());
        // The end may have come in between: the counter of that moment is what counts.
        if ends.end.load(Ordering::Acquire) == 0 {
            return Seen::Live(value);
        }
        loop {
            match ends.at_end.load(Ordering::Acquire) {
                // Another thread is ending it just now.
                NOT_ENDED => std::thread::yield_now(),
                at_end => return Seen::Ended(at_end),
            }
        }
    }

    /// Signals when the stream gets there, and not before what was signalled on other streams has arrived. `same` where the
    /// stream is the one that signalled last.
    pub(crate) fn signal_behind(&self, value: u64, stream: BorrowedStream<'_>, same: bool) -> Result<()> {
        if !same {
            self.wait_for_own(value, stream)?;
        }
        self.signal(value, &stream)
    }

    /// Is this side's own counter at least `value`?
    pub(crate) fn has_come_to(&self, value: u64) -> bool {
        self.ends.read(self.ends.outgoing()) >= value
    }

    /// The stream waits until this side's own counter is `value`, or what it will be when everything has arrived that was
    /// signalled. No driver call where it is already.
    pub(crate) fn wait_for_own(&self, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        let ends = &*self.ends;
        ends.check_usable(stream)?;
        let value = value.min(self.last_signalled());
        if self.has_come_to(value) {
            return Ok(());
        }
        let _in_use = ends.enter()?;
        ends.wait_on(ends.outgoing(), value, stream)
    }
}
