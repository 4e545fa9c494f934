//! The slots that a reader has taken and released, in the order of sequences.
//!
//! The reader signals one number to the writer: all sequences below it are released. The release of a slot is therefore
//! signalled together with those of all older slots, after the streams of all of them.

use std::collections::VecDeque;

use super::writer::StreamKey;

/// The taken sequences whose release has not been signalled to the writer.
#[derive(Debug)]
pub(super) struct TakenSlots {
    /// The first of them, or the next sequence to take if there are none.
    first: u64,
    all: VecDeque<SlotState>,
}

/// The state of a taken sequence.
#[derive(Debug)]
pub(super) enum SlotState {
    /// The reader uses the slot.
    Held,
    /// The slot was dropped, and its release waits for the device.
    Dropped,
    /// The host signals the release when the stream reaches it.
    Pending,
    /// This stream releases the slot; the reader's own counter has this value when the stream reaches the release.
    ReleasedOn(StreamKey, u64),
    /// The slot is released, and no work is pending.
    Released,
}

impl TakenSlots {
    pub(super) const fn from(first: u64) -> Self {
        Self { first, all: VecDeque::new() }
    }

    pub(super) fn take(&mut self) {
        self.all.push_back(SlotState::Held);
    }

    /// Returns the first sequence whose release has not been signalled.
    pub(super) const fn first(&self) -> u64 {
        self.first
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Returns whether the reader uses the slot of this sequence.
    pub(super) fn is_held(&self, sequence: u64) -> bool {
        let at = sequence.checked_sub(self.first).and_then(|at| self.all.get(at as usize));
        matches!(at, Some(SlotState::Held))
    }

    /// Returns whether a dropped sequence waits for the device.
    pub(super) fn any_dropped(&self) -> bool {
        self.all.iter().any(|state| matches!(state, SlotState::Dropped))
    }

    pub(super) fn set(&mut self, sequence: u64, state: SlotState) {
        let at = sequence.checked_sub(self.first).and_then(|at| self.all.get_mut(at as usize));
        if let Some(at) = at {
            *at = state;
        }
    }

    /// Returns the sequences after the first whose release is signalled together with that of the first.
    pub(super) fn released_after_first(&self) -> impl Iterator<Item = &SlotState> {
        let is_released =
            |state: &&SlotState| matches!(state, SlotState::ReleasedOn(..) | SlotState::Released);
        self.all.iter().skip(1).take_while(is_released)
    }

    /// Removes the first sequence and `more` after it, whose releases have been signalled.
    pub(super) fn remove_signalled(&mut self, more: usize) {
        let count = (more + 1).min(self.all.len());
        self.all.drain(..count);
        self.first += count as u64;
    }

    /// Removes released sequences from the front and returns the first that remains.
    pub(super) fn remove_released(&mut self) -> u64 {
        while matches!(self.all.front(), Some(SlotState::Released)) {
            self.all.pop_front();
            self.first += 1;
        }
        self.first
    }
}

#[cfg(test)]
mod tests;
