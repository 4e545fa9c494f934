use super::*;

fn in_flight(sizes: &[u64]) -> InFlight {
    let mut in_flight = InFlight::default();
    sizes.iter().for_each(|size| in_flight.push(*size));
    in_flight
}

const LIMITS: Limits = Limits { messages: 3, bytes: 100 };

#[test]
fn room_is_stated_by_the_message_whose_receipt_makes_it() {
    assert_eq!(in_flight(&[]).room_at(0, LIMITS), None);
    assert_eq!(in_flight(&[10, 10]).room_at(80, LIMITS), None);
    assert_eq!(in_flight(&[10, 10]).room_at(81, LIMITS), Some(1));
    assert_eq!(in_flight(&[10, 10, 0]).room_at(0, LIMITS), Some(1));
    assert_eq!(in_flight(&[1, 99]).room_at(50, LIMITS), Some(2));
    let mut later = in_flight(&[50, 50]);
    later.acknowledge(1);
    later.push(50);
    assert_eq!(later.room_at(1, LIMITS), Some(2));
}

#[test]
fn message_above_the_byte_limit_is_sent_alone() {
    assert_eq!(in_flight(&[]).room_at(1000, LIMITS), None);
    assert_eq!(in_flight(&[1]).room_at(1000, LIMITS), Some(1));
    assert_eq!(in_flight(&[1000]).room_at(0, LIMITS), Some(1));
    let nothing = Limits { messages: 0, bytes: 0 };
    assert_eq!(in_flight(&[]).room_at(1, nothing), None);
    assert_eq!(in_flight(&[0]).room_at(0, nothing), Some(1));
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
