//! The kinds of errors, which callers match on.

/// The kind of an error: what a caller can do about it. The variants of [`Error`](super::Error) are its facts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// No backend has a device, or the named one cannot be used.
    Backend,
    /// The backend, or this kind of memory, does not support the operation.
    Unsupported,
    /// An argument is out of range or malformed.
    InvalidInput,
    /// The operation is not possible in the present state of the object, or on this thread.
    InvalidState,
    /// A name or a mapping that is in the way is in use.
    InUse,
    /// The bytes or the text are not a descriptor that this version can read.
    Descriptor,
    /// Shape, strides, element type, size or address do not fit the memory.
    Layout,
    /// The host, the device, the stream or the addresses do not fit the memory.
    Placement,
    /// There is no tensor of this name.
    NotFound,
    /// The device has not enough free memory.
    OutOfMemory,
    /// A process, a user or an export has its share of a resource: release some of it, and repeat the call.
    QuotaExceeded,
    /// The allow list, the token, the access that the exporter grants, or the permissions of a file forbid it.
    NotPermitted,
    /// The exporter has dropped the export, the memory was freed, or the host has rebooted: request a new descriptor from the
    /// exporter, with a new grant if the export was opened by one. Or a ring has dismissed this reader: open it again.
    Stale,
    /// A process of the other side has terminated. A retry with the same descriptor or connection fails again.
    Gone,
    /// The peer has closed its end of the lease, the ring or the channel. A retry with the same connection fails again.
    Closed,
    /// The timeout of the call has expired. The call can be repeated.
    Timeout,
    /// The process was forked after the library was used.
    Forked,
    /// The peer violates the protocol, or uses another version.
    Protocol,
    /// A call of the system or of the vendor's library failed.
    System,
}
