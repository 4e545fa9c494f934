//! The messages between an importer and an exporter's broker. `docs/spec/protocol.md` specifies them; the two change
//! together.
//!
//! Each message is one packet, encoded by [postcard](https://postcard.jamesmunns.com/wire-format). File descriptors
//! travel with the packet that names them.

use serde::{Deserialize, Serialize};

use super::Token;
use crate::backend::{Access, HandleBytes, HandleKind};
use crate::model::address::Generation;
use crate::model::lease::{LeaseId, LeaseState};
use crate::model::printable::printable;
use crate::os::process::ProcessIdentity;
use crate::wire::descriptor::ExportId;

/// The protocol that this library speaks. A server answers a client of another version with its own, and closes.
pub(crate) const PROTOCOL_VERSION: u16 = 1;

/// The longest program name that is taken over from a peer, in bytes.
const MAX_PROGRAM_BYTES: usize = 64;

/// Returns a program's name as it is shown: cut to a length, and [`printable`].
pub(crate) fn short_name(name: &str) -> String {
    shortened(name, MAX_PROGRAM_BYTES)
}

/// The longest text of an error that is taken over from a peer, in bytes.
const MAX_DETAIL_BYTES: usize = 2048;

/// Returns a peer's account of an error as it is shown.
pub(crate) fn short_detail(detail: &str) -> String {
    shortened(detail, MAX_DETAIL_BYTES)
}

fn shortened(text: &str, most_bytes: usize) -> String {
    let cut = |text: &str| -> String {
        let fits = |(start, c): &(usize, char)| start + c.len_utf8() <= most_bytes;
        text.char_indices().take_while(fits).map(|(_, c)| c).collect()
    };
    // Cut twice: a replaced character may be longer, and the first cut bounds the work.
    cut(&printable(&cut(text)))
}

/// From an importer to a broker.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// The first message of a connection.
    Hello { protocol: u16, program: String },
    /// Asks for a lease on an export, to open it on the device `on` of the importer's own numbering. `peer` is how the
    /// vendor knows the importer on a whitelist. `like` is a lease that the importer holds for that device, and whose memory
    /// may be the export's.
    Open {
        request: RequestId,
        export: ExportId,
        token: Token,
        access: Access,
        on: u32,
        peer: Vec<u8>,
        like: Option<LeaseId>,
    },
    /// Gives a lease back, with its words where it has any: `None` while the importer may still submit to them. `late` are
    /// words of leases that were released so.
    Release { lease: LeaseId, words: Option<Returned>, late: Vec<(LeaseId, Returned)> },
    /// Asks for the exports behind this one that the importer might open, and who holds them.
    List { request: RequestId, after: ExportId },
    /// Asks whether the export of a lease may still be opened by newcomers.
    Confirm { request: RequestId, lease: LeaseId },
    /// Asks for the words of a lease. With `ready` the exporter writes the first of them when the bytes are.
    Timeline { request: RequestId, lease: LeaseId, ready: bool },
    /// Gives grants back that came with messages of channels; [`Request::Open`] uses one up by itself. Has no answer.
    EndGrants { grants: Vec<(ExportId, Token)> },
    /// Requests a lease under which the exporter copies the bytes of these spans through shared host memory; without any
    /// span, the bytes of all regions.
    Stage { request: RequestId, export: ExportId, token: Token, spans: Vec<Span> },
    /// Asks for the next chunk of such a copy; the importer has taken those before it.
    StageNext { request: RequestId, lease: LeaseId, chunk: u64 },
    /// The importer's process exits in order; its leases end with the connection. Has no answer.
    Exit,
    /// Reports that the state of a lease has changed while the exporter watched it. Has no answer.
    LeaseChanged { lease: LeaseId },
}

impl Request {
    /// The release of a lease whose words have not been used.
    pub(crate) const fn release_unused(lease: LeaseId) -> Self {
        Self::Release { lease, words: Some(Returned { awaited: 0, signalled: 0, seen: 0 }), late: Vec::new() }
    }

