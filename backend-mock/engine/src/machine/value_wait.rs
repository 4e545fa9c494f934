//! Waits for 64-bit words that are more than "this value or above".
//!
//! Why: vendors' streams compare in several ways, give up after a time, and take a word that they have waited
//! for, so that the next wait is for the next one.

use std::time::{Duration, Instant};

use super::state::Machine;
use crate::model::{Address, EngineError, Operation, StreamId};

/// A word that has not come is looked at this often.
const POLL: Duration = Duration::from_micros(50);

impl Machine {
    /// Makes a stream wait until a 64-bit word is as `ready` asks, and then, in the same instant, puts `then` in its
    /// place, if that is given.
    ///
    /// # Errors
    /// As [`write_value64`](Self::write_value64). On the stream also `TimedOut`, when the work has waited for `limit`.
    pub fn wait_word(
        &self,
        stream: StreamId,
        address: Address,
        ready: impl Fn(u64) -> bool + Send + 'static,
        then: Option<u64>,
        limit: Option<Duration>,
    ) -> Result<(), EngineError> {
        self.enter(Operation::WaitValue)?;
        let (span, queue) = self.word_on(stream, address)?;
        let reachable = self.in_reach(&span, queue.device);
        queue.enqueue(|| {
            Box::new(move |stream| {
                reachable?;
                let begun = Instant::now();
                loop {
                    let word = span.load(stream.device)?;
                    let taken = match then {
                        Some(then) if ready(word) => span.exchange(word, then, stream.device)?,
                        _ => ready(word),
                    };
                    if taken {
                        return Ok(());
                    }
                    if stream.is_cancelled() {
                        return Err(EngineError::Cancelled);
                    }
                    if limit.is_some_and(|limit| begun.elapsed() >= limit) {
                        return Err(EngineError::TimedOut);
                    }
                    std::thread::sleep(POLL);
                }
            })
        })
    }
}
