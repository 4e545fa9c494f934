//! What the two processes of a row say to each other, a line of JSON each.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::raw::RawHandle;

/// To the second process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Command {
    /// Allocates so many blocks of so many bytes and shares each so many times.
    Share { blocks: usize, bytes: u64, times: usize },
    /// Allocates further blocks and makes bare handles of them, for the process that the vendor knows so.
    RawHandles { blocks: usize, bytes: u64, peer: Vec<u8> },
    /// Frees those blocks again.
    ForgetRaw,
    /// Ends all exports.
    Unshare,
    /// Answers on a bare socket from now on; it spins for what comes, or sleeps.
    Echo { spins: bool },
    /// Opens what comes over a bare socket from now on, and acknowledges it.
    Receive,
    /// Acknowledges what comes in pieces over a bare socket from now on; opens it before, as a bundle, where `open` says so.
    ReceiveBundles { open: bool },
    /// Submits so many rounds of waiting and signalling by the timeline of the export's first importer.
    TimelineRounds { first: u64, rounds: u64 },
    /// The same by bare calls, with the two words of a page of this process.
    RawRounds { page: PathBuf, on: Words, first: u64, rounds: u64 },
    /// Waits for the stream.
    Synchronize,
    /// Opens what the file's lines name, as many as this.
    OpenAll { file: PathBuf, count: usize },
    /// Lets go of everything.
    LetGo,
    /// Measures what the library holds in memory, and counts its threads.
    Footprint { count: usize },
    /// Measures the first look for backends.
    StartUp,
    /// Joins a ring.
    JoinRing { descriptor: String },
    /// Takes and releases so many sequences of the ring: by the host, which spins, or by its stream.
    RingRounds { rounds: u64, by: Hand },
    /// The bare counterpart of a spinning host: waits for each value in a page's word, and answers in the other.
    SpinRounds { page: PathBuf, first: u64, rounds: u64 },
    /// Copies so many buckets of the ring into memory of its own, by its stream.
    CopyBuckets { buckets: usize },
    /// Copies so many buckets from one of its own to the next, by its stream, whatever others do. They are those of
    /// [`CopyBuckets`](Self::CopyBuckets).
    CopyOwnBuckets { buckets: usize },
    /// How often a host has waited for a ring.
    HostWaits,
    /// Leaves the ring.
    LeaveRing,
    /// Opens what comes over a channel from now on, and acknowledges it.
    ReceiveByChannel { spins: bool },
    /// Copies what comes over a channel to memory of its own device and sends that back; what comes is opened, or taken as a
    /// copy through the host.
    Transport { staged: bool, bytes: u64 },
}

/// Where the words of [`Command::RawRounds`] lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Words {
    Host,
    Device,
}

/// Who takes and releases in [`Command::RingRounds`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Hand {
    Host,
    Stream,
}

/// From the second process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Done,
    Shared { descriptors: Vec<String> },
    Handles { handles: Vec<RawHandle> },
    Listening { name: String },
    Footprint(Footprint),
    StartUp { nanoseconds: f64 },
    Waits { count: u64 },
    Failed { why: String },
}

/// What the library holds in a process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Footprint {
    pub(crate) bytes_per_export: f64,
    pub(crate) bytes_per_mapping: f64,
    pub(crate) bytes_per_lease: f64,
    pub(crate) threads: f64,
}