    /// Does the importer get an answer, for which it mostly waits?
    pub(crate) const fn has_an_answer(&self) -> bool {
        !matches!(
            self,
            Self::Release { .. } | Self::EndGrants { .. } | Self::LeaseChanged { .. } | Self::Exit
        )
    }
}

/// An importer's report on a slot that it has finished with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Returned {
    /// The largest value of the exporter's counter, or of the ready word, that one of its streams was made to wait for.
    pub(crate) awaited: u64,
    /// The largest value that it has signalled, or submitted to a stream.
    pub(crate) signalled: u64,
    /// The exporter's counter when the importer ended the timeline.
    pub(crate) seen: u64,
}

/// From a broker to an importer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// Answers [`Request::Hello`]. May bring descriptors: the page of [`Epoch`](crate::transport::Epoch), and behind it the page
    /// with the states of this connection's leases.
    Hello { protocol: u16, exporter: ProcessIdentity },
    /// Answers [`Request::Open`]: the lease has begun.
    Opened(Opened),
    /// Answers [`Request::Open`]: there is no lease.
    Refused { request: RequestId, refusal: Refusal },
    /// The exporter has dropped an export that this importer holds a lease on.
    Dropped { export: ExportId },
    /// The exporter waits until nobody holds the export: leases that are kept unused go back, from now on at once.
    Recall { export: ExportId },
    /// Answers [`Request::List`], in the order of the exports' numbers.
    Listing { request: RequestId, exports: Vec<ListedExport>, more: bool },
    /// Answers [`Request::Confirm`]; the other answer is [`Reply::Refused`].
    Confirmed { request: RequestId },
    /// The first of the handles that [`Request::Open`] asked for, where they do not fit one packet; [`Reply::Opened`] brings the
    /// last of them. The packet's descriptors belong to them one after the other.
    Handles { request: RequestId, handles: Vec<WireHandle> },
    /// Answers [`Request::Timeline`]: the words are in this slot of this page, and their counters are 0 at `base`. Brings the
    /// page's descriptor.
    Timeline { request: RequestId, page: PageId, slot: u32, base: u64 },
    /// Answers [`Request::Stage`]: the lease has begun, and `bytes` are copied under it. Brings the memory file that the chunks
    /// lie in.
    Staging { request: RequestId, lease: LeaseId, chunk_bytes: u64, bytes: u64 },
    /// Answers [`Request::StageNext`]: the chunk has been copied to the memory file.
    Staged { request: RequestId, chunk: u64, bytes: u64 },
}

/// An export, as others may know it: without its token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ListedExport {
    /// Its number in the exporting process.
    pub export: ExportId,
    /// The backend it belongs to.
    pub backend: String,
    /// Bytes of its region.
    pub bytes: u64,
    /// How many milliseconds ago it was made.
    pub age_ms: u64,
    /// How many times it has been opened.
    pub opened: u64,
    /// It has been dropped, and stays for those who still hold it.
    pub dropped: bool,
    /// Those who hold it, the longest first; at most sixteen of them.
    pub holders: Vec<ListedHolder>,
    /// How many hold it.
    pub held_by: u64,
    /// How many of them hold it idle, in their import caches.
    pub idle: u64,
}

/// A process that holds an export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ListedHolder {
    /// Its process id in the exporter's pid namespace; 0 for a process of another one.
    pub pid: u32,
    /// Its program, as it calls itself.
    pub program: String,
    /// For how many milliseconds it has held the export.
    pub held_ms: u64,
    /// Whether it uses the memory.
    pub state: LeaseState,
}

/// How many exports a listing holds at most, and how many holders of each, so that it fits a message.
pub(crate) const LISTED_EXPORTS: usize = 32;
pub(crate) const LISTED_HOLDERS: usize = 16;

/// How many handles a lease brings at most: the allocations of a bundle on one device.
pub(crate) const MAX_HANDLES: usize = 1 << 16;

/// Tells answers apart; the importer counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RequestId(pub(crate) u64);

/// Bytes of a region of an export: of a single region, counted from its start; of named tensors, from the start of the
/// region's first allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Span {
    pub(crate) region: u32,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// The maximum number of spans in a request, which then fits a packet whatever the numbers are.
