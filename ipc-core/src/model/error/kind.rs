//! The kinds of errors, which callers match on.

use super::Error;

/// The kind of an error: what a caller can do about it. The variants of [`Error`] are its facts.
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

impl Error {
    /// Returns the kind. An error about a named tensor, or of a copy from another host, has that of its cause; a refusal by another
    /// process that of the error there.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NoBackend(_) | Self::BackendUnavailable { .. } | Self::UnknownBackend { .. } => {
                ErrorKind::Backend
            }
            Self::Unsupported { .. }
            | Self::NotShareable { .. }
            | Self::SharedOn { .. }
            | Self::Exposes { .. } => ErrorKind::Unsupported,
            Self::InvalidInput { .. } | Self::MessageTooLarge { .. } => ErrorKind::InvalidInput,
            Self::StreamCapturing { .. }
            | Self::Suspended
            | Self::RingSlotsHeld { .. }
            | Self::RingNotYet { .. }
            | Self::OnWorkerThread { .. } => ErrorKind::InvalidState,
            Self::OverlapsInUse { .. } | Self::ChannelNameInUse { .. } => ErrorKind::InUse,
            Self::Descriptor(_) => ErrorKind::Descriptor,
            Self::Layout(_) | Self::InvalidRegion(_) | Self::NotDeviceMemory { .. } => ErrorKind::Layout,
            Self::WrongBackend { .. }
            | Self::NoSuchDevice { .. }
            | Self::HomeNotVisible { .. }
            | Self::NotInDeviceMap { .. }
            | Self::InvalidDeviceMap(_)
            | Self::NoPeerAccess { .. }
            | Self::WrongStream { .. }
            | Self::AddressesInUse { .. }
            | Self::OtherHost { .. }
            | Self::OtherNetworkNamespace => ErrorKind::Placement,
            Self::NoSuchTensor { .. } => ErrorKind::NotFound,
            Self::OutOfMemory { .. } => ErrorKind::OutOfMemory,
            Self::QuotaExceeded(_) => ErrorKind::QuotaExceeded,
            Self::Refused { kind, .. } => *kind,
            Self::AccessDenied { .. } | Self::NotPermitted(_) => ErrorKind::NotPermitted,
            Self::ExportDropped { .. }
            | Self::GrantEnded { .. }
            | Self::StaleGeneration(_)
            | Self::Rebooted
            | Self::DismissedFromRing { .. } => ErrorKind::Stale,
            Self::ExporterGone { .. }
            | Self::ImporterGone { .. }
            | Self::HolderDied { .. }
            | Self::PeerGone { .. } => ErrorKind::Gone,
            Self::LeaseEnded { .. } | Self::RingClosed { .. } | Self::ChannelClosed { .. } => {
                ErrorKind::Closed
            }
            Self::Timeout { .. }
            | Self::StillHeld { .. }
            | Self::NotOpened { .. }
            | Self::NoListener { .. } => ErrorKind::Timeout,
            Self::Forked => ErrorKind::Forked,
            Self::Protocol(_) => ErrorKind::Protocol,
            Self::Vendor(_) => ErrorKind::System,
            Self::Io { cause, .. } => match cause.kind() {
                std::io::ErrorKind::TimedOut => ErrorKind::Timeout,
                std::io::ErrorKind::PermissionDenied => ErrorKind::NotPermitted,
                _ => ErrorKind::System,
            },
            Self::InBundle { cause, .. } | Self::InPull { cause, .. } => cause.kind(),
            Self::RingUnpublished { source, .. } => source.kind(),
        }
    }
}
