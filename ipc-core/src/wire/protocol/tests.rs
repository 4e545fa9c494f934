use super::*;

#[test]
fn message_round_trips_and_extra_bytes_are_rejected() {
    let mut bytes = encode(&Request::Release { lease: LeaseId(300), words: None, late: Vec::new() }).unwrap();
    assert_eq!(bytes, [2, 172, 2, 0, 0], "the encoding is part of docs/spec/protocol.md");
    assert!(matches!(decode(&bytes), Ok(Request::Release { lease: LeaseId(300), .. })));
    bytes.push(0);
    assert!(decode::<Request>(&bytes).is_err());
}

#[test]
fn false_length_allocates_nothing() {
    // An Open whose peer id claims 2^63 bytes.
    let mut bytes = vec![1, 0, 0];
    bytes.extend([0; 16]);
    bytes.extend([1, 0]);
    bytes.extend([0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]);
    assert!(decode::<Request>(&bytes).is_err());
}
