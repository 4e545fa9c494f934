//! Messages between the two processes of a row, one line of JSON each.

use std::path::PathBuf;

use device_ipc::Descriptor;
use serde::{Deserialize, Serialize};

/// A command to the peer process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Command {
    /// Allocates blocks of this size and shares each of them `times` times.
    Share { blocks: usize, bytes: u64, times: usize },
    /// Allocates blocks that importers can map at reserved addresses, and shares each.
    ShareRemappable { blocks: usize, bytes: u64 },
    /// Allocates further blocks and exports raw handles of them, for the process with this vendor id.
    RawHandles { blocks: usize, bytes: u64, peer: Vec<u8> },
    /// Frees these blocks.
    FreeRaw,
    /// Echoes packets on a raw socket; spins or sleeps while it waits.
    Echo { spins: bool },
    /// Opens each descriptor that arrives over a raw socket, and acknowledges it.
    Receive,
    /// Acknowledges each descriptor of a bundle that arrives in pieces over a raw socket; opens it before if `open` is set.
    ReceiveBundles { open: bool },
    /// Submits rounds of waits and signals on the timeline of the export's first importer.
    TimelineRounds { first: u64, rounds: u64 },
    /// Submits the same rounds by raw calls on the two words of a page of this process.
    RawRounds { page: PathBuf, first: u64, rounds: u64 },
    /// Synchronizes the stream.
    Synchronize,
    /// Opens the first `count` descriptors of a file, one per line.
    OpenAll { file: PathBuf, count: usize },
    /// Drops all mappings.
    CloseMappings,
    /// Measures the first search for backends, in nanoseconds.
    StartUp,
    /// Joins a ring.
    JoinRing { descriptor: Descriptor },
    /// Receives and releases publications of the ring: by the host, which spins, or by the stream.
    RingRounds { rounds: u64, by: RingUser },
    /// The raw counterpart of a spinning host: waits for each value in one word of a page, and writes it to the other.
    SpinRounds { page: PathBuf, first: u64, rounds: u64 },
    /// Copies buckets of the ring into private memory, by the stream.
    CopyBuckets { buckets: usize },
    /// Copies the private buckets of [`CopyBuckets`](Self::CopyBuckets) to each other, by the stream, independent of the ring.
    CopyOwnBuckets { buckets: usize },
    /// Returns how often the host has waited for a ring.
    HostWaits,
    /// Leaves the ring.
    LeaveRing,
    /// Shares a block of this size for importers of other hosts, and registers other memory of this size with the transfer engine.
    ShareRemotely { bytes: u64 },
    /// Opens each tensor that arrives over a channel, and acknowledges it.
    ReceiveByChannel { spins: bool },
    /// Answers messages of a channel by TCP.
    EchoByTcpChannel,
    /// Answers messages of a plain TCP socket.
    EchoByTcp,
    /// Copies each tensor that arrives over a channel to memory of its device and sends that back; opens the tensor, or a staged
    /// copy of it.
    Transport { staged: bool, bytes: u64 },
}

/// The user of the ring in [`Command::RingRounds`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum RingUser {
    Host,
    Stream,
}

/// A reply of the peer process: the value that a command returns, or the reason why it failed.
pub(crate) type Reply = Result<serde_json::Value, String>;

/// What [`Command::ShareRemotely`] returns.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SharedRemotely {
    pub(crate) descriptor: Descriptor,
    /// The engine's metadata of the other memory.
    pub(crate) metadata: Vec<u8>,
}
