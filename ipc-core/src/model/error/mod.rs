//! Errors: a kind for each reaction of a caller, and a variant with the facts of each condition.
//!
//! The variants are flat, in the order of their kinds, and as many as there are conditions that a caller, a front end or a test
//! distinguishes: the pid that has terminated, the holders of an export, the device that cannot reach the memory. One variant for
//! each kind, with a text, would lose these facts; one with an enum of its own would name each kind twice, as there and in
//! [`ErrorKind`]. Conditions that differ only in their text share a variant, such as [`Error::InvalidInput`].

#[cfg(test)]
mod chains;
mod construct;
mod descriptor;
mod kind;
mod kind_of;
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
    // Backend.
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

    // Unsupported.
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

    // InvalidInput.
    /// An argument is out of range or malformed.
    #[error("invalid {what}: {why}")]
    InvalidInput {
        /// The argument, with its value.
        what: String,
        /// The reason, and what to do.
        why: String,
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

    // InvalidState.
    /// The stream is being captured into a graph, where the operation is not possible. The capture is intact.
    #[error(
        "the stream is being captured into a graph, and {what} would be done once instead of at each launch; do it \
         before the capture begins (take the mapping on the stream, or wait for the timeline, first)"
    )]
    StreamCapturing {
        /// The operation.
        what: &'static str,
    },

    /// The mapping is suspended: its addresses hold no memory.
    #[error("the mapping is suspended, so that its addresses hold no memory; resume it first")]
    Suspended,

    /// The reader holds the slot that the next publication takes.
    #[error(
        "this reader holds all {slots} slots of the ring, and nothing can be published before it has released one; {}",
        Remedy::ReleaseOldestSlot
    )]
    RingSlotsHeld {
        /// The number of slots of the ring.
        slots: u32,
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

    /// A call that waits was made on the worker thread: in a callback, or in the drop of an owner.
    #[error(
        "{call} cannot wait on the library's worker thread, which runs callbacks and drops owners: it would wait for itself; \
         call it on another thread (which the callback can notify), or with a timeout of zero"
    )]
    OnWorkerThread {
        /// The call.
        call: &'static str,
    },

    // InUse.
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

    // Descriptor.
    /// The bytes or the text are not a descriptor that this version can read.
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),

    // Layout.
    /// The tensor's layout does not fit the region, or the view does not fit the layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),

    /// The region is invalid, or exceeds its allocation.
    #[error("invalid region: {0}")]
    InvalidRegion(String),

    /// The address is not device memory.
    #[error("{ptr} is not device memory: {why}")]
    NotDeviceMemory {
        /// The address.
        ptr: DevicePtr,
        /// The reason.
        why: String,
    },

    // Placement.
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

    /// Addresses of this process cannot be reserved, or mapped in a reservation, as they are in use.
    #[error("the {} B at {} of device {} are in use: {detail}", .range.len, .range.ptr, .range.device)]
    AddressesInUse {
        /// The addresses.
        range: DeviceRange,
        /// The use, and what to do.
        detail: String,
    },

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

    // NotFound.
    /// There is no tensor of this name.
    #[error("tensor {name:?} not found: {known}")]
    NoSuchTensor {
        /// The requested name.
        name: String,
        /// The known names.
        known: String,
    },

    // OutOfMemory.
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

    // QuotaExceeded.
    /// A process, a user or an export has its share of a resource.
    #[error("quota exceeded: {0}")]
    QuotaExceeded(String),

    // NotPermitted.
    /// The mapping or the export does not permit this access.
    #[error("{wanted} access denied: the memory is {granted}; {}", Remedy::PermitAccess)]
    AccessDenied {
        /// The requested access.
        wanted: Access,
        /// The permitted access.
        granted: Access,
    },

    /// The exporter or the importer does not permit the connection or the access.
    #[error("not permitted: {0}")]
    NotPermitted(String),

    // Stale.
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

    /// The writer has dismissed this reader.
    #[error(
        "process {pid} has dismissed this reader from the ring, and may have overwritten the slots that it was reading; {}",
        Remedy::JoinRing
    )]
    DismissedFromRing {
        /// The writer's process id, in its own pid namespace.
        pid: u32,
    },

    // Gone.
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

    /// The export is released, but importers died while they used the memory.
    #[error("{}", holders_died(.holders))]
    HolderDied {
        /// The processes that died ([`Holders::died`]).
        holders: Holders,
    },

    /// The peer terminated without closing the channel.
    #[error("process {pid} ({program}) terminated without closing the channel")]
    PeerGone {
        /// The process id of the peer.
        pid: u32,
        /// The program's name, as the peer states it.
        program: String,
    },

    // Closed.
    /// The importer has released its lease, and signals no further values.
    #[error("process {pid} has released its lease; it signals no further values")]
    LeaseEnded {
        /// The importer's process id, as reported by the kernel.
        pid: u32,
    },

    /// The writer closed the ring without publishing a slot that the reader took, or was to take, ahead of its publication.
    #[error(
        "process {pid} closed the ring without publishing this slot; discard the results of work that has read the slot"
    )]
    RingClosed {
        /// The writer's process id, in its own pid namespace.
        pid: u32,
    },

    /// One end has closed the channel.
    #[error("the channel with process {pid} ({program}) is closed")]
    ChannelClosed {
        /// The process id of the peer.
        pid: u32,
        /// The program's name, as the peer states it.
        program: String,
    },

    // Timeout.
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

    /// The export was not released within the timeout.
    #[error("{}", not_released(*.after, .holders))]
    StillHeld {
        /// The duration of the timeout.
        after: Duration,
        /// The remaining holders.
        holders: Holders,
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

    // Forked.
    /// The process was forked after the library was used.
    #[error(
        "device memory does not survive fork: this process was forked from one that used it; {}",
        Remedy::SpawnChild
    )]
    Forked,

    // Protocol.
    /// The peer violates the protocol, or uses another version.
    #[error("protocol violation by the peer: {0}")]
    Protocol(String),

    // System.
    /// A call of the vendor's library failed.
    #[error(transparent)]
    Vendor(Box<VendorError>),

    /// A system call, or the connection to the exporter, failed.
    #[error("{what} failed: {cause}{}", open_files_remedy(.cause))]
    Io {
        /// The failed operation.
        what: String,
        /// The system's error.
        cause: Arc<std::io::Error>,
    },

    // The kind of another error.
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
}
