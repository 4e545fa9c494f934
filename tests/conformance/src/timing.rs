//! Claims about what happened while a stream was still delayed.

use std::time::{Duration, Instant};

use crate::outcome::{Outcome, Stop, fail};

/// Tried one after the other, until the machine was fast enough for one of them.
const DELAYS: [Duration; 3] =
    [Duration::from_millis(300), Duration::from_millis(1500), Duration::from_secs(6)];

/// The observation of an attempt: its time, and its verdict.
#[derive(Debug)]
pub struct Seen {
    /// The time from the start of the delay to the moment that had to precede its end.
    pub took: Duration,
    /// Was it right?
    pub verdict: Outcome,
}

impl Seen {
    /// A verdict that counts if the delay that began at `begun` is not over now.
    pub fn since(begun: Instant, verdict: Outcome) -> Self {
        Self { took: begun.elapsed(), verdict }
    }
}

/// Runs `attempt` with a delay. If what it measured took longer than the delay, it proves nothing, and is tried again
/// with a longer one; `what` says what should have been faster.
///
/// # Errors
///
/// The attempt's, or [`Stop::Failed`] where even the longest delay was not enough.
#[track_caller]
pub fn while_delayed(what: &str, mut attempt: impl FnMut(Duration) -> Result<Seen, Stop>) -> Outcome {
    let mut taken = Vec::new();
    for delay in DELAYS {
        let Seen { took, verdict } = attempt(delay)?;
        if took < delay {
            return verdict;
        }
        taken.push(format!("{} ms in a delay of {} ms", took.as_millis(), delay.as_millis()));
    }
    fail(format_args!("{what} should not wait for the stream, and took {}", taken.join(", ")))
}
