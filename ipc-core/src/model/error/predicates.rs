//! Predicates for programs that classify errors.

use super::Error;

/// Predicates for errors of any call. An error about a named tensor is classified by its cause.
impl Error {
    /// Returns whether the peer is gone: its process has terminated, or it has closed its end of the lease, the ring or the
    /// channel. A retry with the same descriptor or connection fails again.
    pub fn is_gone(&self) -> bool {
        match self.innermost() {
            Self::ExporterGone { .. }
            | Self::ImporterGone { .. }
            | Self::LeaseEnded { .. }
            | Self::HolderDied { .. }
            | Self::RingClosed { .. }
            | Self::ChannelClosed { .. }
            | Self::PeerGone { .. } => true,
            Self::RingUnpublished { source, .. } => source.is_gone(),
            _ => false,
        }
    }

    /// Returns whether the descriptor is stale: the exporter has dropped the export, the memory was freed, or the host has
    /// rebooted. Request a new descriptor from the exporter, with a new grant if the export was opened by one.
    pub fn is_stale(&self) -> bool {
        matches!(
            self.innermost(),
            Self::ExportDropped { .. } | Self::GrantEnded { .. } | Self::StaleGeneration(_) | Self::Rebooted
        )
    }

    /// Returns whether the timeout of the call has expired. The call can be repeated.
    pub fn is_timeout(&self) -> bool {
        match self.innermost() {
            Self::Timeout { .. }
            | Self::StillHeld { .. }
            | Self::NotOpened { .. }
            | Self::NoListener { .. } => true,
            Self::Io { cause, .. } => cause.kind() == std::io::ErrorKind::TimedOut,
            _ => false,
        }
    }

    /// Returns whether the call is not permitted: by the allow list, the token, the access that the exporter grants, or the
    /// permissions of a file.
    pub fn is_not_permitted(&self) -> bool {
        match self.innermost() {
            Self::NotPermitted(_) | Self::AccessDenied { .. } => true,
            Self::Io { cause, .. } => cause.kind() == std::io::ErrorKind::PermissionDenied,
            _ => false,
        }
    }
}
