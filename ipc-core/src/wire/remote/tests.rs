use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::wire::protocol::encode;

fn open() -> RemoteOpen {
    RemoteOpen {
        engine: "nixl".into(),
        wait_ms: 300,
        limit_ms: 70_000,
        host: HostId::from_bytes([7; 16]),
        pid: 4711,
        program: "trainer".into(),
    }
}

#[test]
fn encodings_are_those_of_the_specification() {
    let bytes = encode(&RemoteRequest::Open(open())).unwrap();
    let host = [7; 16];
    let expected =
        [&[0, 4][..], b"nixl", &[0xac, 2, 0xf0, 0xa2, 4], &host, &[0xe7, 0x24, 7], b"trainer"].concat();
    assert_eq!(bytes, expected);
    assert_eq!(encode(&RemoteRequest::Ping).unwrap(), [1]);
    assert_eq!(encode(&RemoteRequest::Release).unwrap(), [2]);
    let joining = encode(&RemoteRequest::Join(open())).unwrap();
    assert_eq!((joining[0], &joining[1..]), (3, &expected[1..]));
    assert_eq!(encode(&RemoteRequest::Acknowledge { sequence: 300 }).unwrap(), [4, 0xac, 2]);
    assert_eq!(encode(&RemoteRequest::Leave).unwrap(), [5]);
    assert_eq!(encode(&RemoteReply::Granted { regions: 2 }).unwrap(), [0, 2]);
    let regions = RemoteReply::Regions { metadata: vec![vec![9, 8], vec![7]] };
    assert_eq!(encode(&regions).unwrap(), [1, 2, 2, 9, 8, 1, 7]);
    assert_eq!(encode(&RemoteReply::Refused(RemoteRefusal::Dropped)).unwrap(), [2, 0]);
    assert_eq!(encode(&RemoteReply::Refused(RemoteRefusal::NoRing)).unwrap(), [2, 5]);
    assert_eq!(encode(&RemoteReply::Pong).unwrap(), [3]);
    assert_eq!(encode(&RemoteReply::Joined { sequence: 300 }).unwrap(), [4, 0xac, 2]);
    assert_eq!(encode(&RemoteReply::Published { sequence: 1 }).unwrap(), [5, 1]);
    assert_eq!(encode(&RemoteReply::Confirmed { sequence: 1 }).unwrap(), [6, 1]);
    assert_eq!(encode(&RemoteReply::Ended(RingEnd::Closed)).unwrap(), [7, 0]);
    assert_eq!(encode(&RemoteReply::Ended(RingEnd::Dismissed)).unwrap(), [7, 1]);
}

#[test]
fn invalid_messages_are_refused() {
    for engine in ["", "a b", &"n".repeat(33)] {
        for request in [RemoteRequest::Open, RemoteRequest::Join] {
            let request = request(RemoteOpen { engine: engine.into(), ..open() });
            RemoteRequest::decode(&encode(&request).unwrap()).unwrap_err();
        }
    }
    RemoteRequest::decode(&[1, 0]).unwrap_err();
    for regions in [0, MAX_REGIONS + 1] {
        RemoteReply::decode(&encode(&RemoteReply::Granted { regions }).unwrap()).unwrap_err();
    }
    RemoteReply::decode(&[1, 0]).unwrap_err();
    // A stated number of bytes that does not exist allocates nothing.
    RemoteReply::decode(&[1, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]).unwrap_err();
}

#[test]
fn texts_of_a_peer_are_cut_for_display() {
    let long = RemoteRequest::Open(RemoteOpen { program: format!("\x1b{}", "x".repeat(5000)), ..open() });
    let Ok(RemoteRequest::Open(open)) = RemoteRequest::decode(&encode(&long).unwrap()) else { panic!() };
    assert!(open.program.len() <= 64 && !open.program.contains('\x1b'));
    let refusal = RemoteReply::Refused(RemoteRefusal::Failed(Failure::quota("y".repeat(5000))));
    let Ok(RemoteReply::Refused(RemoteRefusal::Failed(Failure { detail, .. }))) =
        RemoteReply::decode(&encode(&refusal).unwrap())
    else {
        panic!()
    };
    assert_eq!(detail.len(), 2048);
}

/// Decodes bytes in both directions.
fn check(bytes: &[u8]) -> Result<(), TestCaseError> {
    if let Ok(read) = RemoteRequest::decode(bytes) {
        prop_assert_eq!(RemoteRequest::decode(&encode(&read).unwrap()), Ok(read));
    }
    if let Ok(read) = RemoteReply::decode(bytes) {
        prop_assert_eq!(RemoteReply::decode(&encode(&read).unwrap()), Ok(read));
    }
    Ok(())
}

proptest! {
    #[test]
    fn requests_round_trip(
        engine in "[a-zA-Z0-9_-]{1,32}",
        times in any::<(u32, u32, u32)>(),
        host in any::<[u8; 16]>(),
        program in "[ -~]{0,64}",
    ) {
        let (wait_ms, limit_ms, pid) = times;
        let open = RemoteOpen { engine, wait_ms, limit_ms, host: HostId::from_bytes(host), pid, program };
        for message in [RemoteRequest::Open(open.clone()), RemoteRequest::Join(open)] {
            prop_assert_eq!(RemoteRequest::decode(&encode(&message).unwrap()), Ok(message));
        }
    }

    #[test]
    fn sequences_round_trip(sequence in any::<u64>()) {
        let message = RemoteRequest::Acknowledge { sequence };
        prop_assert_eq!(RemoteRequest::decode(&encode(&message).unwrap()), Ok(message));
        for message in [
            RemoteReply::Joined { sequence },
            RemoteReply::Published { sequence },
            RemoteReply::Confirmed { sequence },
        ] {
            prop_assert_eq!(RemoteReply::decode(&encode(&message).unwrap()), Ok(message));
        }
    }

    #[test]
    fn replies_round_trip(metadata in vec(vec(any::<u8>(), 0..100), 1..5), detail in "[ -~]{0,100}") {
        let refused = |refusal| RemoteReply::Refused(refusal);
        for message in [
            RemoteReply::Regions { metadata },
            refused(RemoteRefusal::Stale { detail: detail.clone() }),
            refused(RemoteRefusal::Failed(Failure::quota(detail))),
            refused(RemoteRefusal::OtherEngine { engine: "other".into() }),
            refused(RemoteRefusal::NotReady),
            refused(RemoteRefusal::NoRing),
            RemoteReply::Ended(RingEnd::Dismissed),
        ] {
            prop_assert_eq!(RemoteReply::decode(&encode(&message).unwrap()), Ok(message));
        }
    }

    #[test]
    fn arbitrary_bytes_decode_or_fail(kind in 0..10_u8, mut bytes in vec(any::<u8>(), 1..300)) {
        check(&bytes)?;
        bytes[0] = kind;
        check(&bytes)?;
    }

    #[test]
    fn damaged_requests_decode_or_fail(damage in vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let mut bytes = encode(&RemoteRequest::Open(open())).unwrap();
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        check(&bytes)?;
    }
}
