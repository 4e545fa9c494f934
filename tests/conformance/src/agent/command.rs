//! What an agent can be told, and what it answers.

use std::time::Duration;

use device_ipc_core::{Access, BundleDescriptor, Descriptor, DeviceIdentity, ProcessIdentity};
use serde::{Deserialize, Serialize};

use crate::check::Refusal;
use crate::usage::Usage;

/// Where memory of another process is to be opened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Place {
    /// Where the bytes live.
    Home,
    /// On the device of this position.
    Device(u32),
    /// On the agent's stream of the device of this position: that one waits until the bytes are ready.
    Stream(u32),
    /// By a device map.
    Map(Vec<(DeviceIdentity, u32)>),
}

/// How memory is to be opened.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Opening {
    /// What names the memory.
    pub descriptor: Descriptor,
    /// Where.
    pub place: Place,
    /// The access to ask for, or what the exporter permits.
    pub access: Option<Access>,
    /// How long it may take, or the library's default.
    pub timeout: Option<Duration>,
    /// Whether a copy is taken.
    pub copying: Copying,
}

/// When memory is copied instead of opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Copying {
    /// Never.
    Never,
    /// Where it cannot be opened: `or_staged`.
    IfNeeded,
    /// Always: `staged`.
    Always,
}

impl Opening {
    /// With the access that the exporter permits, and the library's patience.
    pub fn new(descriptor: &Descriptor, place: Place) -> Self {
        Self { descriptor: descriptor.clone(), place, access: None, timeout: None, copying: Copying::Never }
    }

    /// Asks for an access.
    pub const fn access(mut self, access: Access) -> Self {
        self.access = Some(access);
        self
    }

    /// Takes a copy.
    pub const fn copying(mut self, copying: Copying) -> Self {
        self.copying = copying;
        self
    }

    /// Limits the time.
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
}

/// What is to be shared of a buffer.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Sharing {
    /// Where the region begins, and how many bytes it has; the whole buffer unless stated.
    pub part: Option<(u64, u64)>,
    /// What importers may do; everything unless stated.
    pub access: Option<Access>,
    /// The device whose stream the bytes are written on.
    pub ready_on: Option<u32>,
}

/// What is to be shared as a bundle.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct BundleSharing {
    /// The buffers, or parts of them: where they begin, and how many bytes they have.
    pub memories: Vec<(String, Option<(u64, u64)>)>,
    /// The tensors.
    pub tensors: Vec<BundledTensor>,
    /// What importers may do; everything unless stated.
    pub access: Option<Access>,
    /// The devices whose streams the bytes are written on.
    pub ready_on: Vec<u32>,
}

/// A handle of the bare backend, for an agent to open.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BareHandle {
    /// The kind.
    pub kind: u16,
    /// The vendor's bytes.
    pub bytes: Vec<u8>,
    /// The numbers of its descriptors, which the agent has inherited.
    pub descriptors: Vec<i32>,
    /// The size of the allocation in bytes, as the exporter claims.
    pub size: u64,
    /// The vendor's number of the allocation.
    pub generation: Option<u64>,
    /// The exporter.
    pub exporter: ProcessIdentity,
}

/// A tensor of a bundle.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BundledTensor {
    /// Its name.
    pub name: String,
    /// The position of its memory.
    pub memory: usize,
    /// Where it lies in the memory, in bytes.
    pub offset: u64,
    /// The element type, as PyTorch writes it.
    pub dtype: String,
    /// The shape.
    pub shape: Vec<u64>,
}

