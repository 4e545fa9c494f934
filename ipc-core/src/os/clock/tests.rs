//! Each test advances the clock of a process of its own: all tests of a program share the clock.

use std::os::fd::AsFd;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use device_ipc_test_process::{command_of_test, output_of};
use rustix::event::PollFlags;

use super::*;
use crate::os::{Condvar, Readiness};

const HOUR: Duration = Duration::from_secs(3600);

/// Runs an ignored test of this module in a process.
fn run(test: &str) {
    let path = format!("{}::{test}", module_path!());
    let (success, text) = output_of(command_of_test(&path), Duration::from_secs(60));
    assert!(success && text.contains("1 passed"), "{text}");
}

type Wait = Box<dyn FnOnce() + Send>;

/// Waits for an hour, in each way that there is.
fn waits() -> [(&'static str, Wait); 4] {
    let (sender, messages) = channel::<()>();
    let receive = move || {
        assert_eq!(receive(&messages, HOUR), Err(RecvTimeoutError::Timeout));
        drop(sender);
    };
    let silent = Readiness::new().unwrap();
    let poll = move || {
        let mut files = [PollFd::from_borrowed_fd(silent.as_fd(), PollFlags::IN)];
        assert_eq!(poll(&mut files, now() + HOUR), Ok(false));
    };
    let wait = || {
        let (mutex, condvar) = (Mutex::new(()), Condvar::new());
        drop(condvar.wait_timeout_while(&mutex, mutex.lock().unwrap(), HOUR, |()| true));
    };
    [
        ("sleep", Box::new(|| sleep(HOUR))),
        ("receive", Box::new(receive)),
        ("poll", Box::new(poll)),
        ("wait", Box::new(wait)),
    ]
}

#[test]
fn advance_ends_waits_of_other_threads() {
    run("other_threads");
}

#[test]
#[ignore = "a process of the test above"]
fn other_threads() {
    let clock = TestClock::take();
    let begin = now();
    let threads = waits().map(|(name, wait)| {
        let thread = move || {
            let begin = now();
            wait();
            assert!(elapsed(begin) >= HOUR, "{name} ended early");
        };
        (name, thread::spawn(thread))
    });
    // The threads may begin later.
    while !threads.iter().all(|(_, thread)| thread.is_finished()) {
        clock.advance(HOUR);
        thread::sleep(Duration::from_millis(1));
    }
    for (name, thread) in threads {
        thread.join().unwrap_or_else(|_| panic!("{name}"));
    }
    assert!(elapsed(begin) >= HOUR);
}

#[test]
fn skipped_wait_is_the_first_of_its_duration() {
    run("skipped");
}

#[test]
#[ignore = "a process of the test above"]
fn skipped() {
    let clock = TestClock::take();
    for (name, wait) in waits() {
        let begin = now();
        clock.skip_wait(HOUR / 2..2 * HOUR);
        sleep(Duration::from_millis(2));
        assert!(elapsed(begin) < HOUR / 2, "{name}");
        wait();
        assert!((HOUR..2 * HOUR).contains(&elapsed(begin)), "{name}");
    }
}

#[test]
fn clock_is_the_systems_until_it_is_advanced() {
    run("not_advanced");
}

#[test]
#[ignore = "a process of the test above"]
fn not_advanced() {
    let same = |begin: Instant| begin <= now() && now() <= Instant::now();
    assert!(same(Instant::now()) && slice(HOUR) == HOUR);
    let clock = TestClock::take();
    assert!(same(Instant::now()) && slice(HOUR) < HOUR && to_system(now()) <= Instant::now());
    clock.advance(HOUR);
    assert!(!same(Instant::now()) && to_system(now()) <= Instant::now());
}

#[test]
fn interrupted_call_ends_its_waits_early_and_only_those() {
    for (name, wait) in waits() {
        let begin = Instant::now();
        // The receiver expects the message of a time limit that was reached; the poll a time that is over.
        interruptible(|| true, wait);
        assert!(begin.elapsed() < Duration::from_secs(30), "{name}");
        assert!(left(now() + HOUR) > Duration::ZERO, "{name}");
    }
}

#[test]
fn interrupt_is_checked_without_the_mutex_of_a_wait() {
    let mutex = std::rc::Rc::new(Mutex::new(()));
    let locked = std::rc::Rc::clone(&mutex);
    // As another thread does that has the lock which the check waits for.
    let check = move || {
        assert!(locked.try_lock().is_ok(), "the mutex is locked");
        true
    };
    let condvar = Condvar::new();
    interruptible(check, || drop(condvar.wait_timeout_while(&mutex, mutex.lock().unwrap(), HOUR, |()| true)));
}

#[test]
fn interrupt_is_checked_while_the_thread_waits() {
    let checks = std::rc::Rc::new(std::cell::Cell::new(0));
    let counted = std::rc::Rc::clone(&checks);
    let check = move || {
        counted.set(counted.get() + 1);
        counted.get() == 3
    };
    interruptible(check, || {
        assert_eq!(elapsed(now()).as_secs(), 0);
        sleep(HOUR);
        assert!(left(now() + HOUR).is_zero() && elapsed(now()) > HOUR);
        // Nothing is checked after the interrupt.
        sleep(HOUR);
    });
    assert_eq!(checks.get(), 3);
}
