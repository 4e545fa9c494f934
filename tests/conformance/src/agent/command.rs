//! The commands of an agent.

use std::time::Duration;

use device_ipc_core::{Access, Descriptor, DeviceIdentity, DeviceRange, ProcessIdentity};
use serde::{Deserialize, Serialize};

/// The device on which a mapping is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// The home device.
    #[default]
    Home,
    /// The device of this ordinal.
    Device(u32),
    /// The device of this ordinal, in order with the agent's stream.
    Stream(u32),
    /// The device that a device map gives.
    Map(Vec<(DeviceIdentity, u32)>),
}

/// Whether a gate is closed in the agent's stream of device 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Gating {
    /// It is not.
    #[default]
    Open,
    /// Until [`Command::OpenGates`].
    Closed,
    /// For a moment.
    Soon,
}

/// When memory is copied instead of opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Copying {
    /// Never.
    #[default]
    Never,
    /// If it cannot be opened: `CopyPolicy::StagedIfNeeded`.
    IfNeeded,
    /// Always: `CopyPolicy::Staged`.
    Always,
}

/// The loop of a ring's reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RingLoop {
    /// `next`.
    #[default]
    Next,
    /// `next_ahead`, and a synchronized stream before each release.
    Ahead,
    /// `try_next`, and a poll of the reader's descriptor.
    Poll,
}

/// The arguments of [`Command::Open`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Opening {
    /// The name of the mapping.
    pub name: String,
    /// The descriptor of the export, which the agent parses.
    pub descriptor: String,
    /// The device.
    pub place: Place,
    /// The access to request; by default the access that the exporter permits.
    pub access: Option<Access>,
    /// The time limit; by default the library's.
    pub timeout: Option<Duration>,
    /// Whether the mapping is a copy.
    pub copying: Copying,
    /// Whether the mapping keeps its addresses.
    pub reserved: bool,
    /// The address and the length in bytes of a reservation on device 0 at whose start it is mapped.
    #[serde(default)]
    pub reserved_at: Option<(u64, u64)>,
}

impl Opening {
    /// Returns the arguments for an open with the library's defaults.
    pub fn new(descriptor: &Descriptor, place: Place) -> Self {
        let (name, descriptor) = (String::new(), descriptor.to_string());
        Self {
            name,
            descriptor,
            place,
            access: None,
            timeout: None,
            copying: Copying::Never,
            reserved: false,
            reserved_at: None,
        }
    }

    /// Requests an access.
    pub const fn access(mut self, access: Access) -> Self {
        self.access = Some(access);
        self
    }

    /// Requests a copy.
    pub const fn copying(mut self, copying: Copying) -> Self {
        self.copying = copying;
        self
    }

    /// Requests addresses that the mapping keeps.
    pub const fn reserved(mut self) -> Self {
        self.reserved = true;
        self
    }

    /// Requests the addresses of this range.
    pub const fn reserved_at(mut self, range: DeviceRange) -> Self {
        self.reserved_at = Some((range.ptr.get(), range.len));
        self
    }

    /// Sets the time limit.
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
}

/// The arguments of [`Command::Share`].
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Sharing {
    /// The name of the export. An export of that name is dropped.
    pub name: String,
    /// The length of the region in bytes; by default the rest of the buffer.
    pub len: Option<u64>,
    /// The buffer or mapping; by default a new buffer.
    pub of: Option<String>,
    /// The offset of the region in the buffer, in bytes.
    pub offset: u64,
    /// The kind of handle that a new buffer is allocated for.
    pub kind: Option<u16>,
    /// The access of importers; by default read-write.
    pub access: Option<Access>,
    /// The device whose stream writes the bytes.
    pub ready_on: Option<u32>,
    /// Blocks the stream of device 0, which writes the bytes.
    pub gate: Gating,
    /// Whether the drop of the owner blocks until [`Command::Unblock`].
    pub blocked: bool,
    /// Drops the export of that name this number of µs before the new export starts.
    pub after_drop: Option<u64>,
}

/// The arguments of [`Command::ShareTensors`].
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct TensorSharing {
    /// The buffers, or an offset and a length within them in bytes.
    pub memories: Vec<(String, Option<(u64, u64)>)>,
    /// The tensors.
    pub tensors: Vec<SharedTensor>,
    /// The access of importers; by default read-write.
    pub access: Option<Access>,
    /// The devices whose streams write the bytes.
    pub ready_on: Vec<u32>,
}

