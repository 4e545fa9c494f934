//! What a ring asks of a lease's words beyond the two counters: where a reader begins, how many publications there will have
//! been, and a counter that one side ends for itself.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::page::Word;
use super::{End, NOT_ENDED, Side, TIMELINE_END, Timeline, WordPage};
use crate::backend::DeviceIpc;
use crate::error::Result;
use crate::stream::BorrowedStream;

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
        let word = self.ends.page.word(self.ends.slot, Word::Start);
        word.store(sequence.saturating_add(1).min(DISMISSED - 1), Ordering::Release);
    }

    /// Tells the reader that the writer goes on without it, before it does.
    pub(crate) fn tell_dismissed(&self) {
        self.ends.page.word(self.ends.slot, Word::Start).store(DISMISSED, Ordering::Release);
    }

    /// Tells the reader that there will have been so many publications, and no more.
    pub(crate) fn tell_total(&self, sequences: u64) {
        let word = self.ends.page.word(self.ends.slot, Word::Total);
        word.store(sequences.saturating_add(1), Ordering::Release);
    }

    /// Ends this side's own counter for those who wait for more than will come, once it has come to `least` and everything
    /// has arrived; at the timeline's end without the first. Is there nothing left to do?
    pub(crate) fn finish_if_arrived(&self, least: u64) -> bool {
        let ends = &*self.ends;
        let own = ends.page.word(ends.slot, ends.outgoing());
        let end = ends.end.load(Ordering::Acquire);
        if self.has_arrived() && (end != 0 || own.load(Ordering::Acquire) >= least) {
            own.store(TIMELINE_END, Ordering::Release);
            return true;
        }
        end == End::Died as u8
    }
}

/// In the reader.
impl Timeline {
    /// Where this reader begins.
    pub(crate) fn start(&self) -> RingStart {
        match self.ends.page.word(self.ends.slot, Word::Start).load(Ordering::Acquire) {
            0 => RingStart::None,
            DISMISSED.. => RingStart::Dismissed,
            told => RingStart::At(told - 1),
        }
    }

    /// How many publications there will have been, once the writer has closed the ring.
    pub(crate) fn total(&self) -> Option<u64> {
        self.ends.page.word(self.ends.slot, Word::Total).load(Ordering::Acquire).checked_sub(1)
    }
}

/// On either side.
impl Timeline {
    /// What the host sees of the other side's counter. One plain load where the timeline has not ended.
    pub(crate) fn seen(&self) -> Seen {
        let ends = &*self.ends;
        let value = ends.page.word(ends.slot, ends.incoming()).load(Ordering::Acquire);
        // The end may have come in between: the counter of that moment is what counts.
        if ends.end.load(Ordering::Acquire) == 0 {
            return Seen::Live(value);
        }
        let at_end = ends.at_end.load(Ordering::Acquire);
        Seen::Ended(if at_end == NOT_ENDED { 0 } else { at_end })
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
        self.ends.page.word(self.ends.slot, self.ends.outgoing()).load(Ordering::Acquire) >= value
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
        ends.submit(ends.outgoing(), stream, |timelines, word, stream| wait(timelines, word, value, stream))
    }
}

/// Of this process alone.
impl Timeline {
    /// A counter that nobody else sees: it orders streams of this process among each other.
    pub(crate) fn own(backend: &Arc<dyn DeviceIpc>) -> Result<Self> {
        let place = (WordPage::create()?, 0);
        Ok(Self::new(place, Side::Exporter, Arc::clone(backend), std::process::id()))
    }
}

fn wait(
    timelines: &dyn crate::backend::DeviceTimelines,
    word: crate::DevicePtr,
    value: u64,
    stream: BorrowedStream<'_>,
) -> Result<()> {
    // SAFETY: the word lies in a page that is registered for the stream's device, and is only unregistered after the device
    // has been waited for.
    unsafe { timelines.wait_value(word, value, stream) }
}
