//! How much host memory the copies of this process to others take at a time.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::runtime::Runtime;

/// How much host memory copies to other processes take, for [`set_staging_limits`](crate::set_staging_limits).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingLimits {
    /// Bytes of a chunk, rounded up to whole 64 KiB, at most 64 MiB; a copy has two of them. 8 MiB unless said otherwise.
    pub chunk_bytes: u64,
    /// Bytes for all copies at a time; those that do not fit wait until others are done. One may always be made. 256 MiB
    /// unless said otherwise.
    pub total_bytes: u64,
}

impl Default for StagingLimits {
    fn default() -> Self {
        Self { chunk_bytes: 8 << 20, total_bytes: 256 << 20 }
    }
}

type Job = Box<dyn FnOnce(SetAside) + Send>;

/// The host memory that copies to other processes have, and those that wait for some.
#[derive(Default)]
pub(crate) struct Stagings {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    limits: StagingLimits,
    used: u64,
    waiting: VecDeque<(u64, Job)>,
}

/// Bytes that a copy may take. Dropping it lets the next one go on.
#[derive(Debug)]
pub(crate) struct SetAside {
    bytes: u64,
}

impl Stagings {
    pub(crate) fn set_limits(&self, limits: StagingLimits) {
        let mut state = self.lock();
        state.limits = limits;
        state.let_go_on();
    }

    pub(crate) fn limits(&self) -> StagingLimits {
        self.lock().limits
    }

    /// Has the worker run the job as soon as so many bytes may be taken; jobs go on in the order in which they came.
    pub(crate) fn when_there_is_room(&self, bytes: u64, job: impl FnOnce(SetAside) + Send + 'static) {
        let mut state = self.lock();
        state.waiting.push_back((bytes, Box::new(job)));
        state.let_go_on();
    }

    /// Does a copy wait for others?
    pub(crate) fn somebody_waits(&self) -> bool {
        !self.lock().waiting.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn let_go_on(&mut self) {
        let Some(runtime) = Runtime::existing() else { return };
        while let Some((bytes, _)) = self.waiting.front() {
            let fits = self.used.checked_add(*bytes).is_some_and(|used| used <= self.limits.total_bytes);
            if self.used > 0 && !fits {
                return;
            }
            let Some((bytes, job)) = self.waiting.pop_front() else { return };
            self.used += bytes;
            runtime.metrics.staging_bytes.add(bytes);
            runtime.worker.submit(move || job(SetAside { bytes }));
        }
    }
}

impl Drop for SetAside {
    fn drop(&mut self) {
        let Some(runtime) = Runtime::existing() else { return };
        let mut state = runtime.stagings.lock();
        state.used -= self.bytes;
        runtime.metrics.staging_bytes.subtract(self.bytes);
        state.let_go_on();
    }
}

impl fmt::Debug for Stagings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("Stagings").field("used", &state.used).field("waiting", &state.waiting.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    /// The only test of the process-wide limits in this executable.
    #[test]
    fn what_does_not_fit_waits_in_order_and_one_always_goes_on() {
        let runtime = Runtime::get().unwrap();
        runtime.stagings.set_limits(StagingLimits { total_bytes: 100, ..StagingLimits::default() });
        let (sender, receiver) = channel();
        for (number, bytes) in [(1, 1000), (2, 60), (3, 60), (4, 10)] {
            let sender = sender.clone();
            runtime.stagings.when_there_is_room(bytes, move |room| sender.send((number, room)).unwrap());
        }
        let (number, first) = receiver.recv_timeout(SOON).unwrap();
        assert_eq!(number, 1, "more than the limit, and alone");
        assert!(runtime.worker.flush(SOON) && receiver.try_recv().is_err());
        assert!(runtime.stagings.somebody_waits());
        drop(first);
        let (number, second) = receiver.recv_timeout(SOON).unwrap();
        assert_eq!(number, 2);
        assert!(runtime.worker.flush(SOON) && receiver.try_recv().is_err(), "the small one waits its turn");
        drop(second);
        let rest: Vec<_> = (0..2).map(|_| receiver.recv_timeout(SOON).unwrap()).collect();
        assert_eq!([rest[0].0, rest[1].0], [3, 4]);
        assert!(!runtime.stagings.somebody_waits());
        runtime.stagings.set_limits(StagingLimits::default());
    }
}