/// What an agent can be told. Things have names, which the case chooses.
#[allow(missing_docs, reason = "the fields are what the line above each command speaks of")]
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Command {
    /// The identities of its devices.
    Devices,
    /// Makes its stream of a device, so that later commands are quick.
    Prepare { device: u32 },
    /// Allocates a buffer, of a kind of handle where one is named, and writes and waits.
    Allocate { name: String, device: u32, bytes: Vec<u8>, kind: Option<u16> },
    /// Shares a buffer or a mapping, by another name or the same; drops what was shared by that name before.
    Share { name: String, of: String, sharing: Sharing },
    /// Drops an export.
    DropExport { name: String },
    /// Waits until nobody holds an export.
    WaitReleased { name: String, timeout: Duration },
    /// Opens memory of another process.
    Open { name: String, opening: Box<Opening> },
    /// Reads a mapping or a buffer as bytes, on its device's stream.
    Bytes { name: String },
    /// The CRC-32 of the bytes of a mapping or a buffer: for more bytes than are worth sending.
    Checksum { name: String },
    /// Reads a mapping or a buffer as floats, on its device's stream.
    Floats { name: String },
    /// Copies a mapping to memory of the mapping's device and reads that.
    Copy { name: String },
    /// Submits copying a mapping to a buffer of the same length, on the mapping's device's stream.
    Keep { name: String, into: String },
    /// Submits adding to every float of a mapping or a buffer.
    Add { name: String, value: f32 },
    /// Submits setting every byte of a mapping or a buffer.
    Fill { name: String, byte: u8 },
    /// Writes to a mapping behind the library's back, on the bare backend, and waits.
    FillUnchecked { name: String, byte: u8 },
    /// Submits a delay to a device's stream.
    Delay { device: u32, time: Duration },
    /// Waits for a device's stream.
    Synchronize { device: u32 },
    /// Drops a mapping.
    Drop { name: String },
    /// Releases a mapping on its device's stream.
    Release { name: String },
    /// The descriptor that a mapping was opened with.
    Forward { name: String },
    /// How the vendor knows the agent on a whitelist.
    PeerId { device: u32 },
    /// Opens a handle on the bare backend, asks for the extents of the range, and closes it again.
    BareOpen { handle: BareHandle, device: u32 },
    /// Counts its mappings and descriptors.
    Usage,
    /// Asks the bare backend for the free memory of a device.
    FreeMemory { device: u32 },
    /// Opens an event on the bare backend.
    OpenEvent { name: String, handle: Vec<u8>, device: u32 },
    /// Records an event on a device's stream.
    RecordEvent { name: String, device: u32 },
    /// Makes a device's stream wait for an event.
    WaitEvent { name: String, device: u32 },
    /// Has the event been reached?
    QueryEvent { name: String },
    /// Waits for the event on the host.
    SynchronizeEvent { name: String, timeout: Duration },
    /// Exports an event that the agent opened.
    ExportEvent { name: String },
    /// Takes the timeline of a mapping.
    Timeline { name: String, of: String },
    /// Takes the only timeline of an export, once there is one.
    ExportTimeline { name: String, of: String, timeout: Duration },
    /// Has a device's stream signal a timeline.
    Signal { name: String, value: u64, device: u32 },
    /// Makes a device's stream wait for a timeline.
    Wait { name: String, value: u64, device: u32 },
    /// Signals a timeline on the host.
    SignalNow { name: String, value: u64 },
    /// Waits for a timeline on the host.
    WaitNow { name: String, value: u64, timeout: Duration },
    /// What the host sees of a timeline.
    Value { name: String },
    /// Is the other side of a timeline still there?
    Check { name: String },
    /// Ends all its exports, and waits until nobody holds them.
    Shutdown { timeout: Duration },
    /// Ends the process without dropping anything.
    Exit,
    /// Limits the host memory of copies to other processes.
    StagingLimits { chunk_bytes: u64, total_bytes: u64 },
    /// Makes a channel, to whoever listens under a name or by listening there.
    Channel { name: String, under: String, listens: bool, map: Vec<(u32, u32)>, timeout: Duration },
    /// Sends bytes, exports and bundles by a channel; their tensors are ready when the stream of a device gets there.
    Send { by: String, bytes: Vec<u8>, of: Vec<String>, ready_on: Option<u32>, timeout: Duration },
    /// Receives a message by a channel, and tells its bytes.
    Receive { name: String, by: String, timeout: Duration },
    /// Opens a tensor of a message; where its channel's device map says, unless a place is named.
    OpenReceived { name: String, of: String, index: usize, place: Option<Place>, timeout: Duration },
    /// The device that a channel's device map opens the first tensor of a message on.
    DeviceOfReceived { of: String },
    /// Answers a message with bytes, exports and bundles.
    Answer { of: String, bytes: Vec<u8>, tensors: Vec<String>, timeout: Duration },
    /// Have the tensors of a message been written, or may they still be?
    CheckReceived { of: String },
    /// Drops a message, and what of it has not been opened.
    Discard { name: String },
    /// Drops a channel; or closes it, and waits until everything has been taken.
    CloseChannel { name: String, timeout: Option<Duration> },
    /// Receives messages by a channel, opens what they hold and drops it, and answers each with its bytes, so many times.
    Echo { by: String, times: u32, answers: bool, timeout: Duration },
    /// How much it has said to brokers so far.
    Said,
    /// Shares buffers as a bundle; drops what was shared by that name before.
    ShareBundle { name: String, sharing: BundleSharing },
    /// Drops a bundle that it shares.
    DropBundle { name: String },
    /// Opens a bundle of another process.
    OpenBundle { name: String, descriptor: BundleDescriptor, place: Place },
    /// Reads a tensor of a bundle that it has open as bytes, on its device's stream.
    TensorBytes { name: String, tensor: String },
    /// Submits adding to every float of a tensor.
    TensorAdd { name: String, tensor: String, value: f32 },
    /// Releases a bundle that it has open on a device's stream.
    ReleaseBundle { name: String, device: u32 },
    /// Joins a ring on a device's stream; answers with the sequence that it begins with.
    Join { descriptor: String, device: u32 },
    /// Takes the ring's next slot on a device's stream, reads its bytes and releases it on the stream.
    ReadNext { device: u32, timeout: Duration },
    /// Leaves the ring.
    LeaveRing,
    /// Opens a bundle of a message, as [`OpenReceived`](Self::OpenReceived) does a tensor.
    OpenReceivedBundle { name: String, of: String, index: usize, place: Option<Place>, timeout: Duration },
    /// Opens the first tensor of a message, or takes a copy of it.
    CopyReceived { name: String, of: String, copying: Copying, place: Place },
}

