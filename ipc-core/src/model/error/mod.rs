//! What can go wrong, a variant for each thing that a caller can do something about.

#[cfg(test)]
mod chains;
mod descriptor;

use std::time::Duration;

use super::access::Access;
use super::address::DevicePtr;
use super::availability::{BackendStatus, Unavailable};
use super::device::{DeviceIdentity, DeviceOrdinal};
use super::layout::LayoutError;
use super::lease::Holders;

pub use descriptor::{DescriptorError, FormatVersion};

/// The result of everything here that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, and what to do about it where that is known.
///
/// The text of an error names its cause, and [`source`](std::error::Error::source) returns only what the text leaves out: a
/// report that prints the whole chain repeats nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No backend has a device.
    #[error("no backend has a device:{}", list(.0))]
    NoBackend(Vec<BackendStatus>),

    /// The backend that was asked for cannot be used here.
    #[error("the backend{} cannot be used: {reason}", .backend.as_ref().map(|name| format!(" {name:?}")).unwrap_or_default())]
    BackendUnavailable {
        /// The name of the requested backend; `None` if the program loaded a backend without a name.
        backend: Option<String>,
        /// Why not.
        reason: Unavailable,
    },

    /// No backend of that name is compiled in or registered.
    #[error(
        "no backend is called {name:?}; there are: {}. Enable the feature of that name, or register the backend",
        .known.join(", ")
    )]
    UnknownBackend {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: Vec<String>,
    },

    /// A descriptor, a stream or an owner of memory belongs to another backend.
    #[error(
        "{what} belongs to the backend {found:?}, but this one is {expected:?}; open it with Ipc::named({found:?})"
    )]
    WrongBackend {
        /// What belongs to the other backend.
        what: &'static str,
        /// That backend.
        found: String,
        /// The backend that was asked.
        expected: String,
    },

    /// A call of the vendor's library failed.
    #[error(transparent)]
    Vendor(Box<VendorError>),

    /// The backend cannot do this.
    #[error("{backend} cannot {what}: {why}")]
    Unsupported {
        /// The backend.
        backend: &'static str,
        /// What it cannot do.
        what: String,
        /// Why not, and what to do instead.
        why: String,
    },

    /// The bytes or the text are not a descriptor that this version can read.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),

    /// The address is not device memory.
    #[error("{ptr} is not device memory: {why}")]
    NotDeviceMemory {
        /// The address.
        ptr: DevicePtr,
        /// What it is instead.
        why: String,
    },

    /// The region makes no sense, or leaves its allocation.
    #[error("invalid region: {0}")]
    InvalidRegion(String),

    /// The memory is of a kind that cannot be shared as it is.
    #[error("the memory at {ptr} is {kind} and cannot be shared: {remedy}")]
    NotShareable {
        /// The address.
        ptr: DevicePtr,
        /// What kind of memory it is.
        kind: String,
        /// What to do about it.
        remedy: String,
    },

    /// The memory was itself opened from another process.
    #[error(
        "the memory at {ptr} was opened from another process and cannot be exported again; forward the descriptor \
         it was opened with (Mapping::descriptor)"
    )]
    SharedOn {
        /// The address.
        ptr: DevicePtr,
    },

    /// The ordinal is not that of a device of this process.
    #[error("there is no device {ordinal}: {backend} shows this process {count} device(s), numbered from 0")]
    NoSuchDevice {
        /// The backend.
        backend: &'static str,
        /// The ordinal asked for.
        ordinal: DeviceOrdinal,
        /// How many there are.
        count: usize,
    },

    /// The memory's home is not among the devices of this process.
    #[error(
        "the memory lives on device {home}, which this process does not see; add it to {variable}, or open on a \
         device of this process (OpenBuilder::on_device), as a copy where that one cannot reach it \
         (OpenBuilder::or_staged)"
    )]
    HomeNotVisible {
        /// Where the memory lives.
        home: DeviceIdentity,
        /// The vendor's variable that hides devices.
        variable: &'static str,
    },

    /// The device map has no entry for the memory's home.
    #[error("{}", no_entry(.home, .peer.as_deref()))]
    NotInDeviceMap {
        /// Where the memory lives.
        home: DeviceIdentity,
        /// Who is at the other end of the channel whose map it is; `None` for a map of the caller's.
        peer: Option<String>,
    },

    /// A device map that is not one to one.
    #[error("invalid device map: {0}")]
    InvalidDeviceMap(String),

    /// The device cannot reach the memory's home.
    #[error(
        "device {from} cannot access the memory of device {to}: no peer access between them; open it at home \
         (OpenBuilder::at_home) and copy, or let it be copied through the host (OpenBuilder::or_staged)"
    )]
    NoPeerAccess {
        /// The device asked for.
        from: DeviceOrdinal,
        /// Where the memory lives.
        to: DeviceIdentity,
    },

    /// The stream belongs to another device than the event or the mapping.
    #[error("the stream runs on device {stream}, but {what} needs a stream of device {expected}")]
    WrongStream {
        /// The stream's device.
        stream: DeviceOrdinal,
        /// What needs another stream.
        what: &'static str,
        /// The device it needs.
        expected: DeviceOrdinal,
    },

    /// The stream is being captured into a graph, where this cannot be done. The capture is intact.
    #[error(
        "the stream is being captured into a graph, and {what} would be done once instead of at each launch; do it \
         before the capture begins (take the mapping on the stream, or wait for the timeline, first)"
    )]
    StreamCapturing {
        /// What cannot be captured.
        what: &'static str,
    },

    /// Importers would be able to read or write more than what is shared, and that was not to be.
    #[error(
        "device work of an importer could reach {reachable} beside the {region} bytes that are shared: {why}; share a \
         copy (ShareBuilder::exposure(ExposurePolicy::Copy)), or memory of a kind that is isolated"
    )]
    Exposes {
        /// The bytes of the region.
        region: u64,
        /// What else could be reached, in words.
        reachable: String,
        /// Why.
        why: String,
    },

    /// A timeline cannot take this value.
    #[error("a timeline cannot be signalled or awaited at {value}: {why}")]
    TimelineValue {
        /// The value.
        value: u64,
        /// Why not.
        why: String,
    },

    /// The device has no memory left for this.
    #[error("device {device} has no {bytes} bytes left: {detail}")]
    OutOfMemory {
        /// The device.
        device: DeviceOrdinal,
        /// The bytes asked for.
        bytes: u64,
        /// What the vendor says.
        detail: String,
    },

    /// The tensor's layout does not fit the region, or the view does not fit the layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),

    /// The mapping does not permit this access.
    #[error("the memory is shared {granted}, and {wanted} was asked for; ask the exporter to share it so")]
    AccessDenied {
        /// What was asked for.
        wanted: Access,
        /// What there is.
        granted: Access,
    },

    /// An outdated mapping that is still in use stands where this memory would have to be mapped.
    #[error(
        "an outdated mapping of the exporter's memory is still in use here and overlaps this one: {detail}; drop the \
         mappings of what it has freed since, or close them all (close_mappings_of)"
    )]
    OverlapsInUse {
        /// What the vendor says.
        detail: String,
    },

    /// The exporting process has ended, or is another one that got its process id.
    #[error("the exporting process {pid} has ended, and its exports with it")]
    ExporterGone {
        /// Its process id, in its own pid namespace.
        pid: u32,
    },

    /// The importing process has ended, and with it what it would have signalled.
    #[error("the importing process {pid} has ended; nothing more comes from it")]
    ImporterGone {
        /// Its process id, as the kernel tells it here; 0 for a process of another pid namespace.
        pid: u32,
    },

    /// The importer has given its lease back, and signals no more.
    #[error("process {pid} has let go of the memory; nothing more comes from it")]
    LeaseEnded {
        /// The importer's process id, as the kernel tells it here.
        pid: u32,
    },

    /// The exporter lives, but has dropped this export.
    #[error("process {pid} has dropped this export; ask it for a new descriptor")]
    ExportDropped {
        /// The exporter's process id.
        pid: u32,
    },

    /// The memory was freed, and another allocation may be in its place.
    #[error(
        "the exported memory was freed by its owner, and may have been given to somebody else since: {0}"
    )]
    StaleGeneration(String),

    /// The descriptor was made before this machine was started again.
    #[error("the descriptor was made before this machine was last started; ask for a new one")]
    Rebooted,

    /// The descriptor was made on another machine.
    #[error(
        "the descriptor was made on another host ({exporter}, this is {local}); device memory is shared within one host"
    )]
    OtherHost {
        /// The exporter's host.
        exporter: String,
        /// This host.
        local: String,
    },

    /// The exporter's socket cannot be reached from this network namespace.
    #[error(
        "the exporter listens on an abstract socket of another network namespace; set DEVICE_IPC_SOCKET_DIR to a \
         directory that both containers mount, in both"
    )]
    OtherNetworkNamespace,

    /// The exporter or the importer refuses to talk to the other.
    #[error("not permitted: {0}")]
    NotPermitted(String),

    /// The peer does not speak the protocol, or another version of it.
    #[error("the process at the other end of the socket answered what is not the protocol: {0}")]
    Protocol(String),

    /// The connection to the exporter failed.
    #[error("{what} failed: {cause}")]
    Io {
        /// What was tried.
        what: String,
        /// The system's error.
        cause: std::io::Error,
    },

    /// It did not happen in time.
    #[error("{what} did not happen within {} ms{detail}", .after.as_millis())]
    Timeout {
        /// What was waited for.
        what: String,
        /// For how long.
        after: Duration,
        /// What is known about the reason, or nothing.
        detail: String,
    },

    /// The export was not opened as often as expected.
    #[error("{}", not_opened(*.after, *.opened, *.expected))]
    NotOpened {
        /// The duration of the wait.
        after: Duration,
        /// The number of times that the export was opened.
        opened: u64,
        /// The expected number.
        expected: u64,
    },

    /// The export has not been released: these processes hold it.
    #[error("{}", not_released(*.after, .holders))]
    StillHeld {
        /// For how long it was waited.
        after: Duration,
        /// Who holds it.
        holders: Holders,
    },

    /// A call that waits was made on the library's worker thread: in a callback, or in the drop of an owner.
    #[error(
        "{call} cannot wait on the library's worker thread, which runs callbacks and drops owners, and would be waited for \
         by itself; call it on another thread (have the callback notify one), or with a timeout of zero"
    )]
    OnWorkerThread {
        /// The call.
        call: &'static str,
    },

    /// The process was forked after the library was used.
    #[error(
        "device memory does not survive fork: this process was forked from one that used it; spawn the child \
         (std::process::Command, or multiprocessing with the start method \"spawn\") instead"
    )]
    Forked,

    /// The writer closed the ring without publishing a slot that the reader took, or was to take, ahead of its publication.
    #[error(
        "process {pid} closed the ring without publishing this slot; discard the results of work that has read the slot"
    )]
    RingClosed {
        /// The writer's process id, in its own pid namespace.
        pid: u32,
    },

    /// A slot of a ring was accessed and released ahead of its publication, and the ring has ended without publishing it.
    #[error(
        "the ring ended before sequence {first} was published, and this reader had accessed and released its slots up to \
         sequence {last} by then; discard the results from sequence {first} on, and release slots after the work that reads \
         them, or take published slots only (RingReader::next)"
    )]
    RingUnpublished {
        /// The first sequence that was never published.
        first: u64,
        /// The last sequence that was accessed and released.
        last: u64,
        /// The end of the ring.
        source: Box<Error>,
    },

    /// The reader holds the slot that the next publication takes.
    #[error(
        "this reader holds all {slots} slots of the ring, and nothing can be published before it has released one; \
         release the oldest first (RingReadSlot::release)"
    )]
    RingSlotsHeld {
        /// How many slots the ring has.
        slots: u32,
    },

    /// The writer goes on without this reader.
    #[error(
        "process {pid} has dismissed this reader from the ring, and may have written over what it was reading; join again"
    )]
    DismissedFromRing {
        /// The writer's process id, in its own pid namespace.
        pid: u32,
    },

    /// The name is not one that a channel can have.
    #[error("{name:?} is no name for a channel: {why}")]
    InvalidChannelName {
        /// The name.
        name: String,
        /// Why not.
        why: &'static str,
    },

    /// Another process, or this one, listens under this name.
    #[error(
        "process {pid} ({program}) listens as {name:?} already; end its listener, or listen under another name"
    )]
    ChannelNameInUse {
        /// The name.
        name: String,
        /// Who listens, as the kernel tells it here; 0 for a process of another pid namespace.
        pid: u32,
        /// Its program, as the kernel calls it; empty where that cannot be told.
        program: String,
    },

    /// Nobody listens under this name.
    #[error("nobody has listened as {name:?} within {} ms: {detail}", .after.as_millis())]
    NobodyListens {
        /// The name.
        name: String,
        /// For how long it was waited.
        after: Duration,
        /// Where it was looked, and what to check.
        detail: String,
    },

    /// A message is larger than the channel takes. Nothing of it has been sent.
    #[error(
        "the message has {size} {of}, and the channel takes {limit}; send less at a time, large data as a tensor{}",
        if *.of == "bytes" { ", or raise the limit on both sides (message_limit)" } else { "" }
    )]
    MessageTooLarge {
        /// What there is too much of: `bytes`, or `tensors`.
        of: &'static str,
        /// How much there is.
        size: u64,
        /// How much there may be.
        limit: u64,
    },

    /// One of its ends has closed the channel.
    #[error("the channel with process {pid} ({program}) has been closed; nothing more comes from it")]
    ChannelClosed {
        /// The process at the other end.
        pid: u32,
        /// Its program, as it calls itself.
        program: String,
    },

    /// The process at the other end of the channel has ended without closing it.
    #[error("process {pid} ({program}) has ended without closing the channel; nothing more comes from it")]
    PeerGone {
        /// Its process id.
        pid: u32,
        /// Its program, as it calls itself.
        program: String,
    },

    /// A tensor of a bundle. Nothing of the bundle has been shared or opened.
    #[error("the tensor {tensor:?} of the bundle: {cause}")]
    InBundle {
        /// The name of the first tensor that it concerns.
        tensor: String,
        /// What is the matter with it.
        cause: Box<Error>,
    },

    /// There is no tensor of this name.
    #[error("there is no tensor called {name:?}: {known}")]
    NoSuchTensor {
        /// The name asked for.
        name: String,
        /// Which there are, in words.
        known: String,
    },

    /// A host hands over a slot of a ring at once, and a stream has yet to get to what comes before.
    #[error("sequence {sequence} of the ring cannot be {what} by the host yet: {why}")]
    RingNotYet {
        /// The sequence.
        sequence: u64,
        /// `published` or `released`.
        what: &'static str,
        /// What it has to wait for, and what to do.
        why: String,
    },
}

