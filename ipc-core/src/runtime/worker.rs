//! The thread for everything that may block: drops of owners, the driver's close and free, calls of the user's code.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Runtime;
use super::thread::spawn_without_signals;
use crate::backend::DeviceEvent;
use crate::error::Result;

type Job = Box<dyn FnOnce() + Send>;

/// How often an event that a job waits for is looked at: from this, doubling up to [`SELDOM`].
const OFTEN: Duration = Duration::from_micros(20);
const SELDOM: Duration = Duration::from_millis(1);

/// After how long a job that still waits for its event is worth a warning.
const PATIENCE: Duration = Duration::from_secs(30);

/// Runs jobs one after the other on a thread of its own, started at the first of them. A job that waits for an event
/// holds up no other one.
#[derive(Default)]
pub(crate) struct Worker {
    tasks: Mutex<Option<Sender<Task>>>,
}

enum Task {
    Now(Job),
    When(Waiting),
}

struct Waiting {
    /// `None`: until all that were submitted before are over.
    reached: Option<Box<dyn FnMut() -> Result<bool> + Send>>,
    job: Job,
    since: Instant,
    warned: bool,
}

impl Worker {
    /// Hands a job over. A job that panics does not stop those behind it.
    pub(crate) fn submit(&self, job: impl FnOnce() + Send + 'static) {
        self.send(Task::Now(Box::new(job)));
    }

    /// Hands a job over that is run once the event has been reached; the event is dropped before it.
    pub(crate) fn submit_when(&self, event: Box<dyn DeviceEvent>, job: impl FnOnce() + Send + 'static) {
        self.submit_once(move || event.query(), job);
    }

    /// Hands a job over that is run once `reached` says so; that is dropped before it. It is asked on the worker's thread, and
    /// must not wait.
    pub(crate) fn submit_once(
        &self,
        reached: impl FnMut() -> Result<bool> + Send + 'static,
        job: impl FnOnce() + Send + 'static,
    ) {
        let (reached, job): (Box<dyn FnMut() -> Result<bool> + Send>, Job) =
            (Box::new(reached), Box::new(job));
        self.send(Task::When(Waiting { reached: Some(reached), job, since: Instant::now(), warned: false }));
    }

    /// Has a job run behind everything that was submitted before, that which waits for events included, and waits for it.
    /// False when the time was over first; it is run all the same.
    pub(crate) fn run_behind(&self, job: impl FnOnce() + Send + 'static, timeout: Duration) -> bool {
        let (done, finished) = channel();
        let job: Job = Box::new(move || {
            job();
            // Nobody listens once the time is over.
            let _ = done.send(());
        });
        self.send(Task::When(Waiting { reached: None, job, since: Instant::now(), warned: false }));
        finished.recv_timeout(timeout).is_ok()
    }

    /// Waits until everything that was submitted before has been run. False when the time was over first.
    pub(crate) fn flush(&self, timeout: Duration) -> bool {
        let (done, finished) = channel();
        self.submit(move || {
            // Nobody listens once the time is over.
            let _ = done.send(());
        });
        finished.recv_timeout(timeout).is_ok()
    }

    fn send(&self, task: Task) {
        if let Some(runtime) = Runtime::existing() {
            runtime.metrics.jobs_total.add(1);
        }
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        if tasks.is_none() {
            let (sender, receiver) = channel();
            match spawn_without_signals("device-ipc-work", move || work(&receiver)) {
                Ok(()) => *tasks = Some(sender),
                Err(error) => {
                    tracing::error!(%error, "no thread can be started; the caller's does what may block");
                    drop(tasks);
                    return task.run_here();
                }
            }
        }
        if let Some(sender) = tasks.as_ref() {
            // The thread ends with the process only, so somebody listens.
            let _ = sender.send(task);
        }
    }
}

impl Task {
    fn run_here(self) {
        match self {
            Self::Now(job) => run(job),
            Self::When(mut waiting) => {
                while waiting.reached.is_some() && !waiting.is_over() {
                    std::thread::sleep(SELDOM);
                }
                waiting.finish();
            }
        }
    }
}

