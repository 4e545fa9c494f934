//! The messages between an importer and an exporter's broker. `docs/spec/protocol.md` specifies them; change both together.
//!
//! Each message is one packet, encoded by [postcard](https://postcard.jamesmunns.com/wire-format). File descriptors
//! travel with the packet that names them.

use serde::{Deserialize, Serialize};

use super::{Refusal, Token};
use crate::backend::{Access, HandleBytes, HandleKind};
use crate::model::address::Generation;
use crate::model::lease::{LeaseId, LeaseState};
use crate::os::process::ProcessIdentity;
use crate::wire::descriptor::ExportId;

/// The protocol version of this library. A broker answers a client of another version with its own version, and closes the
/// connection.
pub(crate) const PROTOCOL_VERSION: u16 = 1;

/// A message from an importer to a broker.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// The first message of a connection.
    Hello { protocol: u16, program: String },
    /// Requests a lease on an export, to open it on the device `on` of the importer's numbering. `peer` identifies the importer
    /// on the vendor's whitelist. `like` is a lease of the importer for the same device, whose memory may be that of the
    /// export. `grant` is a grant of the export, which the lease uses up.
    Open {
        request: RequestId,
        export: ExportId,
        token: Token,
        grant: Option<Token>,
        access: Access,
        on: u32,
        peer: Vec<u8>,
        like: Option<LeaseId>,
    },
    /// Releases a lease, with a report on its counter slot if it has one: `None` while the importer may still submit work that
    /// uses the slot. `late` are such reports for leases that were released earlier.
    Release { lease: LeaseId, words: Option<Returned>, late: Vec<(LeaseId, Returned)> },
    /// Requests the exports after this number that the importer may open, with their holders.
    List { request: RequestId, after: ExportId },
    /// Asks whether further importers may still open the export of a lease.
    Confirm { request: RequestId, lease: LeaseId },
    /// Requests a counter slot for a lease. With `ready`, the exporter's stream writes its ready word when the bytes are
    /// written.
    Timeline { request: RequestId, lease: LeaseId, ready: bool },
    /// Returns unused grants; [`Request::Open`] uses its grant itself. Has no reply.
    EndGrants { grants: Vec<(ExportId, Token)> },
    /// Requests a lease under which the exporter copies the bytes of these spans through shared host memory; without spans, the
    /// bytes of all regions. `grant` as for [`Request::Open`].
    Stage { request: RequestId, export: ExportId, token: Token, grant: Option<Token>, spans: Vec<Span> },
    /// Requests the next chunk of a copy; the importer has taken all chunks before it.
    StageNext { request: RequestId, lease: LeaseId, chunk: u64 },
    /// The importer's process exits in order; its leases end with the connection. Has no reply.
    Exit,
    /// Reports that the state of a lease has changed while the exporter watched it. Has no reply.
    LeaseChanged { lease: LeaseId },
    /// Requests a grant of the export of a lease, for another process; it ends after this time.
    Grant { request: RequestId, lease: LeaseId, limit_ms: u64 },
    /// Requests the table of claims of the export of a lease.
    Claims { request: RequestId, lease: LeaseId },
}

impl Request {
    /// Returns the release of a lease whose counter slot was not used.
    pub(crate) const fn release_unused(lease: LeaseId) -> Self {
        Self::Release { lease, words: Some(Returned { awaited: 0, signalled: 0, seen: 0 }), late: Vec::new() }
    }

    /// Returns whether the broker replies.
    pub(crate) const fn has_an_answer(&self) -> bool {
        !matches!(
            self,
            Self::Release { .. } | Self::EndGrants { .. } | Self::LeaseChanged { .. } | Self::Exit
        )
    }
}

/// An importer's report on a counter slot that it no longer uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Returned {
    /// The largest value of the exporter's counter, or of the ready word, that a stream of the importer waits for.
    pub(crate) awaited: u64,
    /// The largest value that the importer has signalled, or submitted to a stream.
    pub(crate) signalled: u64,
    /// The exporter's counter when the importer ended the timeline.
    pub(crate) seen: u64,
}

/// A message from a broker to an importer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// Answers [`Request::Hello`]. May carry descriptors: the page of [`Epoch`](crate::transport::Epoch), then the page with
    /// the states of this connection's leases.
    Hello { protocol: u16, exporter: ProcessIdentity },
    /// Answers [`Request::Open`]: the lease has begun.
    Opened(OpenedExport),
    /// Answers [`Request::Open`]: there is no lease.
    Refused { request: RequestId, refusal: Refusal },
    /// The exporter has dropped an export that this importer holds a lease on.
    Dropped { export: ExportId },
    /// The exporter waits until no importer holds the export: idle leases of it end now, and the importer keeps none from now
    /// on.
    Recall { export: ExportId },
    /// Answers [`Request::List`], in the order of the exports' numbers.
    Listing { request: RequestId, exports: Vec<ListedExport>, more: bool },
    /// Answers [`Request::Confirm`]; the other answer is [`Reply::Refused`].
    Confirmed { request: RequestId },
    /// The first handles for [`Request::Open`], if they do not fit one packet; [`Reply::Opened`] carries the last ones. The
    /// packet's descriptors belong to the handles in order.
    Handles { request: RequestId, handles: Vec<WireHandle> },
    /// Answers [`Request::Timeline`]: the counter slot, the page that contains it, and the value `base` that counts as 0.
    /// Carries the page's descriptor.
    Timeline { request: RequestId, page: PageId, slot: u32, base: u64 },
    /// Answers [`Request::Stage`]: the lease has begun, and `bytes` are copied under it. Carries the memory file of the chunks.
    Staging { request: RequestId, lease: LeaseId, chunk_bytes: u64, bytes: u64 },
    /// Answers [`Request::StageNext`]: the chunk has been copied to the memory file.
    Staged { request: RequestId, chunk: u64, bytes: u64 },
    /// Answers [`Request::Grant`].
    Granted { request: RequestId, token: Token },
    /// Precedes the [`Reply::Opened`] of an open by a grant: leases on other exports of the same allocation, which the importer
    /// has not opened yet.
    Ahead { request: RequestId, leases: Vec<LeaseAhead> },
    /// Answers [`Request::Claims`]: the number of the importer, and the descriptor of the table.
    Claims { request: RequestId, importer: u32 },
}

