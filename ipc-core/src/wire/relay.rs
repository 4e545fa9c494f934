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
mod tests;
