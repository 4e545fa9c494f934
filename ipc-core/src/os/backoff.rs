//! Waits for conditions that no event reports: words of shared memory, vendors' events, listeners that do not exist yet.

use std::time::Duration;

use super::{SPIN, clock};
use crate::model::error::{Error, Result};

/// The interval between two evaluations of a condition: a part of the time waited so far, within bounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    part: u32,
    shortest: Duration,
    longest: Duration,
    longest_idle: Duration,
}

/// The intervals for a word of shared memory.
const SHARED_WORD: Backoff = Backoff::eighth(Duration::ZERO, Duration::from_micros(200));

impl Backoff {
    /// An interval as long as the time waited so far, so that it doubles each time.
    pub(crate) const fn doubling(shortest: Duration, longest: Duration) -> Self {
        Self { part: 1, shortest, longest, longest_idle: Duration::ZERO }
    }

    /// An eighth of the time waited so far, so that the wait is longer than necessary by an eighth at most.
    pub(crate) const fn eighth(shortest: Duration, longest: Duration) -> Self {
        Self { part: 8, ..Self::doubling(shortest, longest) }
    }

    /// Lets the interval grow further, to a thousandth of the time waited so far, so that an idle object costs little.
    pub(crate) const fn idle(self, longest_idle: Duration) -> Self {
        Self { longest_idle, ..self }
    }

    /// Returns the time until the next evaluation.
    pub(crate) fn interval(self, waited: Duration) -> Duration {
        let interval = (waited / self.part).clamp(self.shortest, self.longest);
        interval.max((waited / 1000).min(self.longest_idle))
    }

    /// Waits until a condition holds: polls it for the time `spin`, and then at the intervals. Evaluates it at least once.
    ///
    /// # Errors
    ///
    /// The condition's error; that of `late` after the timeout.
    pub(crate) fn wait(
        self,
        spin: Duration,
        timeout: Duration,
        mut holds: impl FnMut() -> Result<bool>,
        late: impl FnOnce() -> Error,
    ) -> Result<()> {
        let begin = clock::now();
        while !holds()? {
            let waited = clock::elapsed(begin);
            if waited >= timeout {
                return Err(late());
            }
            if waited < spin {
                std::hint::spin_loop();
            } else {
                clock::sleep(self.interval(waited).min(timeout - waited));
            }
        }
        Ok(())
    }
}

/// Waits until a condition on words of shared memory holds, which a store to them does not report.
///
/// # Errors
///
/// As for [`Backoff::wait`].
pub(crate) fn wait_for_words(
    timeout: Duration,
    holds: impl FnMut() -> Result<bool>,
    late: impl FnOnce() -> Error,
) -> Result<()> {
    SHARED_WORD.wait(SPIN, timeout, holds, late)
}

#[cfg(test)]
mod tests;
