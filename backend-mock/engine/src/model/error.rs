//! Everything that can go wrong, one variant per cause.
//!
//! Why: a simulator has to turn each cause into its vendor's status, and a test
//! has to tell them apart. [`EngineError::code`] is the number for those who
//! cannot carry an enum.

use super::ids::Address;
use super::operation::Operation;

/// What the exporter did to a mapping that was revoked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Revocation {
    /// The exporting process has ended.
    ExporterExited,
    /// The exporter freed the allocation.
    Freed,
    /// The exporter withdrew the export and keeps the allocation.
    Unexported,
}

impl std::fmt::Display for Revocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::ExporterExited => "its exporter's process has ended",
            Self::Freed => "its exporter freed the memory",
            Self::Unexported => "its exporter withdrew the export",
        })
    }
}

/// Why a call, or the work that a stream ran later, failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// No visible device has this ordinal.
    #[error("no device {ordinal}: this process sees {count} device(s), numbered from 0")]
    InvalidDevice {
        /// The ordinal that was asked for.
        ordinal: usize,
        /// How many devices are visible.
        count: usize,
    },
    /// An argument that no call can accept.
    #[error("invalid argument: {what}")]
    InvalidValue {
        /// What was wrong with it.
        what: String,
    },
    /// The device's memory is used up.
    #[error("device {device} is out of memory: {requested} bytes asked for, {free} bytes free")]
    OutOfMemory {
        /// Ordinal of the device.
        device: usize,
        /// Bytes asked for, rounded up to whole pages.
        requested: u64,
        /// Bytes that this process has left on the device.
        free: u64,
    },
    /// No device memory is known at this address; host memory and null are among these.
    #[error("{address} is no device memory of this process")]
    UnknownAddress {
        /// The address.
        address: Address,
    },
    /// The call takes the base of an allocation or of a mapping only.
    #[error("{address} is not the start of its range, which begins at {base}")]
    NotBase {
        /// The address that was given.
        address: Address,
        /// The base of the range in which it lies.
        base: Address,
    },
    /// The memory was opened from another process, and the call takes own allocations only.
    #[error(
        "{address} was opened from another process; it is closed, not freed, and cannot be exported again"
    )]
    Imported {
        /// The address.
        address: Address,
    },
    /// The memory is an own allocation, and the call takes opened memory only.
    #[error("{address} was allocated by this process; it is freed, not closed")]
    NotImported {
        /// The address.
        address: Address,
    },
    /// The bytes begin in known memory and run past its end.
    #[error("{len} bytes from {address} run past the end of the range of {size} bytes at {base}")]
    OutOfRange {
        /// First byte.
        address: Address,
        /// How many bytes.
        len: u64,
        /// Base of the range that holds the first byte.
        base: Address,
        /// Size of that range, in bytes.
        size: u64,
    },
    /// The address does not have the alignment that the work needs.
    #[error("{address} is not a multiple of {alignment} bytes")]
    Misaligned {
        /// The address.
        address: Address,
        /// Needed alignment, in bytes.
        alignment: u64,
    },
    /// Not a handle, or one that names nothing any more.
    #[error("invalid handle: {reason}")]
    InvalidHandle {
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The handle was exported by this very process; use the original address or event.
    #[error("the handle was exported by this process, which cannot open it; use the original")]
    OwnProcess,
    /// The process that exported the handle has ended.
    #[error("the exporting process {pid} has ended")]
    ExporterGone {
        /// Its pid at the time.
        pid: u32,
    },
    /// The exporter belongs to somebody else, or to a more privileged process.
    #[error("the memory of process {pid} may not be opened: both processes must run as the same user")]
    PermissionDenied {
        /// The exporter's pid.
        pid: u32,
    },
    /// The device on which the memory should be opened cannot reach its home.
    #[error("device {from} (physical) has no peer access to device {to} (physical), where the memory lives")]
    NoPeerAccess {
        /// Physical index of the device that would access.
        from: usize,
        /// Physical index of the home device.
        to: usize,
    },
    /// Work would write to memory that was opened read-only.
    #[error("{address} was opened read-only and would be written")]
    ReadOnly {
        /// The address.
        address: Address,
    },
    /// The mapping is no longer valid, because its exporter ended it.
    #[error("the mapping at {address} was revoked: {why}")]
    Revoked {
        /// Base of the mapping.
        address: Address,
        /// What the exporter did.
        why: Revocation,
    },
    /// A kernel met memory that its device cannot reach, or that was freed meanwhile.
    #[error("illegal address {address} for work on device {device}")]
    IllegalAddress {
        /// The address.
        address: Address,
        /// Ordinal of the device that ran the work.
        device: usize,
    },
    /// No such stream, or it was destroyed.
    #[error("no stream {stream}")]
    InvalidStream {
        /// The stream's number.
        stream: u64,
    },
    /// No such event, or it was destroyed.
    #[error("no event {event}")]
    InvalidEvent {
        /// The event's number.
        event: u64,
    },
    /// No such block of physical memory, or it was released.
    #[error("no block {block} of physical memory")]
    InvalidBlock {
        /// The block's number.
        block: u64,
    },
    /// The machine was configured without this.
    #[error("not supported by this machine: {what}")]
    NotSupported {
        /// What is missing.
        what: &'static str,
    },
    /// The process that should have completed the record has ended.
    #[error("process {pid} ended before the work it had recorded into the event was done")]
    PeerLost {
        /// Its pid.
        pid: u32,
    },
    /// The stream that the event was recorded on failed before it got there.
    #[error("the event stands behind work that failed")]
    RecordFailed,
    /// A host function panicked on the stream's thread.
    #[error("a host function panicked on its stream")]
    HostFunctionPanicked,
    /// The call would wait for streams, and was made from a stream's own thread.
    #[error("{operation} waits for streams and cannot be called from a host function")]
    NotPermitted {
        /// The call.
        operation: Operation,
    },
    /// A fault that was asked for.
    #[error("injected fault in {operation}, code {code}")]
    Injected {
        /// Where.
        operation: Operation,
        /// The code that was given with the fault, for a simulator to return.
        code: i32,
    },
    /// The process was forked after the machine was made.
    #[error("the machine does not work in a forked child; spawn a new process instead (fork and exec)")]
    Forked,
    /// The work had to wait for longer than its caller allowed.
    #[error("the work waited for too long: its limit is over")]
    TimedOut,
    /// The stream was torn down before it got to the work.
    #[error("the work was dropped: its stream failed or was torn down before it ran")]
    Cancelled,
    /// The operating system refused.
    #[error("{call} failed: {}", std::io::Error::from_raw_os_error(*errno))]
    System {
        /// The system call.
        call: &'static str,
        /// Its error number.
        errno: i32,
    },
}

