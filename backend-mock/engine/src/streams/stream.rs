//! One stream: a queue of work and the thread that runs it.
//!
//! Why a thread and a delay: on a device work runs later than the call that asked for it. A program
//! that reads without waiting must read the old bytes here too, every time.

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

/// Whether the calling thread runs a stream, of whichever machine.
pub(crate) fn on_stream_thread() -> bool {
    ON_STREAM_THREAD.get()
}

/// Work, which is given the stream that runs it. Work that is dropped unrun has to be harmless.
pub(crate) type Work = Box<dyn FnOnce(&Stream) -> Result<(), EngineError> + Send>;

#[derive(Default)]
struct State {
    queue: VecDeque<(u64, Work)>,
    submitted: u64,
    completed: u64,
    /// The first failure that nobody has read yet; work behind it is dropped.
    failed: Option<EngineError>,
    /// Work up to this number was queued before the failure was read, and is dropped too.
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
    /// There is work, or the end.
    work: Condvar,
    /// Work was completed.
    progress: Condvar,
    cancelled: AtomicBool,
    /// Whether work behind a failure runs all the same.
    pub(crate) continues: AtomicBool,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("id", &self.id).field("device", &self.device).finish_non_exhaustive()
    }
}

impl Stream {
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

    /// Queues work; `make` is called only if the stream takes it. Starts the thread if there is none.
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

    /// Number of the work that was queued last.
    pub(crate) fn submitted(&self) -> u64 {
        lock(&self.state).submitted
    }

    /// Waits until the work with this number is done or dropped; `false` once `deadline` has passed.
    pub(crate) fn wait_until(&self, number: u64, deadline: Option<Instant>) -> bool {
        let mut state = lock(&self.state);
        while state.completed < number {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return false;
            }
            state = sleep_on(&self.progress, state, left);
        }
        true
    }

    /// The failure that nobody has read yet. Work that was queued so far is dropped, later work runs again.
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

    /// Whether nothing is queued or running.
    pub(crate) fn is_idle(&self) -> bool {
        let state = lock(&self.state);
        state.completed == state.submitted
    }

    /// Drops what is queued; what is running goes on.
    pub(crate) fn abandon(&self) {
        let mut state = lock(&self.state);
        state.skip_through = state.submitted;
    }

    /// Takes no more work; the thread ends after what is queued.
    pub(crate) fn close(&self) {
        lock(&self.state).closing = true;
        self.work.notify_one();
    }

    /// Ends after the work that is running, which is told to hurry; drops what is queued.
    pub(crate) fn cancel(&self) {
        self.cancelled.store(true, Ordering::Release);
        self.close();
    }

    /// Waits for the end of the thread, unless this is it.
    pub(crate) fn join(&self) {
        let thread = lock(&self.state).thread.take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            // Work that panics is caught; there is nothing in the result.
            let _ = thread.join();
        }
    }

    /// Whether running work should give up.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// Sleeps on the stream's thread, until it is cancelled at most.
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
            state = sleep_on(&self.work, state, left);
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
        // What is left is dropped outside the lock: it may own anything.
        let mut state = lock(&self.state);
        let left = std::mem::take(&mut state.queue);
        state.completed = state.submitted;
        drop(state);
        drop(left);
        self.progress.notify_all();
    }

    /// The next work and whether it is to be dropped; `None` at the end.
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
            state = sleep_on(&self.work, state, None);
        }
    }

    fn run_one(&self, work: Work) -> Result<(), EngineError> {
        self.sleep(self.latency)?;
        self.calls.call(Operation::Run)?;
        let result = catch_unwind(AssertUnwindSafe(|| work(self)));
        result.unwrap_or(Err(EngineError::HostFunctionPanicked))
    }
}

fn sleep_on<'a>(
    condition: &Condvar,
    state: MutexGuard<'a, State>,
    limit: Option<Duration>,
) -> MutexGuard<'a, State> {
    match limit {
        None => condition.wait(state).unwrap_or_else(PoisonError::into_inner),
        Some(limit) => condition.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0,
    }
}
