//! What a reader has taken and released, in the order of sequences.
//!
//! The writer hears one number: how many sequences have been released from the first on. A slot that is released before an
//! older one is therefore told of together with that one, and behind the streams of both.

use std::collections::VecDeque;

use super::writer::StreamKey;

/// The sequences that a reader has taken, and of which the writer has not been told that they are released.
#[derive(Debug)]
pub(super) struct Taken {
    /// The first of them; the next to be taken where there are none.
    first: u64,
    all: VecDeque<State>,
}

/// What has become of a sequence that was taken.
#[derive(Debug)]
pub(super) enum State {
    /// The reader has it.
    Held,
    /// It has been dropped, and waits for the device.
    Dropped,
    /// The host tells of it when the stream that releases it has got there.
    Passing,
    /// This stream releases it, and the reader's own counter has this value when it has got there.
    ReleasedOn(StreamKey, u64),
    /// It has been released, and nothing more is to be waited for.
    Released,
}

impl Taken {
    pub(super) const fn from(first: u64) -> Self {
        Self { first, all: VecDeque::new() }
    }

    pub(super) fn take(&mut self) {
        self.all.push_back(State::Held);
    }

    /// The first that has not been told of as released.
    pub(super) const fn first(&self) -> u64 {
        self.first
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Does the reader still have this sequence?
    pub(super) fn is_held(&self, sequence: u64) -> bool {
        let at = sequence.checked_sub(self.first).and_then(|at| self.all.get(at as usize));
        matches!(at, Some(State::Held))
    }

    /// Is any sequence dropped that the device has yet to be waited for?
    pub(super) fn any_dropped(&self) -> bool {
        self.all.iter().any(|state| matches!(state, State::Dropped))
    }

    pub(super) fn set(&mut self, sequence: u64, state: State) {
        let at = sequence.checked_sub(self.first).and_then(|at| self.all.get_mut(at as usize));
        if let Some(at) = at {
            *at = state;
        }
    }

    /// Those that were released before the first, and are told of together with it.
    pub(super) fn behind_first(&self) -> impl Iterator<Item = &State> {
        let is_released = |state: &&State| matches!(state, State::ReleasedOn(..) | State::Released);
        self.all.iter().skip(1).take_while(is_released)
    }

    /// The first, and so many behind it, have been told of.
    pub(super) fn forget(&mut self, behind_first: usize) {
        let count = (behind_first + 1).min(self.all.len());
        self.all.drain(..count);
        self.first += count as u64;
    }

    /// Forgets those at the begin of which nothing more is to be waited for; the first that is left.
    pub(super) fn forget_released(&mut self) -> u64 {
        while matches!(self.all.front(), Some(State::Released)) {
            self.all.pop_front();
            self.first += 1;
        }
        self.first
    }
}

#[cfg(test)]
mod tests;
