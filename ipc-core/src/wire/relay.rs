//! The messages by which a channel passes between two hosts. `docs/spec/channel.md` specifies them; change both together.

use serde::{Deserialize, Serialize, Serializer};

use super::Token;
use super::channel::at_most_waiting;
use super::descriptor::ExportId;
use super::protocol::decode;

/// Maximum number of bytes of a channel message in one [`Relayed::Part`] or [`Relayed::Last`].
pub(crate) const MAX_PART_BYTES: usize = 4 << 20;

/// All bits of [`RelayedState::closed`].
const CLOSED: u8 = 3;

/// A message between the two processes of a channel, after their greetings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Relayed<'a> {
    /// A part of a message of the channel. Further parts follow.
    Part(#[serde(borrow, serialize_with = "whole")] &'a [u8]),
    /// The last part, or a whole message.
    Last(#[serde(borrow, serialize_with = "whole")] &'a [u8]),
    State(RelayedState),
    /// Grants of the receiver's exports that the sender no longer needs, at most [`MAX_ENDED_GRANTS`](super::channel::MAX_ENDED_GRANTS).
    #[serde(with = "at_most_waiting")]
    Ended(Vec<(ExportId, Token)>),
}

/// Serializes bytes by one copy. The derived code serializes a slice byte by byte, with the same result.
fn whole<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_bytes(bytes)
}

/// The counters of a process, which the processes of one host have in shared memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RelayedState {
    /// The number of messages that the process has received.
    pub(crate) received: u64,
    /// The number of messages that arrived after the process had closed its receiving direction.
    pub(crate) discarded: u64,
    /// The number of exports that it has opened or discarded.
    pub(crate) settled: u64,
    /// The directions that it has closed; that of sending after its last message.
    pub(crate) closed: u8,
    /// The last `closed` of the peer.
    pub(crate) seen: u8,
}

impl<'a> Relayed<'a> {
    /// Decodes a message. The bytes come from a process that knows the key.
    pub(crate) fn decode(bytes: &'a [u8]) -> Result<Self, String> {
        let decoded = decode(bytes).map_err(|error| error.to_string())?;
        match &decoded {
            Self::Part([]) => Err("a part without bytes".into()),
            Self::Part(part) | Self::Last(part) if part.len() > MAX_PART_BYTES => {
                Err(format!("a part of {} B, the maximum is {MAX_PART_BYTES} B", part.len()))
            }
            Self::State(state) if state.closed | state.seen > CLOSED => Err("an unknown direction".into()),
            _ => Ok(decoded),
        }
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn seeds_are_decoded() {
        for (name, bytes) in crate::fuzzing::relay_seeds() {
            assert!(Relayed::decode(&bytes).is_ok(), "{name}");
            crate::fuzzing::relay(&bytes);
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_no_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            crate::fuzzing::relay(&bytes);
        }

        #[test]
        fn states_round_trip(counters in any::<(u64, u64, u64)>(), bits in (0..4_u8, 0..4_u8)) {
            let ((received, discarded, settled), (closed, seen)) = (counters, bits);
            let state = Relayed::State(RelayedState { received, discarded, settled, closed, seen });
            let written = encode(&state).unwrap();
            prop_assert_eq!(Relayed::decode(&written), Ok(state));
        }
    }
}
