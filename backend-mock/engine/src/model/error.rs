//! Errors, one variant per cause.
//!
//! A simulator maps each cause to its vendor's status, and a test tells the causes apart. [`EngineError::code`] is
//! a number for callers that cannot carry an enum, such as a test process that answers in text.

use super::ids::Address;
use super::operation::Operation;

/// The cause of a revocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Revocation {
    /// The exporting process has exited.
    ExporterExited,
    /// The exporter freed the allocation.
    Freed,
    /// The exporter revoked the export and keeps the allocation.
    Unexported,
}

impl std::fmt::Display for Revocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::ExporterExited => "the exporting process has exited",
            Self::Freed => "the exporter freed the memory",
            Self::Unexported => "the exporter revoked the export",
        })
    }
}

/// An error of a call, or of work that a stream ran later.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// No visible device has this ordinal.
    #[error("device {ordinal} not found: this process sees {count} device(s), numbered from 0")]
    InvalidDevice {
        /// The requested ordinal.
        ordinal: usize,
        /// The number of visible devices.
        count: usize,
    },
    /// An invalid argument.
    #[error("invalid argument: {what}")]
    InvalidValue {
        /// What is wrong with the argument.
        what: String,
    },
    /// The device is out of memory.
    #[error("device {device} is out of memory: {requested} bytes requested, {free} bytes free")]
    OutOfMemory {
        /// Ordinal of the device.
        device: usize,
        /// Requested bytes, rounded up to whole pages.
        requested: u64,
        /// Bytes that this process can still allocate on the device.
        free: u64,
    },
    /// The address is not device memory of this process; host memory and null are not.
    #[error("{address} is not device memory of this process")]
    UnknownAddress {
        /// The address.
        address: Address,
    },
    /// The call takes only the base of an allocation or of a mapping.
    #[error("{address} is not the start of its range, which begins at {base}")]
    NotBase {
        /// The given address.
        address: Address,
        /// The base of the range that contains the address.
        base: Address,
    },
    /// The memory was opened from another process, and the call takes only allocations of this process.
    #[error(
        "{address} was opened from another process: close it instead of freeing it; it cannot be exported again"
    )]
    Imported {
        /// The address.
        address: Address,
    },
    /// The memory is an allocation of this process, and the call takes only opened memory.
    #[error("{address} was allocated by this process: free it instead of closing it")]
    NotImported {
        /// The address.
        address: Address,
    },
    /// The bytes begin in a range of device memory and exceed it.
    #[error("{len} bytes at {address} exceed the range of {size} bytes at {base}")]
    OutOfRange {
        /// First byte.
        address: Address,
        /// Number of bytes.
        len: u64,
        /// Base of the range that contains the first byte.
        base: Address,
        /// Size of that range, in bytes.
        size: u64,
    },
    /// The address does not have the required alignment.
    #[error("{address} is not a multiple of {alignment} bytes")]
    Misaligned {
        /// The address.
        address: Address,
        /// Required alignment in bytes.
        alignment: u64,
    },
    /// Not a handle, or a stale one.
    #[error("invalid handle: {reason}")]
    InvalidHandle {
        /// What is wrong with the handle.
        reason: &'static str,
    },
    /// The handle was exported by this process; use the original address or event.
    #[error(
        "the handle was exported by this process, which cannot open it: use the original address or event"
    )]
    OwnProcess,
    /// The exporting process has exited.
    #[error("the exporting process {pid} has exited")]
    ExporterGone {
        /// The pid of the exporter.
        pid: u32,
    },
    /// The exporter runs as another user, or with more privileges.
    #[error(
        "permission denied to open memory of process {pid}: both processes must run as the same user, or the \
         memory must travel by file descriptor (DEVICE_IPC_MOCK=\"handles=fds;events=off\" in both)"
    )]
    PermissionDenied {
        /// The exporter's pid.
        pid: u32,
    },
    /// The device has no peer access to the home device of the memory.
    #[error(
        "device {from} (physical) has no peer access to device {to} (physical), the home device of the memory"
    )]
    NoPeerAccess {
        /// Physical index of the accessing device.
        from: usize,
        /// Physical index of the home device.
        to: usize,
    },
    /// The work writes to memory that was opened read-only.
    #[error("cannot write to {address}: it was opened read-only")]
    ReadOnly {
        /// The address.
        address: Address,
    },
    /// The exporter revoked the mapping.
    #[error("the mapping at {address} was revoked: {why}")]
    Revoked {
        /// Base of the mapping.
        address: Address,
        /// The cause.
        why: Revocation,
    },
    /// Work accessed memory that its device cannot access, or that was freed.
    #[error("illegal address {address} for work on device {device}")]
    IllegalAddress {
        /// The address.
        address: Address,
        /// Ordinal of the device that ran the work.
        device: usize,
    },
    /// The stream does not exist, or was destroyed.
    #[error("stream {stream} not found: it does not exist or was destroyed")]
    InvalidStream {
        /// The stream's number.
        stream: u64,
    },
    /// The event does not exist, or was destroyed.
    #[error("event {event} not found: it does not exist or was destroyed")]
    InvalidEvent {
        /// The event's number.
        event: u64,
    },
    /// The block of physical memory does not exist, or was released.
    #[error("block {block} of physical memory not found: it does not exist or was released")]
    InvalidBlock {
        /// The block's number.
        block: u64,
    },
    /// The machine is configured without this feature.
    #[error("not supported by this machine: {what}")]
    NotSupported {
        /// The missing feature.
        what: &'static str,
    },
    /// The process that recorded the event exited before the record was complete.
    #[error("process {pid} exited before the work that it recorded into the event was complete")]
    PeerLost {
        /// The pid of the process.
        pid: u32,
    },
    /// The stream on which the event was recorded failed before the record.
    #[error("the event was recorded behind work that failed")]
    RecordFailed,
    /// A host function panicked on the stream's thread.
    #[error("a host function panicked on its stream")]
    HostFunctionPanicked,
    /// The call waits for streams and was made on a stream's thread.
    #[error("{operation} waits for streams and cannot be called from a host function")]
    NotPermitted {
        /// The operation.
        operation: Operation,
    },
    /// An injected fault.
    #[error("injected fault in {operation}, code {code}")]
    Injected {
        /// The operation that failed.
        operation: Operation,
        /// The code of the fault, for a simulator to return.
        code: i32,
    },
    /// The process was forked after the machine was created.
    #[error("the machine does not work in a forked child; spawn a new process instead (fork and exec)")]
    Forked,
    /// The work waited longer than its limit.
    #[error("the work timed out")]
    TimedOut,
    /// The stream failed or was destroyed before it reached the work.
    #[error("the work was cancelled: its stream failed or was destroyed before it ran")]
    Cancelled,
    /// A system call failed.
    #[error("{call} failed: {}", std::io::Error::from_raw_os_error(*errno))]
    System {
        /// The system call.
        call: &'static str,
        /// The error number.
        errno: i32,
    },
}

impl EngineError {
    /// Returns whether a system call failed by the limit on open files of the process or of the system.
    pub fn is_descriptor_limit(&self) -> bool {
        use rustix::io::Errno;
        let limits = [Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error);
        matches!(self, Self::System { errno, .. } if limits.contains(errno))
    }

    /// Returns the number of the variant, which is the same in every release.
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
