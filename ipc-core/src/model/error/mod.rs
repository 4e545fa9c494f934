//! Errors: a kind for each reaction of a caller, and a variant with the facts of each condition.

#[cfg(test)]
mod chains;
mod descriptor;
mod kind;
mod text;
mod vendor;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::access::Access;
use super::address::{DevicePtr, DeviceRange};
use super::availability::{BackendStatus, Unavailable};
use super::device::{DeviceIdentity, DeviceOrdinal};
use super::layout::LayoutError;
use super::lease::Holders;

pub use super::remedy::{BackendRemedy, Remedy};
pub use descriptor::{DescriptorError, FormatVersion};
pub use kind::ErrorKind;
pub use vendor::{VendorError, VendorStatus};

use text::{holders_died, list, no_entry, not_opened, not_released, open_files_remedy, other_host_remedy};

/// The result of the fallible functions of this library.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error, with what to do about it if that is known. Programs match on its [`kind`](Self::kind), and on the variant if they need
/// its facts.
///
/// The text of an error names its cause, and [`source`](std::error::Error::source) returns only what the text leaves out: a
/// report that prints the whole chain repeats nothing.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No backend has a device.
    #[error("no backend has a device:{}", list(.0))]
    NoBackend(Vec<BackendStatus>),

    /// The requested backend cannot be used.
    #[error("the backend{} cannot be used: {reason}", .backend.as_ref().map(|name| format!(" {name:?}")).unwrap_or_default())]
    BackendUnavailable {
        /// The name of the requested backend; `None` if the program loaded a backend without a name.
        backend: Option<String>,
        /// The reason.
        reason: Unavailable,
    },

    /// No backend of this name is compiled in or registered.
    #[error(
        "backend {name:?} not found; known backends: {}; {}",
        .known.join(", "),
        Remedy::EnableBackend
    )]
    UnknownBackend {
        /// The requested name.
        name: String,
        /// The available names.
        known: Vec<String>,
    },

    /// A descriptor, a stream or an owner of memory belongs to another backend.
    #[error(
        "{what} belongs to the backend {found:?}, but this one is {expected:?}; {}",
        Remedy::UseItsBackend
    )]
    WrongBackend {
        /// The object of the other backend.
        what: &'static str,
        /// The backend of the object.
        found: String,
        /// The backend that was called.
        expected: String,
    },

    /// A call of the vendor's library failed.
    #[error(transparent)]
    Vendor(Box<VendorError>),

    /// The backend does not support the operation.
    #[error("{backend} cannot {what}: {why}")]
    Unsupported {
        /// The backend.
        backend: &'static str,
        /// The operation.
        what: String,
        /// The reason, and what to do instead.
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
        /// The reason.
        why: String,
    },

    /// The region is invalid, or exceeds its allocation.
    #[error("invalid region: {0}")]
    InvalidRegion(String),

    /// The kind of memory cannot be shared.
    #[error("the memory at {ptr} is {kind} and cannot be shared: {remedy}")]
    NotShareable {
        /// The address.
        ptr: DevicePtr,
        /// The kind of memory.
        kind: String,
        /// What to do instead.
        remedy: String,
    },

    /// The memory was opened from another process.
    #[error(
        "the memory at {ptr} was opened from another process and cannot be exported again; {}",
        Remedy::ForwardDescriptor
    )]
    SharedOn {
        /// The address.
        ptr: DevicePtr,
    },

    /// The ordinal is out of range.
    #[error("device {ordinal} not found: {backend} shows this process {count} device(s), numbered from 0")]
    NoSuchDevice {
        /// The backend.
        backend: &'static str,
        /// The requested ordinal.
        ordinal: DeviceOrdinal,
        /// The number of devices.
        count: usize,
    },

    /// The home device of the memory is not visible to this process.
    #[error(
        "the home device {home} of the memory is not visible to this process; add it to {variable}, or {}",
        Remedy::OpenOnVisibleDevice
    )]
    HomeNotVisible {
        /// The home device.
        home: DeviceIdentity,
        /// The vendor's environment variable that hides devices.
        variable: &'static str,
    },

    /// The device map has no entry for the home device.
    #[error("{}", no_entry(.home, .peer.as_deref()))]
    NotInDeviceMap {
        /// The home device.
        home: DeviceIdentity,
        /// The peer of the channel with the map; `None` for a map of the caller.
        peer: Option<String>,
    },

    /// The device map is not one-to-one, or names unknown devices.
    #[error("invalid device map: {0}")]
    InvalidDeviceMap(String),

    /// The device has no peer access to the home device.
    #[error(
        "device {from} cannot access the memory of device {to}: no peer access; {}",
        Remedy::OpenAtHomeOrStaged
    )]
    NoPeerAccess {
        /// The requested device.
        from: DeviceOrdinal,
        /// The home device.
        to: DeviceIdentity,
    },

    /// The stream belongs to another device than the event or the mapping.
    #[error("the stream runs on device {stream}, but {what} needs a stream of device {expected}")]
    WrongStream {
        /// The stream's device.
        stream: DeviceOrdinal,
        /// The object that needs another stream.
        what: &'static str,
        /// The device of that object.
        expected: DeviceOrdinal,
    },

    /// The stream is being captured into a graph, where the operation is not possible. The capture is intact.
    #[error(
        "the stream is being captured into a graph, and {what} would be done once instead of at each launch; do it \
         before the capture begins (take the mapping on the stream, or wait for the timeline, first)"
    )]
    StreamCapturing {
        /// The operation.
        what: &'static str,
    },

    /// Importers could access more than the shared bytes, and the exposure policy refuses that.
    #[error(
        "importers could access {reachable} in addition to the {region} B that are shared: {why}; {}, or memory of an \
         isolated kind",
        Remedy::ShareCopy
    )]
    Exposes {
        /// The size of the region in bytes.
        region: u64,
        /// The description of the other reachable bytes.
        reachable: String,
        /// The reason.
        why: String,
    },

    /// The value is not valid for a timeline.
    #[error("a timeline cannot be signalled or awaited at {value}: {why}")]
    TimelineValue {
        /// The value.
        value: u64,
        /// The reason.
        why: String,
    },

    /// The device has not enough free memory.
    #[error("out of memory: device {device} cannot allocate {bytes} B: {detail}")]
    OutOfMemory {
        /// The device.
        device: DeviceOrdinal,
        /// The requested size in bytes.
        bytes: u64,
        /// The vendor's message.
        detail: String,
    },

    /// The tensor's layout does not fit the region, or the view does not fit the layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),

    /// The mapping or the export does not permit this access.
    #[error("{wanted} access denied: the memory is {granted}; {}", Remedy::PermitAccess)]
    AccessDenied {
        /// The requested access.
        wanted: Access,
        /// The permitted access.
        granted: Access,
    },

    /// Another mapping of this process, which is still in use, is in the way: a stale one overlaps the addresses of this memory, or the
    /// vendor maps this memory once for a device.
    #[error(
        "another mapping of the exporter's memory is still in use and in the way: {detail}; drop the mappings of this export and of \
         those that have ended, or close all mappings of the exporter (close_mappings_of)"
    )]
    OverlapsInUse {
        /// The vendor's message.
        detail: String,
    },

    /// Addresses of this process cannot be reserved, or mapped in a reservation, as they are in use.
    #[error("the {} B at {} of device {} are in use: {detail}", .range.len, .range.ptr, .range.device)]
    AddressesInUse {
        /// The addresses.
        range: DeviceRange,
        /// The use, and what to do.
        detail: String,
    },

    /// The mapping is suspended: its addresses hold no memory.
    #[error("the mapping is suspended, so that its addresses hold no memory; resume it first")]
    Suspended,

    /// The exporting process has terminated, or another process has its process id now.
    #[error("the exporting process {pid} has terminated; its exports have ended")]
    ExporterGone {
        /// The process id in the exporter's pid namespace.
        pid: u32,
    },

    /// The importing process has terminated without signalling this value.
    #[error("the importing process {pid} has terminated; it signals no further values")]
    ImporterGone {
        /// The process id, as reported by the kernel; 0 for a process of another pid namespace.
        pid: u32,
    },

    /// The importer has released its lease, and signals no further values.
    #[error("process {pid} has released its lease; it signals no further values")]
    LeaseEnded {
        /// The importer's process id, as reported by the kernel.
        pid: u32,
    },

    /// The exporter has dropped the export, and still runs.
    #[error("process {pid} has dropped this export; request a new descriptor from it")]
    ExportDropped {
        /// The exporter's process id.
        pid: u32,
    },

    /// The exporter has dropped the export, and the [grant](crate::Grant) by which it was opened has ended.
    #[error(
        "the grant has already been used, was given back, or has reached its time limit, and process {pid} has dropped the \
         export; request a new grant from it"
    )]
    GrantEnded {
        /// The exporter's process id.
        pid: u32,
    },

    /// The memory was freed, and another allocation may have its address.
    #[error(
        "the exported memory was freed by its owner, and another allocation may have its address now: {0}"
    )]
    StaleGeneration(String),

    /// The descriptor was made before the last boot of this host.
    #[error("the descriptor was made before the last boot of this host; request a new one from the exporter")]
    Rebooted,

    /// The descriptor was made on another host.
    #[error(
        "the descriptor was made on another host ({exporter}, this is {local}); device memory is shared within one host{}",
        other_host_remedy(*.listens)
    )]
    OtherHost {
        /// The exporter's host.
        exporter: String,
        /// This host.
        local: String,
        /// Whether the descriptor has a network address.
        listens: bool,
    },

    /// The exporter's socket cannot be reached from this network namespace.
    #[error(
        "the exporter listens on an abstract socket of another network namespace; set DEVICE_IPC_SOCKET_DIR to a \
         directory that both containers mount, in both"
    )]
    OtherNetworkNamespace,

    /// The exporter or the importer does not permit the connection or the access.
    #[error("not permitted: {0}")]
    NotPermitted(String),

    /// A process, a user or an export has its share of a resource.
    #[error("quota exceeded: {0}")]
    QuotaExceeded(String),

    /// The exporting process could not carry the request out.
    #[error("process {pid} refused the request: {detail}")]
    Refused {
        /// The process id in the exporter's pid namespace.
        pid: u32,
        /// The kind of the error in that process; [`ErrorKind::System`] if this version does not know it.
        kind: ErrorKind,
        /// The text of the error in that process.
        detail: String,
    },

    /// The peer violates the protocol, or uses another version.
    #[error("protocol violation by the peer: {0}")]
    Protocol(String),

    /// A system call, or the connection to the exporter, failed.
    #[error("{what} failed: {cause}{}", open_files_remedy(.cause))]
    Io {
        /// The failed operation.
        what: String,
        /// The system's error.
        cause: Arc<std::io::Error>,
    },

    /// The timeout expired.
    #[error("timed out after {} ms: waiting for {what}{detail}", .after.as_millis())]
    Timeout {
        /// The condition that did not occur.
        what: String,
        /// The duration of the timeout.
        after: Duration,
        /// Further facts, or an empty text.
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

    /// The export was not released within the timeout.
    #[error("{}", not_released(*.after, .holders))]
    StillHeld {
        /// The duration of the timeout.
        after: Duration,
        /// The remaining holders.
        holders: Holders,
    },

    /// The export is released, but importers died while they used the memory.
    #[error("{}", holders_died(.holders))]
    HolderDied {
        /// The processes that died ([`Holders::died`]).
        holders: Holders,
    },

    /// A call that waits was made on the worker thread: in a callback, or in the drop of an owner.
    #[error(
        "{call} cannot wait on the library's worker thread, which runs callbacks and drops owners: it would wait for itself; \
         call it on another thread (which the callback can notify), or with a timeout of zero"
    )]
    OnWorkerThread {
        /// The call.
        call: &'static str,
    },

    /// The process was forked after the library was used.
    #[error(
        "device memory does not survive fork: this process was forked from one that used it; {}",
        Remedy::SpawnChild
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
         them, or {}",
        Remedy::TakePublishedSlots
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
        "this reader holds all {slots} slots of the ring, and nothing can be published before it has released one; {}",
        Remedy::ReleaseOldestSlot
    )]
    RingSlotsHeld {
        /// The number of slots of the ring.
        slots: u32,
    },

    /// The writer has dismissed this reader.
    #[error(
        "process {pid} has dismissed this reader from the ring, and may have overwritten the slots that it was reading; {}",
        Remedy::JoinRing
    )]
    DismissedFromRing {
        /// The writer's process id, in its own pid namespace.
        pid: u32,
    },

    /// The name is not a valid channel name.
    #[error("invalid channel name {name:?}: {why}")]
    InvalidChannelName {
        /// The name.
        name: String,
        /// The reason.
        why: &'static str,
    },

    /// A process listens under this name already.
    #[error("process {pid} ({program}) already listens as {name:?}; drop its listener, or use another name")]
    ChannelNameInUse {
        /// The name.
        name: String,
        /// The process id of the listener, as reported by the kernel; 0 for a process of another pid namespace.
        pid: u32,
        /// The program's name, as reported by the kernel; empty if it is unknown.
        program: String,
    },

    /// No process listens under this name.
    #[error(
        "{}no process listens as {name:?}: {detail}",
        if after.is_zero() { String::new() } else { format!("timed out after {} ms: ", .after.as_millis()) }
    )]
    NoListener {
        /// The name.
        name: String,
        /// The duration of the timeout.
        after: Duration,
        /// The addresses that were tried, and what to check.
        detail: String,
    },

    /// The message exceeds a limit of the channel. Nothing of it has been sent.
    #[error(
        "the message has {size} {of}, the limit is {limit}; send less at a time, or large data as tensors{}",
        if *.of == "bytes" { ", or raise the limit on both sides (message_limit)" } else { "" }
    )]
    MessageTooLarge {
        /// The kind of limit: `bytes` or `tensors`.
        of: &'static str,
        /// The size of the message.
        size: u64,
        /// The limit.
        limit: u64,
    },

    /// One end has closed the channel.
    #[error("the channel with process {pid} ({program}) is closed")]
    ChannelClosed {
        /// The process id of the peer.
        pid: u32,
        /// The program's name, as the peer states it.
        program: String,
    },

    /// The peer terminated without closing the channel.
    #[error("process {pid} ({program}) terminated without closing the channel")]
    PeerGone {
        /// The process id of the peer.
        pid: u32,
        /// The program's name, as the peer states it.
        program: String,
    },

    /// An error about a named tensor. No tensor of the export has been shared or opened.
    #[error("tensor {tensor:?}: {cause}")]
    InBundle {
        /// The name of the first tensor concerned.
        tensor: String,
        /// The error.
        cause: Box<Error>,
    },

    /// An error of a copy from another host.
    #[error("cannot copy from process {pid} of host {host} at {address}: {cause}")]
    InPull {
        /// The exporter's process id in its own pid namespace.
        pid: u32,
        /// The exporter's host.
        host: String,
        /// The network address of the exporter.
        address: SocketAddr,
        /// The error.
        cause: Box<Error>,
    },

    /// There is no tensor of this name.
    #[error("tensor {name:?} not found: {known}")]
    NoSuchTensor {
        /// The requested name.
        name: String,
        /// The known names.
        known: String,
    },

    /// The host would hand over a slot of a ring before a stream has completed the preceding ones.
    #[error("sequence {sequence} of the ring cannot be {what} by the host yet: {why}")]
    RingNotYet {
        /// The sequence.
        sequence: u64,
        /// `published` or `released`.
        what: &'static str,
        /// The missing condition, and what to do.
        why: String,
    },
}

impl Error {
    /// Creates an error of a system call or of input and output.
    pub fn io(what: impl Into<String>, cause: impl Into<std::io::Error>) -> Self {
        Self::Io { what: what.into(), cause: Arc::new(cause.into()) }
    }

    /// Returns the innermost error of an [`InBundle`](Self::InBundle) or an [`InPull`](Self::InPull), or the error itself.
    pub fn innermost(&self) -> &Self {
        match self {
            Self::InBundle { cause, .. } | Self::InPull { cause, .. } => cause.innermost(),
            other => other,
        }
    }

    /// Wraps the error with the name of a tensor, unless it contains that name, or concerns the exporting process, the connection
    /// or the timeout.
    pub(crate) fn of_tensor(self, tensor: &str) -> Self {
        match self {
            Self::InBundle { .. }
            | Self::InPull { .. }
            | Self::NoSuchTensor { .. }
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
