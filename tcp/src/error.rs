//! The errors of connections.

use std::io;

use crate::authenticated::MAX_MESSAGE_BYTES;
use crate::handshake::VERSION;
use crate::key::MIN_KEY_BYTES;

/// An error of a connection. The text contains the cause.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TcpError {
    /// The deadline has passed.
    #[error("cannot {step}: timed out: the peer did not answer in time")]
    TimedOut {
        /// The step that was in progress.
        step: &'static str,
    },
    /// The peer has closed the connection, or another thread has shut it down.
    #[error("cannot {step}: closed by peer")]
    Closed {
        /// The step that was in progress.
        step: &'static str,
    },
    /// The system has reported an error.
    #[error("cannot {step}: {cause}")]
    Io {
        /// The step that was in progress.
        step: &'static str,
        /// The error of the system.
        cause: io::Error,
    },
    /// The system has generated no random bytes.
    #[error("cannot generate random bytes: {cause}")]
    Random {
        /// The error of the system.
        cause: io::Error,
    },
    /// The first bytes of the peer are not those of this protocol.
    #[error("protocol violation: the peer speaks another protocol; its first bytes are '{}'", bytes.escape_ascii())]
    OtherProtocol {
        /// The first bytes of the peer.
        bytes: [u8; 8],
    },
    /// The peer uses another version of the protocol.
    #[error(
        "the peer uses version {version} of the protocol, but this program uses version {VERSION}; use the same release of \
         device-ipc on both sides"
    )]
    Version {
        /// The version of the peer.
        version: u16,
    },
    /// The client states the id of a key that the server does not have. The client receives the same answer as with a wrong
    /// key.
    #[error("permission denied: the client states the key id {key_id}, which this server does not have")]
    UnknownKey {
        /// The id that the client states.
        key_id: u64,
    },
    /// The client does not know the key.
    #[error("permission denied: the client does not know the key")]
    ClientWithoutKey,
    /// The server refuses the client: it has a different key with this id, or no key with this id.
    #[error("permission denied: the server has a different key")]
    Refused,
    /// The server does not know the key.
    #[error("permission denied: the server does not know the key, so nothing is accepted from it")]
    ServerWithoutKey,
    /// A message is not the next one that the peer has sent.
    #[error("protocol violation: a message was modified in transit")]
    Modified,
    /// The peer announces a message above the limit of this side.
    #[error("protocol violation: the peer announces a message of {bytes} B, but the maximum is {limit} B")]
    ReceivedTooLong {
        /// The announced length in bytes.
        bytes: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// A key has fewer than [`MIN_KEY_BYTES`](crate::MIN_KEY_BYTES).
    #[error("the key has {bytes} B; use at least {MIN_KEY_BYTES} random bytes, the same on both sides")]
    ShortKey {
        /// The length of the key in bytes.
        bytes: usize,
    },
    /// A message to send is longer than [`MAX_MESSAGE_BYTES`]. Nothing has been sent, and the connection remains usable.
    #[error("cannot send a message of {bytes} B: the maximum is {MAX_MESSAGE_BYTES} B")]
    TooLong {
        /// The length of the message in bytes.
        bytes: usize,
    },
    /// An earlier send or receive of this connection has failed.
    #[error("cannot {step}: an earlier call on this connection failed; connect again")]
    Unusable {
        /// The step that was requested.
        step: &'static str,
    },
}
