use super::*;

fn taken(count: usize) -> Taken {
    let mut taken = Taken::from(7);
    (0..count).for_each(|_| taken.take());
    taken
}

#[test]
fn what_is_released_out_of_order_waits_for_the_older() {
    let mut taken = taken(4);
    taken.set(8, State::Released);
    taken.set(10, State::Released);
    assert_eq!(taken.forget_released(), 7);
    assert_eq!(taken.behind_first().count(), 1);
    taken.forget(1);
    assert_eq!(taken.first(), 9);
    assert!(taken.is_held(9) && !taken.is_held(10) && !taken.is_held(8) && !taken.is_held(11));
    taken.set(9, State::Released);
    assert_eq!(taken.forget_released(), 11);
    assert!(taken.is_empty());
}

#[test]
fn what_is_dropped_is_neither_held_nor_released() {
    let mut taken = taken(2);
    taken.set(7, State::Dropped);
    taken.set(8, State::Released);
    assert!(taken.any_dropped() && !taken.is_held(7));
    assert_eq!(taken.forget_released(), 7);
    taken.set(7, State::Released);
    assert_eq!(taken.forget_released(), 9);
    assert!(!taken.any_dropped());
}

#[test]
fn sequences_that_were_never_taken_change_nothing() {
    let mut taken = taken(1);
    taken.set(6, State::Released);
    taken.set(8, State::Released);
    assert_eq!(taken.forget_released(), 7);
    assert!(taken.is_held(7));
}
