//! The messages by which an importer of another host requests the right to pull an export's memory, once or as a reader of a ring.
//! `docs/spec/remote.md` specifies them; change both together.
//!
//! They travel over a TCP connection on which both sides have proved that they know the export's token.

use serde::{Deserialize, Serialize};

use super::Failure;
use crate::model::device::HostId;
use crate::wire::protocol::decode;
use crate::wire::{short_detail, short_name};

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
    /// An error of the exporter, for example of the registration of the memory.
    Failed(Failure),
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
            Self::Refused(
                RemoteRefusal::Stale { detail } | RemoteRefusal::Failed(Failure { detail, .. }),
            ) => *detail = short_detail(detail),
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
mod tests;
