//! The messages of `docs/spec/protocol.md`, written down a second time.

#![allow(missing_docs, reason = "the specification describes the fields")]

use serde::{Deserialize, Serialize};

/// From an importer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToExporter {
    /// The first message.
    Hello { protocol: u16, program: String },
    /// Asks for a lease.
    Open(Open),
    /// Gives a lease back.
    Release { lease: u64, words: Option<(u64, u64, u64)>, late: Vec<(u64, (u64, u64, u64))> },
    /// Asks for exports.
    List { request: u64, after: u64 },
    /// Asks whether the export of a lease has not been dropped.
    Confirm { request: u64, lease: u64 },
    /// Requests the counters of a lease.
    Timeline { request: u64, lease: u64, ready: bool },
    /// Gives grants back that no lease has used up.
    EndGrants { grants: Vec<(u64, [u8; 16])> },
    /// Asks for a lease, to have the bytes copied through host memory.
    Stage(Stage),
    /// Asks for the next chunk of a copy.
    StageNext { request: u64, lease: u64, chunk: u64 },
    /// States that the process exits in order.
    Exit,
    /// Reports that the state of a watched lease has changed.
    LeaseChanged { lease: u64 },
    /// Asks for a grant of a lease's export.
    Grant { request: u64, lease: u64, limit_ms: u64 },
}

/// A request for a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    pub request: u64,
    pub export: u64,
    pub token: [u8; 16],
    pub grant: Option<[u8; 16]>,
    pub access: Access,
    pub on: u32,
    pub peer: Vec<u8>,
    pub like: Option<u64>,
}

/// A request for a copy. The spans are regions, offsets and lengths; none for all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    pub request: u64,
    pub export: u64,
    pub token: [u8; 16],
    pub grant: Option<[u8; 16]>,
    pub spans: Vec<(u32, u64, u64)>,
}

/// The access that an importer requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Access {
    /// To read.
    ReadOnly,
    /// To read and to write.
    ReadWrite,
}

/// From an exporter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromExporter {
    /// Answers a hello.
    Hello { protocol: u16, exporter: Identity },
    /// A lease.
    Opened(Opened),
    /// No lease.
    Refused { request: u64, refusal: Refusal },
    /// An export has been dropped.
    Dropped { export: u64 },
    /// Recalls idle leases on an export.
    Recall { export: u64 },
    /// Some of the exports.
    Listing { request: u64, exports: Vec<Listed>, more: bool },
    /// An export has not been dropped.
    Confirmed { request: u64 },
    /// The first of a grant's handles.
    Handles { request: u64, handles: Vec<Handle> },
    /// The location of a lease's counters. The page is attached.
    Timeline { request: u64, page: u32, slot: u32, base: u64 },
    /// A lease for copying. The memory comes along.
    Staging { request: u64, lease: u64, chunk_bytes: u64, bytes: u64 },
    /// A chunk is there.
    Staged { request: u64, chunk: u64, bytes: u64 },
    /// A grant.
    Granted { request: u64, token: [u8; 16] },
    /// Leases ahead of their opens.
    Ahead { request: u64, leases: Vec<LeaseAhead> },
}

/// A lease on an export that the importer has not opened yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseAhead {
    pub export: u64,
    pub token: [u8; 16],
    pub lease: u64,
    pub slot: u32,
    pub ready: Option<Vec<u8>>,
    pub handle: Option<Handle>,
}

/// The use of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LeaseState {
    /// A mapping uses it.
    InUse,
    /// Device work may use it.
    Draining,
    /// Only the import cache keeps it.
    Idle,
    /// It has been sent.
    InMessage,
}

/// An export in a listing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed {
    pub export: u64,
    pub backend: String,
    pub bytes: u64,
    pub age_ms: u64,
    pub opened: u64,
    pub dropped: bool,
    pub holders: Vec<(u32, String, u64, LeaseState)>,
    pub held_by: u64,
    pub idle: u64,
}

/// A lease and what opens the memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    pub request: u64,
    pub lease: u64,
    pub handles: Vec<Handle>,
    pub ready: Option<Vec<u8>>,
    pub keep: bool,
    pub confirm: bool,
    pub like: bool,
    pub slot: Option<u32>,
}

impl Opened {
    /// A lease with these handles, which the importer may keep idle.
    pub const fn of(request: u64, lease: u64, handles: Vec<Handle>) -> Self {
        Self { request, lease, handles, ready: None, keep: true, confirm: false, like: false, slot: None }
    }
}

/// The handle of one allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handle {
    pub allocation: u64,
    pub kind: u16,
    pub bytes: Vec<u8>,
    pub fds: u16,
    pub size: u64,
    pub generation: Option<u64>,
}

/// Why there is no lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// The export is closed.
    Dropped,
    /// It is another secret.
    WrongToken,
    /// The user may not.
    UserNotAllowed { uid: u32 },
    /// Not for that.
    Access { granted: Access },
    /// Other memory is there now.
    Stale { detail: String },
    /// An error of this kind, by its number.
    Failed { kind: u8, detail: String },
}

/// The identity that an exporter claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub host: [u8; 16],
    pub boot: [u8; 16],
    pub pid_namespace: u64,
    pub net_namespace: u64,
    pub pid: u32,
    pub start_time: u64,
}

impl ToExporter {
    /// The release of a lease whose counters were not used.
    pub const fn release(lease: u64) -> Self {
        Self::Release { lease, words: Some((0, 0, 0)), late: Vec::new() }
    }
}

impl Identity {
    /// This process, where `other` is one of this machine and these namespaces.
    pub fn of_this_process(other: Self) -> Self {
        let stat = std::fs::read_to_string("/proc/self/stat").expect("/proc is there");
        let fields = stat.rsplit_once(')').expect("a name in parentheses").1;
        let start_time = fields.split_whitespace().nth(19).and_then(|field| field.parse().ok());
        Self { pid: std::process::id(), start_time: start_time.expect("field 22 is a number"), ..other }
    }
}
