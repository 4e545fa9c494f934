//! The thread for everything that may block: drops of owners, the driver's close and free, calls of the user's code.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Metrics;
use crate::backend::DeviceEvent;
use crate::model::error::{Error, Result};
use crate::os::{Backoff, Condvar, Timers, clock, spawn_without_signals};

type Job = Box<dyn FnOnce() + Send>;

/// The intervals at which the events of waiting jobs are polled, by the time since the last of these jobs was submitted.
const POLL: Backoff = Backoff::doubling(Duration::from_micros(20), Duration::from_millis(1));

/// Time after which a job that still waits for its event is logged.
const LONG_WAIT: Duration = Duration::from_secs(30);

/// Maximum number of queued jobs before new work is delayed.
const MAX_BACKLOG: usize = 256;

/// Maximum time for which a caller is delayed until the worker has run its jobs. The worker may be waiting for that thread, in a
/// callback, in the drop of an owner, or for a stream.
const MAX_DELAY: Duration = Duration::from_secs(1);

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// A dedicated thread that runs jobs one after the other, and never on the thread that submits them, which may hold locks that
/// they take. A job that waits for an event delays no other one.
#[derive(Clone)]
pub(crate) struct Worker {
    tasks: Sender<Task>,
    backlog: Arc<Backlog>,
    metrics: Arc<Metrics>,
}

/// The number of jobs that the worker has not received. Jobs that wait for an event do not count.
#[derive(Debug, Default)]
struct Backlog {
    jobs: AtomicUsize,
    mutex: Mutex<()>,
    shrunk: Condvar,
}

impl Backlog {
    fn is_full(&self) -> bool {
        self.jobs.load(Ordering::SeqCst) >= MAX_BACKLOG
    }

    fn grow(&self) {
        self.jobs.fetch_add(1, Ordering::SeqCst);
    }

    fn shrink(&self) {
        if self.jobs.fetch_sub(1, Ordering::SeqCst) == MAX_BACKLOG {
            drop(self.mutex.lock());
            self.shrunk.notify_all();
        }
    }

    fn wait(&self, until: Instant) {
        let mut guard = self.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        while self.is_full() {
            let left = clock::left(until);
            if left.is_zero() {
                return;
            }
            guard = self.shrunk.wait_timeout(&self.mutex, guard, left);
        }
    }
}

/// Refuses a call that would wait on the worker's own thread, which has to do the work that the call waits for. A timeout of zero
/// does not wait.
pub(crate) fn check_may_wait(call: &'static str, timeout: Duration) -> Result<()> {
    if timeout.is_zero() || !IS_WORKER.get() { Ok(()) } else { Err(Error::OnWorkerThread { call }) }
}

enum Task {
    Now(Job),
    When(WaitingJob),
    At(Instant, Job),
}

struct WaitingJob {
    /// `None`: waits for all jobs that were submitted before.
    reached: Option<Box<dyn FnMut() -> Result<bool> + Send>>,
    job: Job,
    since: Instant,
    warned: bool,
}

