//! The kind of each error.

use super::{Error, ErrorKind};

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