/// An export as processes without its token may see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ListedExport {
    /// The number of the export in the exporting process.
    pub export: ExportId,
    /// The backend of the memory.
    pub backend: String,
    /// The size of the export in bytes.
    pub bytes: u64,
    /// The age of the export in ms.
    pub age_ms: u64,
    /// The number of times that the export has been opened.
    pub opened: u64,
    /// Whether the export has been dropped, and remains for its holders.
    pub dropped: bool,
    /// The holders, longest first; at most 16.
    pub holders: Vec<ListedHolder>,
    /// The number of holders.
    pub held_by: u64,
    /// The number of holders whose lease is idle in their import cache.
    pub idle: u64,
}

/// A process that holds an export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ListedHolder {
    /// The process id in the exporter's pid namespace; 0 for a process of another one.
    pub pid: u32,
    /// The program's name, as the process states it.
    pub program: String,
    /// The age of the lease in ms.
    pub held_ms: u64,
    /// Whether it uses the memory.
    pub state: LeaseState,
}

/// Maximum numbers of exports in a listing and of holders of each, so that a listing fits a packet.
pub(crate) const LISTED_EXPORTS: usize = 32;
pub(crate) const LISTED_HOLDERS: usize = 16;

/// Maximum number of handles of a lease: the allocations of a bundle on one device.
pub(crate) const MAX_HANDLES: usize = 1 << 16;

/// The number of a request, counted by the importer; its reply has the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RequestId(pub(crate) u64);

/// A range of a region of an export: of a single region, counted from its start; of named tensors, from the start of the
/// region's first allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Span {
    pub(crate) region: u32,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// Maximum number of spans in a request, which then fits a packet for all values.
pub(crate) const MAX_SPANS: usize = 4096;

/// The number of a counter page on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct PageId(pub(crate) u32);

/// A lease and the handles of its memory.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct OpenedExport {
    pub(crate) request: RequestId,
    pub(crate) lease: LeaseId,
    /// In the order of the addresses. The packet's descriptors belong to the handles in order.
    pub(crate) handles: Vec<WireHandle>,
    /// The vendor's handle of the ready event.
    pub(crate) ready: Option<HandleBytes>,
    /// Whether the importer may keep the lease idle.
    pub(crate) keep: bool,
    /// Whether the memory is borrowed: the importer asks for a confirmation after it has opened the memory, and each time that
    /// it opens it again.
    pub(crate) confirm: bool,
    /// Whether the allocations are those of the lease that the importer named; there are no handles then.
    pub(crate) like: bool,
    /// The index of the lease's word in the page of lease states, if it has one.
    pub(crate) slot: Option<u32>,
    /// The leases of the [`Reply::Ahead`] before it.
    #[serde(skip)]
    pub(crate) ahead: Vec<LeaseAhead>,
}

/// An idle lease that an importer receives before it opens the export.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LeaseAhead {
    pub(crate) export: ExportId,
    pub(crate) token: Token,
    pub(crate) lease: LeaseId,
    /// The index of the lease's word in the page of lease states.
    pub(crate) slot: u32,
    /// The vendor's handle of the ready event.
    pub(crate) ready: Option<HandleBytes>,
    /// The handle of the export's allocation, unless it is that of the opened export.
    pub(crate) handle: Option<WireHandle>,
}

/// Maximum number of leases ahead for one open.
pub(crate) const MAX_LEASES_AHEAD: usize = 128;

/// The handle of one allocation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct WireHandle {
    pub(crate) allocation: AllocationId,
    pub(crate) kind: HandleKind,
    pub(crate) bytes: HandleBytes,
    /// The number of the packet's descriptors that belong to this handle.
    pub(crate) fds: u16,
    pub(crate) size: u64,
    pub(crate) generation: Option<Generation>,
}

impl WireHandle {
    /// The kind of a handle for another copy of the library in the exporting process itself: its bytes are the address of the
    /// allocation, little-endian. No backend has this kind. An importer accepts it from its own process only, as the kernel reports it.
    pub(crate) const OWN_ADDRESS: HandleKind = HandleKind(u16::MAX);
}

/// The number of an allocation in the exporting process: the same for all its exports, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct AllocationId(pub(crate) u64);

/// The initial capacity of a message, which fits most.
const USUAL_BYTES: usize = 128;

/// Encodes a message. Fails only if memory is exhausted.
pub(crate) fn encode<T: Serialize>(message: &T) -> crate::model::error::Result<Vec<u8>> {
    postcard::to_extend(message, Vec::with_capacity(USUAL_BYTES))
        .map_err(|error| crate::model::error::Error::Protocol(error.to_string()))
}

/// Decodes a message that takes all bytes.
pub(crate) fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, postcard::Error> {
    match postcard::take_from_bytes(bytes)? {
        (message, []) => Ok(message),
        _ => Err(postcard::Error::DeserializeBadEncoding),
    }
}

#[cfg(test)]
mod tests;
