//! The limit on host memory for copies to other processes.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::sharing::{Runtime, RuntimeRef};
use crate::transport::ConnectionId;

/// The limits on host memory for copies to other processes, for [`set_staging_limits`](crate::limits::set_staging_limits).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StagingLimits {
    /// Bytes of a chunk, rounded up to whole 64 KiB, at most 64 MiB; a copy has two of them. Default: 8 MiB.
    pub chunk_bytes: u64,
    /// Bytes for all copies at a time, of which one importing process gets half; copies that do not fit wait until others have
    /// finished. One copy may always be made. Default: 256 MiB.
    pub total_bytes: u64,
}

impl StagingLimits {
    /// Sets [`chunk_bytes`](Self::chunk_bytes).
    pub const fn with_chunk_bytes(mut self, bytes: u64) -> Self {
        self.chunk_bytes = bytes;
        self
    }

    /// Sets [`total_bytes`](Self::total_bytes).
    pub const fn with_total_bytes(mut self, bytes: u64) -> Self {
        self.total_bytes = bytes;
        self
    }
}

impl Default for StagingLimits {
    fn default() -> Self {
        Self { chunk_bytes: 8 << 20, total_bytes: 256 << 20 }
    }
}

type Job = Box<dyn FnOnce(SetAside) + Send>;

/// A share of the room for copies: the importing process, or its connection where it has no process id here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Share {
    Process(u32),
    Connection(ConnectionId),
}

/// The host memory that copies to other processes use, and the copies that wait for some.
#[derive(Default)]
pub(crate) struct Stagings {
    state: Mutex<LimitState>,
}

#[derive(Default)]
struct LimitState {
    limits: StagingLimits,
    used: u64,
    used_by: HashMap<Share, u64>,
    waiting: VecDeque<WaitingStaging>,
}

struct WaitingStaging {
    share: Share,
    bytes: u64,
    job: Job,
}

/// Bytes that a copy may use. Dropping it starts the next copy.
#[derive(Debug)]
pub(crate) struct SetAside {
    share: Share,
    bytes: u64,
    runtime: RuntimeRef,
}

impl Stagings {
    pub(crate) fn set_limits(&self, runtime: &'static Runtime, limits: StagingLimits) {
        let mut state = self.lock();
        state.limits = limits;
        state.start_waiting(runtime);
    }

    pub(crate) fn limits(&self) -> StagingLimits {
        self.lock().limits
    }

    /// Runs the job on the worker once `bytes` are available. The next job is always that of the importer with the fewest bytes,
    /// its jobs in order of arrival. One importer gets at most half of the total.
    pub(crate) fn when_there_is_room(
        &self,
        runtime: &'static Runtime,
        share: Share,
        bytes: u64,
        job: impl FnOnce(SetAside) + Send + 'static,
    ) {
        let mut state = self.lock();
        state.waiting.push_back(WaitingStaging { share, bytes, job: Box::new(job) });
        state.start_waiting(runtime);
    }

    /// Returns whether a copy waits for others.
    pub(crate) fn somebody_waits(&self) -> bool {
        !self.lock().waiting.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, LimitState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LimitState {
    fn start_waiting(&mut self, runtime: &'static Runtime) {
        while let Some(next) = self.next() {
            let Some(WaitingStaging { share, bytes, job }) = self.waiting.remove(next) else { return };
            self.used += bytes;
            *self.used_by.entry(share).or_default() += bytes;
            runtime.metrics.staging_bytes.add(bytes);
            let room = SetAside { share, bytes, runtime: runtime.for_guard() };
            runtime.worker.submit(move || job(room));
        }
    }

    /// Returns the job that may start now. Each importer may always make one copy, where there is room or no other copy.
    fn next(&self) -> Option<usize> {
        let used_by = |share: &Share| self.used_by.get(share).copied().unwrap_or(0);
        let fits = |used: u64, bytes: u64, limit: u64| {
            used == 0 || used.checked_add(bytes).is_some_and(|used| used <= limit)
        };
        let total = self.limits.total_bytes;
        let within_half =
            |one: &(usize, &WaitingStaging)| fits(used_by(&one.1.share), one.1.bytes, total / 2);
        // The first of those with the fewest bytes; the others do not overtake it.
        let waiting = self.waiting.iter().enumerate().filter(within_half);
        let next = waiting.min_by_key(|(_, one)| used_by(&one.share));
        next.filter(|(_, one)| fits(self.used, one.bytes, total)).map(|(index, _)| index)
    }

    fn give_back(&mut self, runtime: &'static Runtime, set_aside: &SetAside) {
        self.used -= set_aside.bytes;
        if let Some(used) = self.used_by.get_mut(&set_aside.share) {
            *used -= set_aside.bytes;
            if *used == 0 {
                self.used_by.remove(&set_aside.share);
            }
        }
        self.start_waiting(runtime);
    }
}

impl Drop for SetAside {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.here() else { return };
        runtime.metrics.staging_bytes.subtract(self.bytes);
        runtime.stagings.lock().give_back(runtime, self);
    }
}

impl fmt::Debug for Stagings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("Stagings").field("used", &state.used).field("waiting", &state.waiting.len()).finish()
    }
}

#[cfg(test)]
mod tests;
