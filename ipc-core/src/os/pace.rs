//! The decision of a receiver to spin before it sleeps, because a wake-up by the kernel takes longer than a hand-over.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::clock;

/// Default duration for which a receiver spins before it sleeps.
pub(crate) const SPIN: Duration = Duration::from_micros(50);

/// Maximum number of waits without spinning after spins without success.
const MAX_SKIPPED: u32 = 256;

/// The number of successful spins that compensate for one without success: each saves some microseconds.
const BREAK_EVEN: u32 = 16;

/// An upper bound of the duration of one poll, unless another thread used the processor meanwhile.
const UNINTERRUPTED_POLL: Duration = Duration::from_micros(3);

/// The spinning policy of a receiver, adapted to the arrival of messages.
///
/// A receiver spins as long as messages arrive while it spins. After a spin without success, because the sender is silent or
/// has no processor to run on, it sleeps at the next wait, and after each further one for twice as many waits; unless spinning
/// has been successful before, as with messages that arrive in bursts. The duration of a sleep is not considered, as it
/// includes the wake-up.
#[derive(Debug)]
pub(crate) struct Pace {
    /// The maximum duration of a spin.
    limit: Duration,
    /// Whether the sender can run on another processor meanwhile.
    possible: bool,
    /// The number of waits since the last spin without success, and the number required before the next spin.
    since: u32,
    required: u32,
    /// The number of successful spins since then.
    successes: u32,
}

impl Default for Pace {
    fn default() -> Self {
        Self::within(SPIN)
    }
}

impl Pace {
    /// Creates the policy of a receiver that spins for at most `limit`.
    pub(crate) fn within(limit: Duration) -> Self {
        static SEVERAL: OnceLock<bool> = OnceLock::new();
        Self {
            limit,
            possible: *SEVERAL.get_or_init(has_several_processors),
            since: 0,
            required: 1,
            successes: 0,
        }
    }

    /// Waits until `poll` returns a value: first spinning if the policy says so, but not beyond `until`, then sleeping.
    pub(crate) fn wait<T, E>(
        &mut self,
        until: Option<Instant>,
        poll: impl FnMut(PollMode) -> Result<Option<T>, E>,
    ) -> Result<T, E> {
        let spins = self.spins();
        self.wait_with(spins, until, poll)
    }

    fn wait_with<T, E>(
        &mut self,
        spins: bool,
        until: Option<Instant>,
        mut poll: impl FnMut(PollMode) -> Result<Option<T>, E>,
    ) -> Result<T, E> {
        let begin = clock::now();
        let end = until.map_or(begin + self.limit, |until| until.min(begin + self.limit));
        let (mut last, mut polled_before) = (begin, false);
        while spins && last < end {
            let found = poll(PollMode::Now)?;
            let now = clock::now();
            if let Some(found) = found {
                self.found(now - last, polled_before);
                return Ok(found);
            }
            (last, polled_before) = (now, true);
        }
        if spins {
            self.spun(false);
        } else {
            self.slept();
        }
        loop {
            if let Some(found) = poll(PollMode::Sleep)? {
                return Ok(found);
            }
        }
    }

    /// Records that a poll of this duration found a message.
    ///
    /// If it was the first poll, the message was already available. If the poll took long, the sender used this processor,
    /// which it would have obtained at once if this receiver had slept.
    fn found(&mut self, poll: Duration, polled_before: bool) {
        if polled_before {
            self.spun(poll < UNINTERRUPTED_POLL);
        } else {
            self.slept();
        }
    }

    /// Returns whether the next wait should spin.
    pub(crate) fn spins(&self) -> bool {
        self.possible && self.since >= self.required
    }

    /// Records a wait without spinning.
    pub(crate) fn slept(&mut self) {
        self.since = self.since.saturating_add(1);
    }

    /// Records a wait with spinning, and whether a message arrived meanwhile.
    pub(crate) fn spun(&mut self, arrived: bool) {
        if arrived {
            self.successes = self.successes.saturating_add(1);
            return;
        }
        let has_paid = std::mem::take(&mut self.successes) >= BREAK_EVEN;
        self.required = if has_paid { 0 } else { (self.required * 2).clamp(1, MAX_SKIPPED) };
        self.since = 0;
    }
}

/// The way to poll for a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PollMode {
    /// Poll without waiting.
    Now,
    /// Sleep until a message arrives, or until it is time to poll again.
    Sleep,
}

/// Returns whether this thread may run on several processors. On a single one, spinning would keep the sender from running.
fn has_several_processors() -> bool {
    std::thread::available_parallelism().is_ok_and(|count| count.get() > 1)
}

#[cfg(test)]
mod tests;