impl Error {
    /// A failed system call or input/output.
    pub fn io(what: impl Into<String>, cause: impl Into<std::io::Error>) -> Self {
        Self::Io { what: what.into(), cause: cause.into() }
    }

    /// What is the matter, whichever tensor of a bundle it concerns: the innermost error of
    /// [`InBundle`](Self::InBundle), else the error itself.
    pub fn innermost(&self) -> &Self {
        match self {
            Self::InBundle { cause, .. } => cause.innermost(),
            other => other,
        }
    }

    /// The same about a tensor, unless it is about the exporting process or the time.
    pub(crate) fn of_tensor(self, tensor: &str) -> Self {
        match self {
            Self::InBundle { .. }
            | Self::ExporterGone { .. }
            | Self::Timeout { .. }
            | Self::Protocol(_)
            | Self::Io { .. }
            | Self::Forked => self,
            other => Self::InBundle { tensor: tensor.to_owned(), cause: Box::new(other) },
        }
    }

    pub(crate) fn wrong_token(pid: u32) -> Self {
        Self::NotPermitted(format!(
            "process {pid} does not know the descriptor's token; the descriptor was altered"
        ))
    }
}

/// The questions that programs ask about an error of any call. Errors of a tensor of an export are classified by their cause.
impl Error {
    /// Returns whether the other side has ended: its process has exited, or it has closed its end of the hand-over, the ring
    /// or the channel. A retry with the same descriptor or connection fails again.
    pub fn is_gone(&self) -> bool {
        match self.innermost() {
            Self::ExporterGone { .. }
            | Self::ImporterGone { .. }
            | Self::LeaseEnded { .. }
            | Self::RingClosed { .. }
            | Self::ChannelClosed { .. }
            | Self::PeerGone { .. } => true,
            Self::RingUnpublished { source, .. } => source.is_gone(),
            _ => false,
        }
    }

