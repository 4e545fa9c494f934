//! The thread for everything that may block: drops of owners, the driver's close and free, calls of the user's code.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};

use super::thread::spawn_without_signals;

type Job = Box<dyn FnOnce() + Send>;

/// Runs jobs one after the other on a thread of its own, started at the first of them.
#[derive(Default)]
pub(crate) struct Worker {
    jobs: Mutex<Option<Sender<Job>>>,
}

impl Worker {
    /// Hands a job over. A job that panics does not stop those behind it.
    pub(crate) fn submit(&self, job: impl FnOnce() + Send + 'static) {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let job: Job = Box::new(job);
        let job = match jobs.as_ref() {
            Some(sender) => match sender.send(job) {
                Ok(()) => return,
                Err(unsent) => unsent.0,
            },
            None => job,
        };
        let (sender, receiver) = channel::<Job>();
        let body = move || {
            for job in receiver {
                if catch_unwind(AssertUnwindSafe(job)).is_err() {
                    tracing::error!("a job of the device-ipc worker panicked");
                }
            }
        };
        match spawn_without_signals("device-ipc-work", body) {
            Ok(()) => {
                // The receiver lives in the thread that was just started.
                let _ = sender.send(job);
                *jobs = Some(sender);
            }
            Err(error) => {
                tracing::error!(%error, "no thread could be started; the job runs on the caller's");
                drop(jobs);
                job();
            }
        }
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn no_thread_is_started_before_the_first_job() {
        let worker = Worker::default();
        assert!(worker.jobs.lock().unwrap().is_none());
    }
}
