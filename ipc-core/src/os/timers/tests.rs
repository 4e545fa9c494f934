use std::time::Duration;

use super::*;

#[test]
fn values_become_due_in_the_order_of_time_and_insertion() {
    let begin = Instant::now();
    let at = |ms| begin + Duration::from_millis(ms);
    let mut timers = Timers::default();
    timers.insert(at(2), "third");
    timers.insert(at(1), "first");
    timers.insert(at(1), "second");
    let removed = timers.insert(at(0), "removed");
    assert_eq!((timers.next(), timers.take_due(begin - Duration::from_millis(1))), (Some(begin), None));
    timers.remove(removed);
    assert_eq!(timers.next(), Some(at(1)));
    assert_eq!(std::iter::from_fn(|| timers.take_due(at(1))).collect::<Vec<_>>(), ["first", "second"]);
    assert_eq!((timers.take_due(at(2)), timers.next()), (Some("third"), None));
}