    /// Returns whether the descriptor is out of date: the exporter has dropped the export, the memory was freed, or the host
    /// was restarted. A new descriptor from the exporter is the remedy.
    pub fn is_stale(&self) -> bool {
        matches!(self.innermost(), Self::ExportDropped { .. } | Self::StaleGeneration(_) | Self::Rebooted)
    }

    /// Returns whether the time limit of the call has passed. The call can be repeated.
    pub fn is_timeout(&self) -> bool {
        match self.innermost() {
            Self::Timeout { .. }
            | Self::StillHeld { .. }
            | Self::NotOpened { .. }
            | Self::NobodyListens { .. } => true,
            Self::Io { cause, .. } => cause.kind() == std::io::ErrorKind::TimedOut,
            _ => false,
        }
    }

    /// Returns whether the permissions refuse the call: the allow list or the user, the token, the access that the exporter
    /// grants, or the permissions of a file.
    pub fn is_not_permitted(&self) -> bool {
        match self.innermost() {
            Self::NotPermitted(_) | Self::AccessDenied { .. } => true,
            Self::Io { cause, .. } => cause.kind() == std::io::ErrorKind::PermissionDenied,
            _ => false,
        }
    }
}

impl From<Unavailable> for Error {
    fn from(reason: Unavailable) -> Self {
        Self::BackendUnavailable { backend: None, reason }
    }
}

