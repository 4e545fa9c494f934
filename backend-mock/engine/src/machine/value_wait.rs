//! Waits for 64-bit words with a predicate, a replacement value and a timeout.
//!
//! Vendors' streams compare in several ways, time out, and reset a word that they have waited for.

use std::time::{Duration, Instant};

use super::state::Machine;
use crate::model::{Address, EngineError, Operation, StreamId};

/// Poll interval of a wait.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

impl Machine {
    /// Makes a stream wait until `ready` returns true for a 64-bit word, and then atomically replaces the word by
    /// `then`, if that is given.
    ///
    /// # Errors
    /// As [`write_value64`](Self::write_value64). On the stream also `TimedOut` after `limit`.
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
        let reachable = self.check_access(&span, queue.device);
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
                    std::thread::sleep(POLL_INTERVAL);
                }
            })
        })
    }
}