impl Waiting {
    /// Has the event been reached, or can that never be told?
    fn is_over(&mut self) -> bool {
        let Some(reached) = &mut self.reached else { return false };
        if !self.warned && self.since.elapsed() > PATIENCE {
            self.warned = true;
            tracing::warn!(
                seconds = PATIENCE.as_secs(),
                "a stream that work waits for has not got there yet; memory that was released on it stays open"
            );
        }
        match reached() {
            Ok(reached) => reached,
            Err(error) => {
                tracing::warn!(%error, "a stream that memory was released on cannot be waited for");
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
fn work(tasks: &Receiver<Task>) {
    let mut waiting: Vec<Waiting> = Vec::new();
    let mut pause = OFTEN;
    loop {
        let task = if waiting.is_empty() {
            tasks.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            tasks.recv_timeout(pause)
        };
        match task {
            Ok(Task::Now(job)) => run(job),
            Ok(Task::When(task)) => {
                waiting.push(task);
                pause = OFTEN;
            }
            Err(RecvTimeoutError::Timeout) => pause = (pause * 2).min(SELDOM),
            Err(RecvTimeoutError::Disconnected) => return,
        }
        for over in waiting.extract_if(.., Waiting::is_over) {
            over.finish();
        }
        while waiting.first().is_some_and(|first| first.reached.is_none()) {
            waiting.remove(0).finish();
        }
    }
}

fn run(job: Job) {
    if catch_unwind(AssertUnwindSafe(job)).is_err() {
        tracing::error!("a job of the device-ipc worker panicked");
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::backend::HandleBytes;
    use crate::device::DeviceOrdinal;
    use crate::stream::BorrowedStream;

    #[derive(Debug, Default)]
    struct Flag(Arc<AtomicBool>);

    impl DeviceEvent for Flag {
        fn device(&self) -> DeviceOrdinal {
            DeviceOrdinal::new(0)
        }
        fn export(&self) -> Result<HandleBytes> {
            Ok(HandleBytes::new([]))
        }
        fn record(&self, _: BorrowedStream<'_>) -> Result<()> {
            Ok(())
        }
        fn wait_on(&self, _: BorrowedStream<'_>) -> Result<()> {
            Ok(())
        }
        fn query(&self) -> Result<bool> {
            Ok(self.0.load(Ordering::SeqCst))
        }
        fn synchronize(&self, _: Duration) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn jobs_run_in_order_and_a_panic_does_not_stop_them() {
        let worker = Worker::default();
        let (sender, receiver) = channel();
        for number in 0..3 {
            let sender = sender.clone();
            worker.submit(move || {
                sender.send(number).unwrap();
                assert_ne!(number, 1, "this panic is part of the test");
            });
        }
        drop(sender);
        assert_eq!(receiver.iter().collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn a_job_that_waits_for_an_event_holds_up_no_other_one() {
        let worker = Worker::default();
        let flag = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = channel();
        let late = sender.clone();
        worker.submit_when(Box::new(Flag(Arc::clone(&flag))), move || late.send("late").unwrap());
        worker.submit(move || sender.send("early").unwrap());
        assert_eq!(receiver.recv().unwrap(), "early");
        assert!(worker.flush(Duration::from_secs(10)));
        assert!(receiver.try_recv().is_err());
        flag.store(true, Ordering::SeqCst);
        assert_eq!(receiver.recv().unwrap(), "late");
    }

    #[test]
    fn what_is_to_run_behind_the_others_waits_for_their_events() {
        let worker = Worker::default();
        let flag = Arc::new(AtomicBool::new(false));
        let ran = Arc::new(AtomicBool::new(false));
        assert!(worker.run_behind(|| {}, Duration::from_secs(10)), "there is nothing before it");
        let late = Arc::clone(&ran);
        worker.submit_when(Box::new(Flag(Arc::clone(&flag))), move || late.store(true, Ordering::SeqCst));
        assert!(!worker.run_behind(|| {}, Duration::from_millis(10)), "the event has not been reached");
        flag.store(true, Ordering::SeqCst);
        let seen = Arc::clone(&ran);
        let behind = move || assert!(seen.load(Ordering::SeqCst), "it was to run behind the other");
        assert!(worker.run_behind(behind, Duration::from_secs(10)));
    }

    #[test]
    fn no_thread_is_started_before_the_first_job() {
        assert!(Worker::default().tasks.lock().unwrap().is_none());
    }
}
