//! Copies from other hosts, and the memory that they are written to.
//!
//! An engine cannot stop a transfer, and one whose exporter is suspended does not end: the bytes arrive when the exporter
//! continues, perhaps hours later. So a pull owns its destinations, and returns them to the caller only after the engine has
//! finished with them. If the caller stops waiting, the worker keeps the destinations until then.

#![allow(unsafe_code, reason = "an engine writes to plain addresses; the pull keeps their owner")]

use std::mem;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::{RecoverableError, RuntimeRef};
use crate::backend::engine::{PullRequest, Transfer, TransferEngine};
use crate::model::error::{Error, Result};
use crate::os::{Backoff, clock, log};
use crate::transport::check_may_wait;

/// The time for which a waiting thread polls the engine without a sleep: a copy of few bytes ends within it, and the shortest sleep
/// takes about as long.
const YIELD: Duration = Duration::from_micros(100);

/// The intervals at which it polls the engine later.
const POLL: Backoff = Backoff::doubling(Duration::from_micros(20), Duration::from_millis(1));

/// Interval at which the worker polls transfers that no thread waits for.
const ABANDONED_POLL: Duration = Duration::from_millis(50);

/// The owner of the destinations of a pull, and of the lease on its source.
pub(crate) trait PullOwner: Send + 'static {
    /// Called repeatedly while the engine transfers, at intervals of at most 50 ms, on any thread. Keeps the lease alive, and
    /// does not wait.
    ///
    /// # Errors
    ///
    /// The reason why the transfer is not expected to end. The caller then waits no longer, but the pull keeps the owner.
    fn keep_alive(&mut self) -> Result<()>;

    /// Returns the error to report for an error of the engine, which has finished with the destinations.
    fn failed(&mut self, error: Error) -> Error;

    /// Adds the exporter to an error.
    fn with_exporter(&self, error: Error) -> Error;
}

/// A running copy of another process's memory into memory of this process, with the owner of that memory.
///
/// Dropping it does not stop the copy. The library then keeps the owner until the engine has finished with the memory, which
/// can take as long as the exporter's process lives, and drops it on its worker thread.
#[derive(Debug)]
pub(crate) struct Pull<T: PullOwner> {
    /// `None` after the end.
    running: Option<Running<T>>,
    engine: &'static str,
    bytes: u64,
    begun: Instant,
    limit: Duration,
    process: RuntimeRef,
}

/// The error of a pull, and the owner if the engine does not use the destinations any longer.
pub(crate) type Failed<T> = RecoverableError<Option<T>>;

#[derive(Debug)]
struct Running<T> {
    transfer: Box<dyn Transfer>,
    owner: T,
}

impl<T: PullOwner> Pull<T> {
    /// Starts a copy into destinations that belong to `owner`; see [`TransferEngine::pull`]. The time limit `limit` of the copy
    /// begins now.
    ///
    /// # Safety
    ///
    /// The destinations stay allocated as long as `owner` exists, and no other code accesses them until [`wait`](Self::wait) has
    /// returned `owner`.
    ///
    /// # Errors
    ///
    /// The engine's error; [`Error::Forked`] in a forked child of a process that has used the library; [`Error::Io`] if the
    /// system cannot start a thread. With the owner.
    pub(crate) unsafe fn start(
        process: RuntimeRef,
        engine: &dyn TransferEngine,
        request: &PullRequest<'_>,
        mut owner: T,
        limit: Duration,
    ) -> Result<Self, Failed<T>> {
        if let Err(error) = process.check() {
            return Err(RecoverableError::new(error, Some(owner)));
        }
        let begun = clock::now();
        // SAFETY: the owner keeps the destinations allocated; it leaves this pull only when the transfer is over.
        let transfer = match unsafe { engine.pull(request) } {
            Ok(transfer) => transfer,
            Err(error) => return Err(RecoverableError::new(owner.failed(error), Some(owner))),
        };
        Ok(Self {
            running: Some(Running { transfer, owner }),
            engine: engine.info().name,
            bytes: request.bytes(),
            begun,
            limit,
            process,
        })
    }