/// A named tensor to share.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SharedTensor {
    /// Its name.
    pub name: String,
    /// The index of its memory.
    pub memory: usize,
    /// Its offset in the memory, in bytes.
    pub offset: u64,
    /// The element type, by PyTorch's name.
    pub dtype: String,
    /// The shape.
    pub shape: Vec<u64>,
}

/// A handle of the bare backend, for an agent to open.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BareHandle {
    /// The kind.
    pub kind: u16,
    /// The vendor's bytes.
    pub bytes: Vec<u8>,
    /// The numbers of its file descriptors, which the agent inherited.
    pub descriptors: Vec<i32>,
    /// The size of the allocation in bytes, as the exporter claims.
    pub size: u64,
    /// The vendor's number of the allocation.
    pub generation: Option<u64>,
    /// The exporter.
    pub exporter: ProcessIdentity,
}

/// A command of an agent. The caller chooses the names of buffers, exports, mappings and so on; each kind has names of its
/// own.
///
/// Tests may write a command in words (see [`words`](super::words)): the fields are arguments in the order below.
#[allow(missing_docs, reason = "the line above each command describes its fields")]
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub enum Command {
    /// Does nothing.
    Nothing,
    /// Exits without dropping anything.
    Exit,

    /// Returns the identities of its devices.
    Devices,
    /// Creates the stream of a device, so that later commands are quick.
    Prepare { device: u32 },
    /// Runs every operation on memory once on device 0, so that later commands are quick.
    WarmUp,
    /// Closes a gate in a device's stream.
    CloseGate { device: u32, gate: Gating },
    /// Opens the gates that are closed; returns whether none had opened by itself.
    OpenGates,
    /// Returns whether the gates are open.
    GatesAreOpen,
    /// Waits for a device's stream.
    Sync { device: u32 },
    /// Returns the bytes of a device that are free, as the bare backend reports them.
    FreeMemory { device: u32 },
    /// Returns the bytes of a device that are in use.
    MemoryInUse { device: u32 },
    /// Returns the whitelist id of the agent on a device.
    PeerId { device: u32 },
    /// Counts its mappings and file descriptors.
    Usage,
    /// Returns the library's counters.
    Counters,

    /// Allocates a buffer, for a kind of handle if one is given; writes `bytes` and waits.
    Allocate {
        name: String,
        len: u64,
        device: u32,
        kind: Option<u16>,
        #[serde(with = "super::text::optional")]
        bytes: Option<Vec<u8>>,
    },
    /// Frees a buffer.
    Free { name: String },
    /// Shares a buffer, a mapping or new memory.
    Share(Box<Sharing>),
    /// Shares one region over `count` adjacent allocations of `len` bytes, from an offset in the first to the end of the last.
    ShareMany { name: String, count: u64, len: u64, from: u64 },
    /// Shares a buffer that the export does not keep.
    ShareBorrowed { name: String, of: String },
    /// Lets the drop of a blocked owner continue.
    Unblock { name: String },
    /// Returns the descriptor of an export or a mapping.
    Descriptor { name: String },
    /// Returns the holders of an export.
    Holders { name: String },
    /// Waits until an export has no holder.
    WaitReleased { name: String, timeout: Duration },
    /// Closes an export.
    Close { name: String, timeout: Duration, free_anyway: bool },
    /// Drops the exports and mappings of these names.
    Drop { names: Vec<String> },

    /// Opens an export.
    Open(Box<Opening>),
    /// Suspends a mapping with reserved addresses.
    Suspend { name: String },
    /// Maps an export in a suspended mapping.
    Resume { name: String, descriptor: String },
    /// Replaces the memory of a mapping, in the order of the stream of `device` if one is given.
    Replace { name: String, descriptor: String, device: Option<u32> },
    /// Releases a mapping on the stream of its first device or of `device`.
    Release { name: String, device: Option<u32> },
    /// Reports the event `gone NAME VARIANT` when the exporter of a mapping, or the peer of a channel, has gone.
    OnGone { name: String },
    /// Checks that the bytes of a mapping were written, or may still be.
    CheckMapping { name: String },
    /// Reads a mapping or a buffer as bytes.
    Bytes { name: String },
    /// Returns the CRC-32 of the bytes of a mapping or a buffer.
    Checksum { name: String },
    /// Reads a mapping or a buffer as floats.
    Floats { name: String },
    /// Returns the first float of a mapping or a buffer, or the last.
    Float { name: String, last: bool },
    /// Adds one to every float of a mapping and returns the first. Replaces the stream if that fails.
    Touch { name: String },
    /// Writes bytes to a mapping, of which neighbours differ, and waits.
    Pattern { name: String },
    /// Copies a mapping to memory of the mapping's device and reads that memory.
    Copy { name: String },
    /// Submits a copy of a mapping to a buffer of the same length.
    Keep { name: String, into: String },
    /// Submits an addition to every float of a mapping or a buffer.
    Add { name: String, value: f32 },
    /// Submits a write of every byte of a mapping or a buffer.
    Fill { name: String, byte: u8 },
    /// Writes to a mapping on the bare backend, without the library's checks, and waits.
    FillUnchecked { name: String, byte: u8 },
    /// Opens a handle on the bare backend, asks for the extents of the range, and closes the handle.
    BareOpen { handle: BareHandle, device: u32 },

    /// Sets the limits of the import cache.
    Cache { mappings: usize, bytes: u64 },
    /// Closes idle leases.
    CloseUnused { timeout: Duration },
    /// Closes all mappings of an exporter.
    CloseMappingsOf { descriptor: Descriptor },
    /// Closes all exports, and waits until they have no holders.
    Shutdown { timeout: Duration },
    /// Sets the limits of the host memory of copies.
    StagingLimits { chunk_bytes: u64, total_bytes: u64 },

    /// Opens an event on the bare backend.
    OpenEvent { name: String, handle: Vec<u8>, device: u32 },
    /// Records an event on a device's stream.
    RecordEvent { name: String, device: u32 },
    /// Makes a device's stream wait for an event.
    WaitEvent { name: String, device: u32 },
    /// Returns whether an event has been reached.
    QueryEvent { name: String },
    /// Waits for an event on the host.
    SynchronizeEvent { name: String, timeout: Duration },
    /// Exports an event that the agent opened.
    ExportEvent { name: String },

    /// Takes the timeline of a mapping; of the mapping of its own name unless `of` is given.
    Timeline { name: String, of: Option<String> },
    /// Waits for `count` timelines of an export and takes them. The second is called `NAME.1`.
    Timelines { name: String, count: usize, timeout: Duration, of: Option<String> },
    /// Drops all timelines.
    ForgetTimelines,
    /// Returns whether device 0 has timelines.
    HasTimelines,
    /// Makes a device's stream signal a timeline.
    Signal { name: String, value: u64, device: u32 },
    /// Makes a device's stream wait for a timeline.
    Wait { name: String, value: u64, device: u32 },
    /// Signals a timeline on the host.
    SignalNow { name: String, value: u64 },
    /// Waits for a timeline on the host.
    WaitNow { name: String, value: u64, timeout: Duration },
    /// Returns the value of a timeline that the host sees.
    Value { name: String },
    /// Checks whether the peer of a timeline still exists.
    Check { name: String },
    /// Adds one to every float of a mapping or a buffer, in turns with the peer of the timeline of that name.
    Rounds { name: String, count: u64, first: bool },

    /// Listens for channels; opens what they bring by a device map of ordinals.
    Listen { under: String, map: Vec<(u32, u32)> },
    /// Stops listening.
    Unlisten { under: String },
    /// Accepts a channel; returns the process id of the peer.
    Accept { under: String, name: String, timeout: Duration },
    /// Connects a channel; returns the process id of the peer.
    Connect { under: String, name: String, timeout: Duration, user: Option<u32>, map: Vec<(u32, u32)> },
    /// Sends exports by a channel with `bytes`, or with `len` bytes that count up. The stream of a device
    /// writes the tensors. `drops` drops the exports after that.
    Send {
        by: String,
        len: usize,
        timeout: Duration,
        of: Vec<String>,
        drops: bool,
        ready_on: Option<u32>,
        bytes: Option<Vec<u8>>,
    },
    /// Receives a message from a channel.
    Receive { by: String, name: String, timeout: Duration },
    /// Opens an export of a message, on the device of the channel's device map unless a place is given.
    OpenReceived {
        of: String,
        name: String,
        place: Option<Place>,
        index: usize,
        timeout: Option<Duration>,
        copying: Copying,
    },
    /// Returns the device on which a channel's device map opens the first tensor of a message.
    DeviceOfReceived { of: String },
    /// Replies to a message.
    Answer { of: String, bytes: Vec<u8>, tensors: Vec<String>, timeout: Duration },
    /// Checks whether the tensors of a message have been written, or may still be.
    CheckReceived { of: String },
    /// Drops a message with its unopened exports.
    Discard { name: String },
    /// Closes a channel and waits until the peer has received everything.
    CloseChannel { name: String, timeout: Duration },
    /// Drops a channel.
    DropChannel { name: String },
    /// Receives `times` messages by a channel, opens and drops their tensors, and replies to each with its bytes.
    Echo { by: String, times: u32, answers: bool, timeout: Duration },

    /// Shares named tensors in buffers.
    ShareTensors { name: String, sharing: TensorSharing },
    /// Shares `count` allocations of `len` bytes as the tensors `t0`, `t1`, …, on the first devices in turn.
    /// With `neighbours` as two tensors that overlap: `a` in the first two thirds, and `b` in the last two thirds.
    ShareBlocks { name: String, count: u64, len: u64, devices: Option<u64>, neighbours: Option<u8> },
    /// Reads a named tensor of a mapping as bytes.
    TensorBytes { name: String, tensor: String },
    /// Returns the first byte of a tensor and its last.
    TensorEnds { name: String, tensor: String },
    /// Sets every byte of a tensor, and waits.
    TensorFill { name: String, tensor: String, byte: u8 },
    /// Submits an addition to every float of a tensor.
    TensorAdd { name: String, tensor: String, value: f32 },

    /// Starts a ring with slots of 1024 B, whose bytes are the lowest byte of the sequence.
    Ring { slots: u32, timeout: Option<Duration> },
    /// Waits for `count` readers.
    RingReaders { count: usize, timeout: Duration },
    /// Returns the number of readers.
    RingCount,
    /// Publishes `count` sequences. A gate may be closed within each.
    RingPublish { count: u64, gate: Gating },
    /// Publishes `count` sequences on the host, after a stream has written them.
    RingPublishNow { count: u64 },
    /// Takes the next slot for writing and drops it; returns its sequence.
    RingWrite,
    /// Waits on the host for the next slot to write.
    RingWritable { timeout: Duration },
    /// Returns process and sequence of each reader that the next write waits for.
    RingBehind,
    /// Dismisses the reader of a process that is behind.
    RingDismiss { pid: u32 },
    /// Closes the ring.
    RingClose { timeout: Duration },
    /// Joins a ring on a device's stream; returns the sequence that it begins with.
    RingJoin { descriptor: String, device: u32 },
    /// Takes the next slot for reading ahead of its publication; returns its sequence.
    RingNextAhead,
    /// Waits for the next slot and takes it; returns its sequence, or "closed" at the end of the ring.
    RingNext { timeout: Duration },
    /// Takes the next slot if it has been published; returns its sequence, "pending", or "closed" at the end of the ring.
    RingTryNext,
    /// Polls the reader's descriptor; returns whether it is readable.
    RingPoll { timeout: Duration },
    /// Takes the next slot for writing if it is free, and drops it; returns its sequence or "pending".
    RingTryWrite,
    /// Polls the writer's descriptor; returns whether it is readable.
    RingPollWriter { timeout: Duration },
    /// Waits for the next slot, reads its bytes and releases it.
    RingNextBytes { timeout: Duration },
    /// Releases the oldest slot taken, on the agent's stream or on another stream, which is then synchronized.
    RingRelease { elsewhere: bool },
    /// Views the oldest slot taken.
    RingView,
    /// Checks the oldest slot taken.
    RingCheck,
    /// Checks whether every released slot had been published.
    RingReaderCheck,
    /// Reads slots until the writer closes the ring, by a loop that the documentation shows; returns their number.
    RingConsume { by: RingLoop },
    /// Drops the slots taken.
    RingDropSlots,
    /// Leaves the ring.
    RingLeave,
    /// Reads `count` sequences on the stream and checks their bytes afterwards; returns the next sequence.
    RingRead { count: u64, timeout: Duration },
    /// Drops ring, reader and slots without waiting.
    RingForget,
}
