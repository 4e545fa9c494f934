use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::backend::HandleBytes;
use crate::backend::stream::BorrowedStream;
use crate::model::device::DeviceOrdinal;

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
    let worker = Worker::start(Arc::default()).unwrap();
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
fn full_queue_delays_new_work_until_the_worker_has_caught_up() {
    let worker = Worker::start(Arc::default()).unwrap();
    let (resume, paused) = channel::<()>();
    let begin = Instant::now();
    worker.submit(move || _ = paused.recv());
    let long = begin + Duration::from_secs(60);
    worker.wait_for_backlog(long);
    (0..=MAX_BACKLOG).for_each(|_| worker.submit(|| {}));
    worker.wait_for_backlog(begin);
    assert!(worker.backlog.is_full(), "it does not wait beyond the deadline");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            worker.wait_for_backlog(long);
            Instant::now()
        });
        resume.send(()).unwrap();
        assert!(waiting.join().unwrap() - begin < Duration::from_secs(30));
    });
    // A worker that makes no progress delays the caller for a limited time.
    let (resume, paused) = channel::<()>();
    worker.submit(move || _ = paused.recv());
    (0..=MAX_BACKLOG).for_each(|_| worker.submit(|| {}));
    let delayed = Instant::now();
    worker.wait_for_backlog(long);
    assert!(worker.backlog.is_full() && delayed.elapsed() >= MAX_DELAY);
    drop(resume);
    // Jobs that wait for events do not count.
    let flag = Arc::new(AtomicBool::new(false));
    for _ in 0..=MAX_BACKLOG {
        worker.submit_when(Box::new(Flag(Arc::clone(&flag))), || {});
    }
    assert!(worker.run(|| {}, Duration::from_secs(30)) && !worker.backlog.is_full());
    flag.store(true, Ordering::SeqCst);
}

#[test]
fn timed_job_runs_at_its_time_and_delays_no_other() {
    let worker = Worker::start(Arc::default()).unwrap();
    let (sender, receiver) = channel();
    let begun = Instant::now();
    for milliseconds in [60_000, 60, 30] {
        let sender = sender.clone();
        let at = begun + Duration::from_millis(milliseconds);
        worker.submit_at(at, move || _ = sender.send((milliseconds, Instant::now() >= at)));
    }
    assert!(worker.run_behind(|| {}, Duration::from_secs(10)), "the worker does not wait for them");
    for milliseconds in [30, 60] {
        assert_eq!(receiver.recv_timeout(Duration::from_secs(10)), Ok((milliseconds, true)));
    }
    assert!(receiver.try_recv().is_err());
}

#[test]
fn event_that_panics_counts_as_reached() {
    let worker = Worker::start(Arc::default()).unwrap();
    let (sender, receiver) = channel();
    worker.submit_once(|| panic!("this panic is part of the test"), move || sender.send(()).unwrap());
    assert_eq!(receiver.recv_timeout(Duration::from_secs(10)), Ok(()));
    assert!(worker.run(|| {}, Duration::from_secs(10)), "the worker goes on");
}

#[test]
fn job_that_waits_for_an_event_delays_no_other() {
    let worker = Worker::start(Arc::default()).unwrap();
    let flag = Arc::new(AtomicBool::new(false));
    let (sender, receiver) = channel();
    let late = sender.clone();
    worker.submit_when(Box::new(Flag(Arc::clone(&flag))), move || late.send("late").unwrap());
    worker.submit(move || sender.send("early").unwrap());
    assert_eq!(receiver.recv().unwrap(), "early");
    assert!(worker.run(|| {}, Duration::from_secs(10)));
    assert!(receiver.try_recv().is_err());
    flag.store(true, Ordering::SeqCst);
    assert_eq!(receiver.recv().unwrap(), "late");
}

#[test]
fn last_job_waits_for_the_events_of_earlier_jobs() {
    let worker = Worker::start(Arc::default()).unwrap();
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
fn shared_value_is_dropped_by_the_worker_behind_its_last_reference() {
    struct Named(std::sync::mpsc::Sender<Option<String>>);

    impl Drop for Named {
        fn drop(&mut self) {
            self.0.send(std::thread::current().name().map(str::to_owned)).unwrap();
        }
    }

    let worker = Worker::start(Arc::default()).unwrap();
    let (sender, dropped) = channel();
    for references in 0..2 {
        let value = Arc::new(Named(sender.clone()));
        let others = vec![Arc::clone(&value); references];
        worker.submit_last(value, drop);
        assert!(worker.run(|| {}, Duration::from_secs(10)));
        assert_eq!(dropped.try_recv().is_err(), references > 0, "not before the last reference");
        drop(others);
        if references > 0 {
            let name = dropped.recv_timeout(Duration::from_secs(10)).unwrap();
            assert_eq!(name.as_deref(), Some("device-ipc-work"));
        }
    }
}

#[test]
fn calls_that_wait_are_refused_on_the_worker_alone() {
    let worker = Worker::start(Arc::default()).unwrap();
    let long = Duration::from_secs(60);
    assert!(check_may_wait("wait", long).is_ok());
    let (sender, receiver) = channel();
    worker.submit(move || {
        sender.send([long, Duration::ZERO].map(|timeout| check_may_wait("wait", timeout))).unwrap();
    });
    let checked = receiver.recv().unwrap();
    assert!(matches!(checked, [Err(Error::OnWorkerThread { call: "wait" }), Ok(())]), "{checked:?}");
}

#[test]
fn job_that_the_worker_waits_for_runs_at_once() {
    static WORKER: std::sync::OnceLock<Worker> = std::sync::OnceLock::new();
    let worker = WORKER.get_or_init(|| Worker::start(Arc::default()).unwrap());
    let (sender, receiver) = channel();
    worker.submit(move || {
        let inner = sender.clone();
        assert!(worker.run(move || inner.send("inner").unwrap(), Duration::from_secs(60)));
        sender.send("outer").unwrap();
    });
    assert_eq!(receiver.iter().collect::<Vec<_>>(), ["inner", "outer"]);
}