impl From<VendorError> for Error {
    fn from(error: VendorError) -> Self {
        Self::Vendor(Box::new(error))
    }
}

/// The number that a vendor's call returned. A number, because a newer library may return one that nobody knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VendorStatus(pub i32);

/// A call of a vendor's library that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{call} failed with {name} ({}){}{}",
    .status.0,
    separated(": ", .message),
    separated(". ", .hint)
)]
#[non_exhaustive]
pub struct VendorError {
    /// The backend.
    pub backend: &'static str,
    /// The function, as the vendor writes it.
    pub call: &'static str,
    /// The number it returned.
    pub status: VendorStatus,
    /// The vendor's name of the number, or `unknown status`.
    pub name: String,
    /// The vendor's last message, or empty.
    pub message: String,
    /// What to do about it, or empty.
    pub hint: String,
}

impl VendorError {
    /// Creates an error without the vendor's message and without advice.
    pub fn new(
        backend: &'static str,
        call: &'static str,
        status: VendorStatus,
        name: impl Into<String>,
    ) -> Self {
        Self { backend, call, status, name: name.into(), message: String::new(), hint: String::new() }
    }

    /// Sets [`message`](Self::message).
    pub fn with_message(mut self, message: impl Into<String>) -> Self {
        self.message = message.into();
        self
    }

