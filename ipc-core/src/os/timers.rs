//! Values that become due at a time.

use std::collections::BTreeMap;
use std::time::Instant;

/// A queue of values, ordered by the time at which each becomes due.
#[derive(Debug)]
pub(crate) struct Timers<T> {
    values: BTreeMap<TimerId, T>,
    last: u64,
}

/// Identifies a value of [`Timers`]. The number distinguishes values that become due at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TimerId {
    at: Instant,
    number: u64,
}

impl<T> Default for Timers<T> {
    fn default() -> Self {
        Self { values: BTreeMap::new(), last: 0 }
    }
}

impl<T> Timers<T> {
    /// Adds a value, which becomes due at this time.
    pub(crate) fn insert(&mut self, at: Instant, value: T) -> TimerId {
        self.last += 1;
        let id = TimerId { at, number: self.last };
        self.values.insert(id, value);
        id
    }

    /// Removes a value, unless it has been taken.
    pub(crate) fn remove(&mut self, id: TimerId) {
        self.values.remove(&id);
    }

    /// Returns the time at which the first value becomes due.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.values.first_key_value().map(|(id, _)| id.at)
    }

    /// Takes the first value if it is due.
    pub(crate) fn take_due(&mut self, now: Instant) -> Option<T> {
        self.values.first_entry().filter(|first| first.key().at <= now).map(|first| first.remove())
    }

    /// Returns the values, the first one to become due first.
    #[cfg(feature = "kill-points")]
    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.values.values()
    }
}

#[cfg(test)]
mod tests;