    /// Waits until all bytes have arrived, and returns the owner of the destinations. Calls `report` with the number of bytes that
    /// have arrived, each time that the engine states another one, and with all bytes at the end.
    ///
    /// # Errors
    ///
    /// The error of the engine or of the owner; [`Error::Timeout`] if the time limit has expired. Where the engine has not
    /// finished, the library keeps the owner as if this pull had been dropped. [`Error::OnWorkerThread`] on the worker;
    /// [`Error::Forked`] in a forked child.
    pub(crate) fn wait(mut self, mut report: impl FnMut(u64)) -> Result<T, Failed<T>> {
        check_may_wait("a copy from another host", self.limit)
            .map_err(|error| RecoverableError::new(error, None))?;
        let mut reported = 0;
        loop {
            let finished = self.try_finish()?;
            let arrived = match &self.running {
                Some(running) => running.transfer.arrived_bytes().min(self.bytes),
                None => self.bytes,
            };
            if mem::replace(&mut reported, arrived) != arrived {
                report(arrived);
            }
            if let Some(owner) = finished {
                return Ok(owner);
            }
            let waited = clock::elapsed(self.begun);
            if waited < YIELD {
                thread::yield_now();
                continue;
            }
            clock::sleep(POLL.interval(waited - YIELD).min(self.limit.saturating_sub(waited)));
        }
    }

    /// Returns the owner of the destinations if all bytes have arrived. Does not wait. Not called again after the owner or an
    /// error was returned.
    ///
    /// # Errors
    ///
    /// As for [`wait`](Self::wait). After an error this is to be dropped.
    pub(crate) fn try_finish(&mut self) -> Result<Option<T>, Failed<T>> {
        let not_finished = |error| RecoverableError::new(error, None);
        self.process.check().map_err(not_finished)?;
        let running = self.running.as_mut().expect("not called after the end");
        match running.transfer.is_finished() {
            Ok(true) => return Ok(self.running.take().map(|running| running.owner)),
            Ok(false) => {}
            Err(error) => {
                let error = running.owner.failed(error);
                return Err(RecoverableError::new(error, self.running.take().map(|running| running.owner)));
            }
        }
        running.owner.keep_alive().map_err(not_finished)?;
        if clock::elapsed(self.begun) >= self.limit {
            return Err(not_finished(running.owner.with_exporter(timeout(
                self.engine,
                self.bytes,
                self.limit,
            ))));
        }
        Ok(None)
    }
}

fn timeout(engine: &str, bytes: u64, after: Duration) -> Error {
    Error::Timeout {
        what: format!("{engine} to pull {bytes} B"),
        after,
        detail: ", because the exporter's process is suspended, cannot be reached or is slow; the destination stays \
                 allocated until the engine has finished with it"
            .into(),
    }
}

impl<T: PullOwner> Drop for Pull<T> {
    fn drop(&mut self) {
        let Some(running) = self.running.take() else { return };
        let Some(runtime) = self.process.here() else {
            // A forked child: the transfer and the memory belong to the parent.
            mem::forget(running);
            return;
        };
        tracing::debug!(target: log::IMPORT,
            engine = self.engine,
            bytes = self.bytes,
            "a pull was abandoned; its destination stays allocated until the engine has finished with it"
        );
        let Running { transfer, owner } = running;
        transfer.cancel_rest();
        let owner = Arc::new(Mutex::new(owner));
        let last = Arc::clone(&owner);
        let mut next = clock::now();
        let is_over = move || {
            if clock::now() < next {
                return Ok(false);
            }
            next = clock::now() + ABANDONED_POLL;
            // The engine decides when the copy is over, whatever has become of the exporter.
            let _ = owner.lock().unwrap_or_else(PoisonError::into_inner).keep_alive();
            // After an error the engine has finished, too.
            Ok(transfer.is_finished().unwrap_or(true))
        };
        runtime.worker.submit_once(is_over, move || drop(last));
    }
}

#[cfg(test)]
mod tests;
