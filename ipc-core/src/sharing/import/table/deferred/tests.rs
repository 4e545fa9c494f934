use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::*;

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn each_value_is_opened_once() {
    let opens = DeferredOpens::default();
    assert_eq!(opens.add(1, "one"), Ok(()));
    assert_eq!(opens.add(1, "another"), Err("another"));
    let opened = opens.open(&1, |value| {
        assert_eq!(value, "one");
        assert!(!opens.open(&1, |_| unreachable!("this thread is opening it")));
        assert_eq!(opens.add(1, "another"), Err("another"));
        assert!(opens.take_queued(|_| true).is_empty());
    });
    assert!(opened);
    assert!(!opens.open(&1, |_| unreachable!("it has been opened")));
    assert_eq!(opens.add(1, "again"), Ok(()));
}

#[test]
fn only_meant_values_are_taken_back() {
    let opens = DeferredOpens::default();
    (1..5).for_each(|number| assert_eq!(opens.add(number, number), Ok(())));
    let mut taken = opens.take_queued(|number| number % 2 == 0);
    taken.sort_unstable();
    assert_eq!(taken, [2, 4]);
    assert!(!opens.open(&2, |_| unreachable!("it was taken back")));
    assert!(opens.open(&3, |number| assert_eq!(number, 3)));
}

#[test]
fn open_of_another_thread_is_waited_for() {
    let opens = DeferredOpens::default();
    assert_eq!(opens.add(1, ()), Ok(()));
    let is_open = AtomicBool::new(false);
    std::thread::scope(|scope| {
        opens.open(&1, |()| {
            scope.spawn(|| {
                opens.open_or_wait(&1, Deadline::after(LIMIT), |()| unreachable!("another thread opens it"));
                assert!(is_open.load(Ordering::Acquire), "it has not waited");
            });
            let begin = clock::now();
            while !opens.opened.is_waited_for() {
                assert!(clock::elapsed(begin) < LIMIT, "no thread waits");
                std::thread::yield_now();
            }
            is_open.store(true, Ordering::Release);
        });
    });
}

#[test]
fn wait_ends_with_its_deadline_and_without_an_open() {
    let opens = DeferredOpens::default();
    let open = |()| unreachable!("it is not queued");
    opens.open_or_wait(&1, Deadline::after(LIMIT), open);
    assert_eq!(opens.add(1, ()), Ok(()));
    opens.open(&1, |()| opens.open_or_wait(&1, Deadline::after(Duration::ZERO), open));
}