    /// Sets [`hint`](Self::hint).
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }
}

fn not_opened(after: Duration, opened: u64, expected: u64) -> String {
    let after = after.as_millis();
    let failed = match opened {
        0 => format!("no process has opened the export within {after} ms"),
        _ => format!("the export was opened {opened} of {expected} times within {after} ms"),
    };
    format!("{failed}; check that the importers received the descriptor and open it, or drop the export")
}

fn not_released(after: Duration, holders: &Holders) -> String {
    let after = after.as_millis();
    if holders.iter().len() == 0 {
        let times = holders.opened();
        return format!(
            "the export was not released within {after} ms, though no process holds it now (opened {times} times); wait again"
        );
    }
    format!("after {after} ms the export is still held: {holders}")
}

fn no_entry(home: &DeviceIdentity, peer: Option<&str>) -> String {
    match peer {
        None => format!("the device map has no entry for device {home}; add one with DeviceMap::insert"),
        Some(peer) => format!(
            "the device map of the channel with {peer} has no entry for device {home}; add one with DeviceMap::insert to \
             the map that is given to device_map where the channel is made"
        ),
    }
}

fn separated(separator: &str, text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("{separator}{text}") }
}

fn list(statuses: &[BackendStatus]) -> String {
    if statuses.is_empty() {
        return " none is compiled in; enable a feature (cuda, ascend, mock) or register one".into();
    }
    statuses.iter().map(|status| format!("\n  {status}")).collect()
}