pub(crate) const MAX_SPANS: usize = 4096;

/// The number of a page of words on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct PageId(pub(crate) u32);

/// A lease, and what opens the memory.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Opened {
    pub(crate) request: RequestId,
    pub(crate) lease: LeaseId,
    /// In the order of their addresses. The packet's descriptors belong to them one after the other.
    pub(crate) handles: Vec<WireHandle>,
    /// The vendor's handle of the event that says when the bytes have been written.
    pub(crate) ready: Option<HandleBytes>,
    /// May the importer keep the lease while nobody uses it?
    pub(crate) keep: bool,
    /// The memory is not the exporter's own: the importer asks for a confirmation after it has opened the memory, and
    /// whenever it opens it again.
    pub(crate) confirm: bool,
    /// The allocations are those of the lease that the importer named: there are no handles then.
    pub(crate) like: bool,
    /// The lease's word in the page of lease states, where it has one.
    pub(crate) slot: Option<u32>,
}

/// The handle of one allocation.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct WireHandle {
    pub(crate) allocation: AllocationId,
    pub(crate) kind: HandleKind,
    pub(crate) bytes: HandleBytes,
    /// How many of the packet's descriptors are this handle's.
    pub(crate) fds: u16,
    pub(crate) size: u64,
    pub(crate) generation: Option<Generation>,
}

/// The number of an allocation in the exporting process: the same for all its exports, never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct AllocationId(pub(crate) u64);

/// Why there is no lease.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Refusal {
    /// The export has been dropped (numbers are never given twice, so it once was).
    Dropped,
    /// The token is not the export's.
    WrongToken,
    /// The kernel says that the importer is a user whom the exporter does not allow.
    UserNotAllowed { uid: u32 },
    /// The export does not permit this access.
    Access { granted: Access },
    /// The memory was freed under a borrowed export.
    Stale { detail: String },
    /// Anything else, in words.
    Failed { detail: String },
}

/// What most messages have room in.
const USUAL_BYTES: usize = 128;

/// Encodes a message. Fails only for what is larger than memory.
pub(crate) fn encode<T: Serialize>(message: &T) -> crate::model::error::Result<Vec<u8>> {
    postcard::to_extend(message, Vec::with_capacity(USUAL_BYTES))
        .map_err(|error| crate::model::error::Error::Protocol(error.to_string()))
}

/// Decodes a message that takes all the bytes.
pub(crate) fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, postcard::Error> {
    match postcard::take_from_bytes(bytes)? {
        (message, []) => Ok(message),
        _ => Err(postcard::Error::DeserializeBadEncoding),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_read_back_and_bytes_left_over_are_refused() {
        let mut bytes =
            encode(&Request::Release { lease: LeaseId(300), words: None, late: Vec::new() }).unwrap();
        assert_eq!(bytes, [2, 172, 2, 0, 0], "the encoding is part of docs/spec/protocol.md");
        assert!(matches!(decode(&bytes), Ok(Request::Release { lease: LeaseId(300), .. })));
        bytes.push(0);
        assert!(decode::<Request>(&bytes).is_err());
    }

    #[test]
    fn a_long_name_is_cut_between_characters() {
        assert_eq!(short_name("python3"), "python3");
        assert_eq!(short_name(&"ü".repeat(40)).len(), 64);
        assert_eq!(short_name(&format!("x{}", "ü".repeat(40))).len(), 63);
        assert_eq!(short_name("a\u{1b}[2J\nb"), "a\u{fffd}[2J\u{fffd}b");
        assert_eq!(short_name(&"\u{7}".repeat(64)).len(), 63);
    }

    #[test]
    fn a_length_that_lies_allocates_nothing() {
        // An Open whose peer id claims 2^63 bytes.
        let mut bytes = vec![1, 0, 0];
        bytes.extend([0; 16]);
        bytes.extend([1, 0]);
        bytes.extend([0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]);
        assert!(decode::<Request>(&bytes).is_err());
    }
}
