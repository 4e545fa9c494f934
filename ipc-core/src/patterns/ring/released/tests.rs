use super::*;

fn taken(count: usize) -> TakenSlots {
    let mut taken = TakenSlots::from(7);
    (0..count).for_each(|_| taken.take());
    taken
}

#[test]
fn release_out_of_order_waits_for_older_slots() {
    let mut taken = taken(4);
    taken.set(8, SlotState::Released);
    taken.set(10, SlotState::Released);
    assert_eq!(taken.remove_released(), 7);
    assert_eq!(taken.released_after_first().count(), 1);
    taken.remove_signalled(1);
    assert_eq!(taken.first(), 9);
    assert!(taken.is_held(9) && !taken.is_held(10) && !taken.is_held(8) && !taken.is_held(11));
    taken.set(9, SlotState::Released);
    assert_eq!(taken.remove_released(), 11);
    assert!(taken.is_empty());
}

#[test]
fn dropped_slot_is_neither_held_nor_released() {
    let mut taken = taken(2);
    taken.set(7, SlotState::Dropped);
    taken.set(8, SlotState::Released);
    assert!(taken.any_dropped() && !taken.is_held(7));
    assert_eq!(taken.remove_released(), 7);
    taken.set(7, SlotState::Released);
    assert_eq!(taken.remove_released(), 9);
    assert!(!taken.any_dropped());
}

#[test]
fn untaken_sequences_are_ignored() {
    let mut taken = taken(1);
    taken.set(6, SlotState::Released);
    taken.set(8, SlotState::Released);
    assert_eq!(taken.remove_released(), 7);
    assert!(taken.is_held(7));
}