/// What an agent answers, where it could do what it was told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// It is done.
    Done,
    /// Devices.
    Devices(Vec<DeviceIdentity>),
    /// A descriptor.
    Descriptor(Box<Descriptor>),
    /// A mapping.
    Mapping(Mapped),
    /// Bytes.
    Bytes(Vec<u8>),
    /// Floats.
    Floats(Vec<f32>),
    /// A number.
    Number(u64),
    /// What it has said to brokers.
    Said {
        /// Messages that are answered.
        requests: u64,
        /// Messages that are not.
        releases: u64,
    },
    /// Yes or no.
    Truth(bool),
    /// What names a bundle.
    Bundle(BundleDescriptor),
    /// A range that the bare backend opened, and closed again.
    BareOpened {
        /// Its length in bytes.
        len: u64,
        /// The number of extents that the backend named for it, or its error.
        extents: Result<usize, Refusal>,
    },
    /// Mappings and descriptors.
    Usage(Usage),
}

/// A mapping of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapped {
    /// Its address in the agent.
    pub address: u64,
    /// Its length in bytes.
    pub len: u64,
    /// The position of its device.
    pub device: u32,
    /// Where the bytes live.
    pub home: DeviceIdentity,
    /// Is that the mapping's device?
    pub at_home: bool,
    /// What the agent may do.
    pub access: Access,
    /// The tensor's type and shape, where there is one.
    pub tensor: Option<(String, Vec<u64>)>,
    /// Is it a copy?
    pub is_copy: bool,
}

/// What comes back for a command.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Reply {
    /// How long the agent took for it.
    pub took: Duration,
    /// The answer, or the library's error.
    pub result: Result<Answer, Refusal>,
}
