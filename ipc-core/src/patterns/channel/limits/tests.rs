use super::*;

fn in_flight(sizes: &[u64]) -> MessagesInFlight {
    within(LIMITS, sizes)
}

fn within(limits: Limits, sizes: &[u64]) -> MessagesInFlight {
    let mut in_flight = MessagesInFlight::new(limits);
    sizes.iter().for_each(|size| in_flight.push(*size));
    in_flight
}

const LIMITS: Limits = Limits { messages: 3, bytes: 100 };

#[test]
fn room_is_stated_by_the_message_whose_receipt_makes_it() {
    assert_eq!(in_flight(&[]).room_at(0), None);
    assert_eq!(in_flight(&[10, 10]).room_at(80), None);
    assert_eq!(in_flight(&[10, 10]).room_at(81), Some(1));
    assert_eq!(in_flight(&[10, 10, 0]).room_at(0), Some(1));
    assert_eq!(in_flight(&[1, 99]).room_at(50), Some(2));
    let mut later = in_flight(&[50, 50]);
    later.acknowledge(1);
    later.push(50);
    assert_eq!(later.room_at(1), Some(2));
}

#[test]
fn message_above_the_byte_limit_is_sent_alone() {
    assert_eq!(in_flight(&[]).room_at(1000), None);
    assert_eq!(in_flight(&[1]).room_at(1000), Some(1));
    assert_eq!(in_flight(&[1000]).room_at(0), Some(1));
    let nothing = Limits { messages: 0, bytes: 0 };
    assert_eq!(within(nothing, &[]).room_at(1), None);
    assert_eq!(within(nothing, &[0]).room_at(0), Some(1));
}

#[test]
fn false_acknowledgement_changes_nothing_but_the_count() {
    let mut in_flight = in_flight(&[60, 60]);
    in_flight.acknowledge(u64::MAX);
    assert_eq!((in_flight.messages(), in_flight.bytes(), in_flight.received()), (0, 0, 2));
    in_flight.push(60);
    in_flight.acknowledge(0);
    in_flight.acknowledge(2);
    assert_eq!((in_flight.messages(), in_flight.bytes(), in_flight.received()), (1, 60, 2));
    in_flight.acknowledge(3);
    assert_eq!((in_flight.messages(), in_flight.bytes(), in_flight.received()), (0, 0, 3));
}
