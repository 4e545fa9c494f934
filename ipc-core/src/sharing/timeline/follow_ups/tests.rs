use std::sync::atomic::Ordering;

use super::*;
use crate::sharing::timeline::{ENDED, Word};

/// Returns the number of times that the counters of a terminated peer are poisoned again, each time after a late signal.
fn times_poisoned(is_in_use: bool) -> u32 {
    let mut follow_ups = FollowUps::new(Worker::start(Arc::default()).unwrap());
    let (page, file) = WordPage::create().unwrap();
    let of_peer = WordPage::open(file).unwrap();
    let counter = of_peer.word(3, Word::FromImporter);
    let user = is_in_use.then(|| Arc::clone(&page));
    follow_ups.begin(FollowUp::Poison(Poison::Page(page, Side::Exporter)));
    let mut times = 0;
    while let Some(at) = follow_ups.next() {
        counter.store(7, Ordering::Release);
        follow_ups.run(at);
        assert_eq!(counter.load(Ordering::Acquire), ENDED);
        times += 1;
    }
    drop(user);
    times
}

#[test]
fn late_signals_of_a_terminated_peer_are_reverted_for_a_while() {
    assert_eq!(times_poisoned(true), POISON_TIMES);
    assert_eq!(times_poisoned(false), POISON_UNUSED_TIMES);
}
