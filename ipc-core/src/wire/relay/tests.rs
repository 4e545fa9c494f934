use proptest::prelude::*;

use super::*;
use crate::wire::protocol::encode;

fn state() -> RelayedState {
    RelayedState { received: 300, discarded: 0, settled: 2, closed: 1, seen: 3 }
}

#[test]
fn encodings_are_those_of_the_specification() {
    assert_eq!(encode(&Relayed::Part(b"ab")).unwrap(), [0, 2, b'a', b'b']);
    assert_eq!(encode(&Relayed::Last(b"")).unwrap(), [1, 0]);
    assert_eq!(encode(&Relayed::State(state())).unwrap(), [2, 0xac, 2, 0, 2, 1, 3]);
    let ended = Relayed::Ended(vec![(ExportId(7), Token::from_bytes([9; 16]))]);
    assert_eq!(encode(&ended).unwrap(), [&[3, 1, 7][..], &[9; 16]].concat());
}

#[test]
fn invalid_messages_are_rejected() {
    let long = vec![0; MAX_PART_BYTES + 1];
    let closed = RelayedState { closed: 4, ..state() };
    let seen = RelayedState { seen: 4, ..state() };
    let grant = (ExportId(7), Token::from_bytes([9; 16]));
    for invalid in [
        Relayed::Part(b""),
        Relayed::Part(&long),
        Relayed::Last(&long),
        Relayed::State(closed),
        Relayed::State(seen),
        Relayed::Ended(vec![grant; crate::wire::channel::MAX_ENDED_GRANTS + 1]),
    ] {
        Relayed::decode(&encode(&invalid).unwrap()).unwrap_err();
    }
    Relayed::decode(&[1, 0, 0]).unwrap_err();
    Relayed::decode(&[]).unwrap_err();
}

fn check(bytes: &[u8]) -> Result<(), TestCaseError> {
    if let Ok(read) = Relayed::decode(bytes) {
        let written = encode(&read).unwrap();
        prop_assert_eq!(Relayed::decode(&written), Ok(read));
    }
    Ok(())
}

proptest! {
    #[test]
    fn arbitrary_bytes_decode_or_fail(kind in 0..5_u8, mut bytes in proptest::collection::vec(any::<u8>(), 1..300)) {
        check(&bytes)?;
        bytes[0] = kind;
        check(&bytes)?;
    }

    #[test]
    fn states_round_trip(counters in any::<(u64, u64, u64)>(), bits in (0..4_u8, 0..4_u8)) {
        let ((received, discarded, settled), (closed, seen)) = (counters, bits);
        let state = Relayed::State(RelayedState { received, discarded, settled, closed, seen });
        let written = encode(&state).unwrap();
        prop_assert_eq!(Relayed::decode(&written), Ok(state));
    }
}
