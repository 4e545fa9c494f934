//! The messages by which an importer of another host requests the right to pull an export's memory, once or as a reader of a ring.
//! `docs/spec/remote.md` specifies them; change both together.
//!
//! They travel over a TCP connection on which both sides have proved that they know the export's token.

use serde::{Deserialize, Serialize};

use crate::model::device::HostId;
use crate::wire::protocol::{decode, short_detail, short_name};

/// Maximum number of bytes of metadata in one message; the metadata of one region may exceed it alone.
pub(crate) const METADATA_BATCH_BYTES: usize = 256 * 1024;

/// Maximum number of regions of an export on one device: that of the descriptor's allocations.
const MAX_REGIONS: u32 = super::MAX_HANDLES as u32;

/// Maximum length of an engine's name in bytes.
const MAX_ENGINE_BYTES: usize = 32;

/// A message from an importer to an exporter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum RemoteRequest {
    /// Requests a lease on the export whose token the importer has proved.
    Open(RemoteOpen),
    /// States that the importer still reads. Answered by [`RemoteReply::Pong`].
    Ping,
    /// Releases the lease. Has no reply.
    Release,
    /// Requests a lease on the export as a reader of its ring.
    Join(RemoteOpen),
    /// States that the bytes of this sequence of the ring have arrived. Answered by [`RemoteReply::Confirmed`], unless the ring has
    /// ended.
    Acknowledge { sequence: u64 },
    /// States that this reader of the ring reads no further publications, while its engine may still read the memory.
    Leave,
}

/// A request for a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RemoteOpen {
    /// The name of the importer's transfer engine.
    pub(crate) engine: String,
    /// The time for which the importer waits for the reply, in ms.
    pub(crate) wait_ms: u32,
    /// The time limit of the transfer, in ms.
    pub(crate) limit_ms: u32,
    /// The importer, for the exporter's list of holders.
    pub(crate) host: HostId,
    pub(crate) pid: u32,
    pub(crate) program: String,
}

/// A message from an exporter to an importer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum RemoteReply {
    /// The lease has begun. The metadata of this number of regions follows.
    Granted { regions: u32 },
    /// The engine's metadata of further regions, in the order of the descriptor.
    Regions { metadata: Vec<Vec<u8>> },
    /// There is no lease.
    Refused(RemoteRefusal),
    /// Answers [`RemoteRequest::Ping`].
    Pong,
    /// The reader of the ring begins with this sequence.
    Joined { sequence: u64 },
    /// The ring has published this sequence.
    Published { sequence: u64 },
    /// Answers [`RemoteRequest::Acknowledge`]: the slot of this sequence had not been reused.
    Confirmed { sequence: u64 },
    /// There are no further publications for this reader.
    Ended(RingEnd),
}

/// The reason for which a ring has no further publications for a reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum RingEnd {
    /// The writer has closed the ring. All sequences have been announced, and can be read.
    Closed,
    /// The writer has dismissed the reader. Bytes that have not been confirmed may have been overwritten.
    Dismissed,
}

/// The reason for which an exporter grants no lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum RemoteRefusal {
    /// The export has been dropped.
    Dropped,
    /// The exporter uses the engine of this name.
    OtherEngine { engine: String },
    /// The streams of the exporter have not written the bytes in time.
    NotReady,
    /// The memory was freed.
    Stale { detail: String },
    /// The exporter cannot register the memory.
    Failed { detail: String },
    /// The export is no ring.
    NoRing,
}

impl RemoteRequest {
    /// Decodes a message. The bytes may come from any process that knows the token.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let mut decoded: Self = decode(bytes).map_err(|error| error.to_string())?;
        if let Self::Open(open) | Self::Join(open) = &mut decoded {
            check_engine(&open.engine)?;
            open.program = short_name(&open.program);
        }
        Ok(decoded)
    }
}

impl RemoteReply {
    /// Decodes a message. The bytes come from a process that knows the token.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, String> {
        let mut decoded: Self = decode(bytes).map_err(|error| error.to_string())?;
        match &mut decoded {
            Self::Granted { regions: 1..=MAX_REGIONS } => {}
            Self::Granted { regions } => return Err(format!("{regions} regions, not 1 to {MAX_REGIONS}")),
            Self::Regions { metadata } if metadata.is_empty() => return Err("no regions in a message".into()),
            Self::Refused(RemoteRefusal::OtherEngine { engine }) => check_engine(engine)?,
            Self::Refused(RemoteRefusal::Stale { detail } | RemoteRefusal::Failed { detail }) => {
                *detail = short_detail(detail);
            }
            _ => {}
        }
        Ok(decoded)
    }
}

/// Checks the name of an engine: 1 to 32 ASCII letters, digits, `-` and `_`.
fn check_engine(name: &str) -> Result<(), String> {
    let is_name = (1..=MAX_ENGINE_BYTES).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'));
    if is_name { Ok(()) } else { Err("the name of the engine is invalid".into()) }
}

#[cfg(test)]
mod tests {
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
        let refusal = RemoteReply::Refused(RemoteRefusal::Failed { detail: "y".repeat(5000) });
        let Ok(RemoteReply::Refused(RemoteRefusal::Failed { detail })) =
            RemoteReply::decode(&encode(&refusal).unwrap())
        else {
            panic!()
        };
        assert_eq!(detail.len(), 2048);
    }

    #[test]
    fn seeds_are_decoded() {
        for (name, bytes) in crate::fuzzing::remote_seeds() {
            let is_request = ["open", "ping", "release", "join", "acknowledge", "leave"].contains(&name);
            assert_eq!(RemoteRequest::decode(&bytes).is_ok() && is_request, is_request, "{name}");
            assert!(is_request || RemoteReply::decode(&bytes).is_ok(), "{name}");
            crate::fuzzing::remote(&bytes);
        }
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
                refused(RemoteRefusal::Failed { detail }),
                refused(RemoteRefusal::OtherEngine { engine: "other".into() }),
                refused(RemoteRefusal::NotReady),
                refused(RemoteRefusal::NoRing),
                RemoteReply::Ended(RingEnd::Dismissed),
            ] {
                prop_assert_eq!(RemoteReply::decode(&encode(&message).unwrap()), Ok(message));
            }
        }

        #[test]
        fn arbitrary_bytes_are_no_panic(bytes in vec(any::<u8>(), 0..300)) {
            crate::fuzzing::remote(&bytes);
        }
    }
}
