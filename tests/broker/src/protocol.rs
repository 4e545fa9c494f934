//! The messages of `docs/spec/protocol.md`, written down a second time.

use serde::{Deserialize, Serialize};

/// From an importer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToExporter {
    /// The first message.
    Hello {
        /// The version.
        protocol: u16,
        /// The importer's name.
        program: String,
    },
    /// Asks for a lease.
    Open {
        /// Comes back with the answer.
        request: u64,
        /// The export's number.
        export: u64,
        /// The secret.
        token: [u8; 16],
        /// A grant that the lease uses up.
        grant: Option<[u8; 16]>,
        /// The requested access.
        access: Access,
        /// The importer's device.
        on: u32,
        /// The vendor's id of the importer.
        peer: Vec<u8>,
        /// A lease whose memory may be the same.
        like: Option<u64>,
    },
    /// Gives a lease back.
    Release {
        /// The lease.
        lease: u64,
        /// How its counters were used: awaited, signalled, seen closed; `None` while work is still submitted.
        words: Option<(u64, u64, u64)>,
        /// The same of leases that were released before.
        late: Vec<(u64, (u64, u64, u64))>,
    },
    /// Asks for exports.
    List {
        /// Comes back with the answer.
        request: u64,
        /// The number before the first.
        after: u64,
    },
    /// Asks whether the export of a lease has not been dropped.
    Confirm {
        /// Comes back with the answer.
        request: u64,
        /// The lease.
        lease: u64,
    },
    /// Requests the counters of a lease.
    Timeline {
        /// Comes back with the answer.
        request: u64,
        /// The lease.
        lease: u64,
        /// Whether the exporter reports by a counter when the bytes are ready.
        ready: bool,
    },
    /// Gives grants back that no lease has used up.
    EndGrants {
        /// The exports' numbers, and the secrets that open them once.
        grants: Vec<(u64, [u8; 16])>,
    },
    /// Asks for a lease, to have the bytes copied through host memory.
    Stage {
        /// Comes back with the answer.
        request: u64,
        /// The export's number.
        export: u64,
        /// The secret.
        token: [u8; 16],
        /// A grant that the lease uses up.
        grant: Option<[u8; 16]>,
        /// Region, offset and length of the bytes to copy; none for all.
        spans: Vec<(u32, u64, u64)>,
    },
    /// Asks for the next chunk of a copy.
    StageNext {
        /// Comes back with the answer.
        request: u64,
        /// The lease.
        lease: u64,
        /// The chunk's number.
        chunk: u64,
    },
    /// States that the process exits in order.
    Exit,
    /// Reports that the state of a watched lease has changed.
    LeaseChanged {
        /// The lease.
        lease: u64,
    },
    /// Asks for a grant of a lease's export.
    Grant {
        /// Comes back with the answer.
        request: u64,
        /// The lease.
        lease: u64,
        /// Its time limit in ms.
        limit_ms: u64,
    },
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
    Hello {
        /// The version.
        protocol: u16,
        /// The identity that it claims.
        exporter: Identity,
    },
    /// A lease.
    Opened(Opened),
    /// No lease.
    Refused {
        /// The request's number.
        request: u64,
        /// Why.
        refusal: Refusal,
    },
    /// An export has been dropped.
    Dropped {
        /// Its number.
        export: u64,
    },
    /// Recalls idle leases on an export.
    Recall {
        /// Its number.
        export: u64,
    },
    /// Some of the exports.
    Listing {
        /// The request's number.
        request: u64,
        /// In the order of their numbers.
        exports: Vec<Listed>,
        /// There are more.
        more: bool,
    },
    /// An export has not been dropped.
    Confirmed {
        /// The request's number.
        request: u64,
    },
    /// The first of a grant's handles.
    Handles {
        /// The request's number.
        request: u64,
        /// One for each allocation.
        handles: Vec<Handle>,
    },
    /// The location of a lease's counters. The page is attached.
    Timeline {
        /// The request's number.
        request: u64,
        /// The page's number on this connection.
        page: u32,
        /// The slot in it.
        slot: u32,
        /// The value of its words at which the counters are 0.
        base: u64,
    },
    /// A lease for copying. The memory comes along.
    Staging {
        /// The request's number.
        request: u64,
        /// The lease.
        lease: u64,
        /// Bytes of a chunk.
        chunk_bytes: u64,
        /// Bytes of the region.
        bytes: u64,
    },
    /// A chunk is there.
    Staged {
        /// The request's number.
        request: u64,
        /// The chunk's number.
        chunk: u64,
        /// Its bytes.
        bytes: u64,
    },
    /// A grant.
    Granted {
        /// The request's number.
        request: u64,
        /// The secret that opens the export once.
        token: [u8; 16],
    },
    /// Leases ahead of their opens.
    Ahead {
        /// The number of the request for another lease.
        request: u64,
        /// The leases.
        leases: Vec<LeaseAhead>,
    },
}

/// A lease on an export that the importer has not opened yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseAhead {
    /// The export's number.
    pub export: u64,
    /// The export's token.
    pub token: [u8; 16],
    /// The lease.
    pub lease: u64,
    /// The lease's word in the page of lease states.
    pub slot: u32,
    /// The event's handle.
    pub ready: Option<Vec<u8>>,
    /// The handle of the export's allocation, unless it is that of the opened export.
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
    /// Its number.
    pub export: u64,
    /// The backend's name.
    pub backend: String,
    /// Its bytes.
    pub bytes: u64,
    /// Milliseconds since it was made.
    pub age_ms: u64,
    /// How often it was opened.
    pub opened: u64,
    /// Has it been dropped?
    pub dropped: bool,
    /// Process id, program, milliseconds and state of each holder.
    pub holders: Vec<(u32, String, u64, LeaseState)>,
    /// How many there are.
    pub held_by: u64,
    /// How many of them are idle.
    pub idle: u64,
}

/// A lease and what opens the memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// The request's number.
    pub request: u64,
    /// The lease.
    pub lease: u64,
    /// One for each allocation.
    pub handles: Vec<Handle>,
    /// The event's handle.
    pub ready: Option<Vec<u8>>,
    /// May it be kept unused?
    pub keep: bool,
    /// Is to be confirmed after every open: the exporter does not own the memory.
    pub confirm: bool,
    /// The memory is that of the lease that the importer named.
    pub like: bool,
    /// The lease's word in the page of lease states.
    pub slot: Option<u32>,
}

/// The handle of one allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handle {
    /// The allocation's number.
    pub allocation: u64,
    /// The backend's kind.
    pub kind: u16,
    /// The vendor's bytes.
    pub bytes: Vec<u8>,
    /// How many of the packet's descriptors.
    pub fds: u16,
    /// Bytes of the allocation.
    pub size: u64,
    /// The vendor's number of it.
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
    UserNotAllowed {
        /// The user.
        uid: u32,
    },
    /// Not for that.
    Access {
        /// The access that the export permits.
        granted: Access,
    },
    /// Other memory is there now.
    Stale {
        /// The reason as text.
        detail: String,
    },
    /// Something else.
    Failed {
        /// The reason as text.
        detail: String,
    },
}

/// The identity that an exporter claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The machine.
    pub host: [u8; 16],
    /// Its last start.
    pub boot: [u8; 16],
    /// The pid namespace.
    pub pid_namespace: u64,
    /// The network namespace.
    pub net_namespace: u64,
    /// The process.
    pub pid: u32,
    /// Its start.
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
