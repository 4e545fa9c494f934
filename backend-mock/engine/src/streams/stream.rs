//! A stream: a queue of work and the thread that runs it.
//!
//! Work runs after the call that submitted it, with a delay, as on a device. A program that reads without waiting reads
//! the old bytes, on every run.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::model::{EngineError, Instrumentation, Operation};
use crate::system::{lock, spawn_with_signals_blocked};

thread_local! {
    static ON_STREAM_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether the calling thread runs a stream, of any machine.
pub(crate) fn on_stream_thread() -> bool {
    ON_STREAM_THREAD.get()
}

/// Work, called with the stream that runs it. It may be dropped without being called.
pub(crate) type Work = Box<dyn FnOnce(&Stream) -> Result<(), EngineError> + Send>;

#[derive(Default)]
struct State {
    queue: VecDeque<(u64, Work)>,
    submitted: u64,
    completed: u64,
    /// The first failure that no caller has taken yet; later work is dropped.
    failed: Option<EngineError>,
    /// Work up to this number was queued before the failure was taken, and is dropped too.
    skip_through: u64,
    thread: Option<JoinHandle<()>>,
    closing: bool,
}

/// A stream of one device.
pub(crate) struct Stream {
    pub(crate) id: u64,
    /// Ordinal of its device.
    pub(crate) device: usize,
    latency: Duration,
    calls: Arc<Instrumentation>,
    state: Mutex<State>,
    /// Notified of new work and of the close.
    work: Condvar,
    /// Notified of completed work.
    progress: Condvar,
    cancelled: AtomicBool,
    /// Whether work behind a failure still runs.
    pub(crate) continues: AtomicBool,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("id", &self.id).field("device", &self.device).finish_non_exhaustive()
    }
}

impl Stream {
    /// Creates a stream. Its thread starts with the first work.
    pub(crate) fn new(id: u64, device: usize, latency: Duration, calls: Arc<Instrumentation>) -> Self {
        Self {
            id,
            device,
            latency,
            calls,
            state: Mutex::default(),
            work: Condvar::new(),
            progress: Condvar::new(),
            cancelled: AtomicBool::new(false),
            continues: AtomicBool::new(false),
        }
    }

    /// Queues work, and starts the thread if there is none. `make` is called only if the stream accepts the work.
    pub(crate) fn enqueue(self: &Arc<Self>, make: impl FnOnce() -> Work) -> Result<(), EngineError> {
        let mut state = lock(&self.state);
        if state.closing {
            return Err(EngineError::InvalidStream { stream: self.id });
        }
        if state.thread.is_none() {
            let stream = self.clone();
            let thread = spawn_with_signals_blocked(format!("mock-stream-{}", self.id), move || stream.run());
            let refused = |error: std::io::Error| EngineError::System {
                call: "clone",
                errno: error.raw_os_error().unwrap_or(0),
            };
            state.thread = Some(thread.map_err(refused)?);
        }
        state.submitted += 1;
        let number = state.submitted;
        state.queue.push_back((number, make()));
        self.work.notify_one();
        Ok(())
    }

    /// Returns the number of the last queued work.
    pub(crate) fn submitted(&self) -> u64 {
        lock(&self.state).submitted
    }

    /// Waits until the work with this number is complete or dropped; returns `false` once `deadline` has passed.
    pub(crate) fn wait_until(&self, number: u64, deadline: Option<Instant>) -> bool {
        let mut state = lock(&self.state);
        while state.completed < number {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return false;
            }
            state = wait_on(&self.progress, state, left);
        }
        true
    }

    /// Takes the first failure. Work that is queued at this time is dropped; later work runs again.
    pub(crate) fn take_failure(&self) -> Result<(), EngineError> {
        let mut state = lock(&self.state);
        match state.failed.take() {
            None => Ok(()),
            Some(error) => {
                state.skip_through = state.submitted;
                Err(error)
            }
        }
    }

    /// Returns whether no work is queued or running.
    pub(crate) fn is_idle(&self) -> bool {
        let state = lock(&self.state);
        state.completed == state.submitted
    }

    /// Drops the queued work. Running work continues.
    pub(crate) fn discard_queued(&self) {
        let mut state = lock(&self.state);
        state.skip_through = state.submitted;
    }

    /// Stops accepting work. The thread exits after the queued work.
    pub(crate) fn close(&self) {
        lock(&self.state).closing = true;
        self.work.notify_one();
    }

    /// Cancels the running work, drops the queued work and closes the stream.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        self.close();
    }

    /// Joins the thread, unless it is the calling thread.
    pub(crate) fn join(&self) {
        let thread = lock(&self.state).thread.take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            // Panics of work are caught, so the result is always `Ok`.
            let _ = thread.join();
        }
    }

    /// Returns whether running work must return.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Sleeps on the stream's thread, at most until the stream is cancelled.
    ///
    /// # Errors
    /// `Cancelled`.
    pub(crate) fn sleep(&self, duration: Duration) -> Result<(), EngineError> {
        let end = Instant::now().checked_add(duration);
        let mut state = lock(&self.state);
        loop {
            if self.is_cancelled() {
                return Err(EngineError::Cancelled);
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(());
            }
            state = wait_on(&self.work, state, left);
        }
    }

    fn run(&self) {
        ON_STREAM_THREAD.set(true);
        while let Some((number, work, skip)) = self.next() {
            let result = if skip { Ok(()) } else { self.run_one(work) };
            let mut state = lock(&self.state);
            if let Err(error) = result {
                state.failed.get_or_insert(error);
            }
            state.completed = number;
            drop(state);
            self.progress.notify_all();
        }
        // The remaining work is dropped without the lock: its captured values may have any destructor.
        let mut state = lock(&self.state);
        let left = std::mem::take(&mut state.queue);
        state.completed = state.submitted;
        drop(state);
        drop(left);
        self.progress.notify_all();
    }

    /// Returns the next work and whether to drop it; `None` when the stream is closed.
    fn next(&self) -> Option<(u64, Work, bool)> {
        let mut state = lock(&self.state);
        loop {
            if self.is_cancelled() {
                return None;
            }
            if let Some((number, work)) = state.queue.pop_front() {
                let skip = state.failed.is_some() || number <= state.skip_through;
                let skip = skip && !self.continues.load(Ordering::Relaxed);
                return Some((number, work, skip));
            }
            if state.closing {
                return None;
            }
            state = wait_on(&self.work, state, None);
        }
    }

    fn run_one(&self, work: Work) -> Result<(), EngineError> {
        self.sleep(self.latency)?;
        self.calls.on_call(Operation::Run)?;
        let result = catch_unwind(AssertUnwindSafe(|| work(self)));
        result.unwrap_or(Err(EngineError::HostFunctionPanicked))
    }
}

fn wait_on<'a>(
    condition: &Condvar,
    state: MutexGuard<'a, State>,
    limit: Option<Duration>,
) -> MutexGuard<'a, State> {
    match limit {
        None => condition.wait(state).unwrap_or_else(PoisonError::into_inner),
        Some(limit) => condition.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0,
    }
}
