use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::*;

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn each_value_is_opened_once() {
    let pending = Pending::default();
    assert_eq!(pending.add(1, "one"), Ok(()));
    assert_eq!(pending.add(1, "another"), Err("another"));
    let opened = pending.open(&1, |value| {
        assert_eq!(value, "one");
        assert!(!pending.open(&1, |_| unreachable!("this thread is opening it")));
        assert_eq!(pending.add(1, "another"), Err("another"));
        assert!(pending.take_queued(|_| true).is_empty());
    });
    assert!(opened);
    assert!(!pending.open(&1, |_| unreachable!("it has been opened")));
    assert_eq!(pending.add(1, "again"), Ok(()));
}

#[test]
fn only_meant_values_are_taken_back() {
    let pending = Pending::default();
    (1..5).for_each(|number| assert_eq!(pending.add(number, number), Ok(())));
    let mut taken = pending.take_queued(|number| number % 2 == 0);
    taken.sort_unstable();
    assert_eq!(taken, [2, 4]);
    assert!(!pending.open(&2, |_| unreachable!("it was taken back")));
    assert!(pending.open(&3, |number| assert_eq!(number, 3)));
}

#[test]
fn open_of_another_thread_is_waited_for() {
    let pending = Pending::default();
    assert_eq!(pending.add(1, ()), Ok(()));
    let is_open = AtomicBool::new(false);
    std::thread::scope(|scope| {
        pending.open(&1, |()| {
            scope.spawn(|| {
                pending
                    .open_or_wait(&1, Deadline::after(LIMIT), |()| unreachable!("another thread opens it"));
                assert!(is_open.load(Ordering::Acquire), "it has not waited");
            });
            let begin = clock::now();
            while !pending.opened.is_waited_for() {
                assert!(clock::elapsed(begin) < LIMIT, "no thread waits");
                std::thread::yield_now();
            }
            is_open.store(true, Ordering::Release);
        });
    });
}

#[test]
fn wait_ends_with_its_deadline_and_without_an_open() {
    let pending = Pending::default();
    let open = |()| unreachable!("it is not queued");
    pending.open_or_wait(&1, Deadline::after(LIMIT), open);
    assert_eq!(pending.add(1, ()), Ok(()));
    pending.open(&1, |()| pending.open_or_wait(&1, Deadline::after(Duration::ZERO), open));
}