impl EngineError {
    /// A small number per variant, the same in every release.
    pub fn code(&self) -> i32 {
        match self {
            Self::InvalidDevice { .. } => 1,
            Self::InvalidValue { .. } => 2,
            Self::OutOfMemory { .. } => 3,
            Self::UnknownAddress { .. } => 4,
            Self::NotBase { .. } => 5,
            Self::Imported { .. } => 6,
            Self::NotImported { .. } => 7,
            Self::OutOfRange { .. } => 8,
            Self::Misaligned { .. } => 9,
            Self::InvalidHandle { .. } => 10,
            Self::OwnProcess => 11,
            Self::ExporterGone { .. } => 12,
            Self::PermissionDenied { .. } => 13,
            Self::NoPeerAccess { .. } => 14,
            Self::ReadOnly { .. } => 15,
            Self::Revoked { .. } => 16,
            Self::IllegalAddress { .. } => 17,
            Self::InvalidStream { .. } => 18,
            Self::InvalidEvent { .. } => 19,
            Self::NotSupported { .. } => 20,
            Self::PeerLost { .. } => 21,
            Self::RecordFailed => 22,
            Self::HostFunctionPanicked => 23,
            Self::NotPermitted { .. } => 24,
            Self::Injected { .. } => 25,
            Self::Forked => 26,
            Self::Cancelled => 27,
            Self::System { .. } => 28,
            Self::InvalidBlock { .. } => 29,
            Self::TimedOut => 30,
        }
    }

    pub(crate) fn invalid_value(what: impl Into<String>) -> Self {
        Self::InvalidValue { what: what.into() }
    }

    pub(crate) fn system(call: &'static str) -> impl Fn(rustix::io::Errno) -> Self {
        move |errno| Self::System { call, errno: errno.raw_os_error() }
    }
}