impl Worker {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] where the system starts no thread.
    pub(crate) fn start(metrics: Arc<Metrics>) -> Result<Self> {
        let (tasks, receiver) = channel();
        let backlog = Arc::<Backlog>::default();
        let received = Arc::clone(&backlog);
        spawn_without_signals("device-ipc-work", move || work(&receiver, &received))?;
        Ok(Self { tasks, backlog, metrics })
    }

    /// Delays a caller that is about to create work for the worker while the worker is far behind: threads that open and release
    /// faster than the worker closes would hold ever more mappings and file descriptors. Waits at most 1 s, and not beyond the
    /// deadline.
    pub(crate) fn wait_for_backlog(&self, deadline: Instant) {
        if self.backlog.is_full() && !IS_WORKER.get() {
            self.backlog.wait(deadline.min(clock::now() + MAX_DELAY));
        }
    }

    /// Submits a job. A job that panics does not stop later ones.
    pub(crate) fn submit(&self, job: impl FnOnce() + Send + 'static) {
        self.send(Task::Now(Box::new(job)));
    }

    /// Submits a job that runs once the event has been reached; the event is dropped before.
    pub(crate) fn submit_when(&self, event: Box<dyn DeviceEvent>, job: impl FnOnce() + Send + 'static) {
        self.submit_once(move || event.query(), job);
    }

    /// Submits a job that runs once `reached` returns true; `reached` is dropped before. It is called on the worker's thread, and
    /// must not wait.
    pub(crate) fn submit_once(
        &self,
        reached: impl FnMut() -> Result<bool> + Send + 'static,
        job: impl FnOnce() + Send + 'static,
    ) {
        let (reached, job): (Box<dyn FnMut() -> Result<bool> + Send>, Job) =
            (Box::new(reached), Box::new(job));
        self.send(Task::When(WaitingJob { reached: Some(reached), job, since: clock::now(), warned: false }));
    }

    /// Submits a job that runs at this time, or later if the worker is busy. No other job waits for it.
    pub(crate) fn submit_at(&self, at: Instant, job: impl FnOnce() + Send + 'static) {
        self.send(Task::At(at, Box::new(job)));
    }

    /// Submits a job that consumes a shared value, once no other thread refers to it: no other thread drops it then.
    pub(crate) fn submit_last<T: Send + Sync + 'static>(
        &self,
        value: Arc<T>,
        job: impl FnOnce(T) + Send + 'static,
    ) {
        match Arc::try_unwrap(value) {
            Ok(value) => self.submit(move || job(value)),
            Err(value) => {
                let referred = Arc::downgrade(&value);
                let job = move || {
                    if let Some(value) = Arc::into_inner(value) {
                        job(value);
                    }
                };
                self.submit_once(move || Ok(referred.strong_count() == 1), job);
            }
        }
    }

    /// Runs a job behind all jobs that were submitted before, waiting ones included, and waits for it. False after the timeout; the
    /// job runs in any case.
    pub(crate) fn run_behind(&self, job: impl FnOnce() + Send + 'static, timeout: Duration) -> bool {
        let (done, finished) = channel();
        let job: Job = Box::new(move || {
            job();
            // The receiver is dropped after the timeout.
            let _ = done.send(());
        });
        self.send(Task::When(WaitingJob { reached: None, job, since: clock::now(), warned: false }));
        clock::receive(&finished, timeout).is_ok()
    }

    /// Waits until all jobs that were submitted before have run, waiting ones included, at most 1 s. On the worker's own thread it
    /// returns false, without a wait.
    pub(crate) fn wait_for_jobs(&self) -> bool {
        if IS_WORKER.get() {
            return false;
        }
        self.run_behind(|| (), MAX_DELAY);
        true
    }

    /// Runs a job behind the jobs that were submitted before, except waiting ones, and waits for it; on the worker's own thread it
    /// runs at once. False after the timeout; the job runs in any case.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static, timeout: Duration) -> bool {
        if IS_WORKER.get() {
            job();
            return true;
        }
        let (done, finished) = channel();
        self.submit(move || {
            job();
            // The receiver is dropped after the timeout.
            let _ = done.send(());
        });
        clock::receive(&finished, timeout).is_ok()
    }

    /// Waits until `reached` returns true, which the worker calls as in [`submit_once`](Self::submit_once); on the worker's own thread
    /// once, without a wait. False after the timeout.
    pub(crate) fn wait_until(
        &self,
        mut reached: impl FnMut() -> bool + Send + 'static,
        timeout: Duration,
    ) -> bool {
        if IS_WORKER.get() {
            return reached();
        }
        let (done, finished) = channel();
        let report = move || {
            // The receiver is dropped after the timeout.
            let _ = done.send(());
        };
        self.submit_once(move || Ok(reached()), report);
        clock::receive(&finished, timeout).is_ok()
    }

    fn send(&self, task: Task) {
        self.metrics.jobs_total.add(1);
        self.backlog.grow();
        // The thread runs until the process terminates, so the job is received.
        let _ = self.tasks.send(task);
    }
}

impl WaitingJob {
    /// Returns whether the event has been reached, or cannot be polled.
    fn is_over(&mut self) -> bool {
        let Some(reached) = &mut self.reached else { return false };
        if !self.warned && clock::elapsed(self.since) > LONG_WAIT {
            self.warned = true;
            tracing::warn!(target: crate::os::log::TRANSPORT,
                seconds = LONG_WAIT.as_secs(),
                "a stream or a transfer has not finished yet; the memory that it uses stays open"
            );
        }
        match catch_unwind(AssertUnwindSafe(reached)).unwrap_or(Ok(true)) {
            Ok(reached) => reached,
            Err(error) => {
                tracing::warn!(target: crate::os::log::TRANSPORT, %error, "a stream that memory was released on cannot be waited for");
                true
            }
        }
    }

    fn finish(self) {
        drop(self.reached);
        run(self.job);
    }
}

/// The worker's thread.
fn work(tasks: &Receiver<Task>, backlog: &Backlog) {
    IS_WORKER.set(true);
    let mut waiting: Vec<WaitingJob> = Vec::new();
    let mut timed: Timers<Job> = Timers::default();
    let mut last_submitted = clock::now();
    let mut polled = last_submitted;
    loop {
        let poll = (!waiting.is_empty()).then(|| POLL.interval(clock::elapsed(last_submitted)));
        let task = match timed.next().map(clock::left).into_iter().chain(poll).min() {
            None => tasks.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(wait) => clock::receive(tasks, wait),
        };
        let mut is_due = poll.is_some_and(|interval| clock::elapsed(polled) >= interval);
        match task {
            Ok(Task::Now(job)) => {
                run(job);
                backlog.shrink();
            }
            Ok(Task::When(mut task)) => {
                if task.is_over() {
                    task.finish();
                } else {
                    waiting.push(task);
                    last_submitted = clock::now();
                }
                backlog.shrink();
            }
            Ok(Task::At(at, job)) => {
                timed.insert(at, job);
                backlog.shrink();
            }
            Err(RecvTimeoutError::Timeout) => is_due = true,
            Err(RecvTimeoutError::Disconnected) => return,
        }
        // Not after every job: a poll of many events takes longer than a job.
        if is_due {
            for over in waiting.extract_if(.., WaitingJob::is_over) {
                over.finish();
            }
            polled = clock::now();
        }
        while waiting.first().is_some_and(|first| first.reached.is_none()) {
            waiting.remove(0).finish();
        }
        if timed.next().is_some() {
            let now = clock::now();
            while let Some(job) = timed.take_due(now) {
                run(job);
            }
        }
    }
}

fn run(job: Job) {
    if catch_unwind(AssertUnwindSafe(job)).is_err() {
        tracing::error!(target: crate::os::log::TRANSPORT, "a job of the device-ipc worker panicked");
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
