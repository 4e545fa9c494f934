//! What importers need of memory that is allocated for them.

use std::fmt;

use crate::backend::{HandleKind, HandleKindInfo, Lifetime};

/// The use of memory that [`Ipc::allocate_for`](crate::Ipc::allocate_for) allocates. It determines the kind of memory.
///
/// Without any requirement it is memory that can be shared read-write, as [`Ipc::allocate`](crate::Ipc::allocate) returns. A
/// [`HandleKind`] converts to the use of memory of that kind.
///
/// # Examples
///
/// ```
/// use device_ipc_core::{Access, Ipc, MemoryUse};
///
/// # fn main() -> device_ipc_core::Result<()> {
/// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
/// # let ipc = Ipc::with_backend(backend);
/// let weights = ipc.allocate_for(0, 1 << 20, MemoryUse::new().read_only_importers())?;
/// let export = ipc.share(weights).access(Access::ReadOnly).start()?;
/// # drop(export);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MemoryUse {
    kind: Option<HandleKind>,
    read_only: bool,
    isolated: bool,
    across_pid_namespaces: bool,
    outlives_exporter: bool,
    remappable: bool,
}

impl MemoryUse {
    /// Returns the use without requirements.
    pub const fn new() -> Self {
        Self {
            kind: None,
            read_only: false,
            isolated: false,
            across_pid_namespaces: false,
            outlives_exporter: false,
            remappable: false,
        }
    }

    /// Requires memory of this kind.
    pub const fn kind(mut self, kind: HandleKind) -> Self {
        self.kind = Some(kind);
        self
    }

    /// Requires that the memory can be shared with [`Access::ReadOnly`](crate::Access::ReadOnly), which the hardware enforces.
    pub const fn read_only_importers(mut self) -> Self {
        self.read_only = true;
        self
    }

    /// Requires that importers reach only this allocation, and no neighbouring memory of this process.
    pub const fn isolated(mut self) -> Self {
        self.isolated = true;
        self
    }

    /// Requires that processes of other pid namespaces (containers) can open the memory.
    pub const fn across_pid_namespaces(mut self) -> Self {
        self.across_pid_namespaces = true;
        self
    }

    /// Requires that open mappings stay valid when this process frees the memory or terminates ([`Lifetime::Pins`]).
    pub const fn outlives_exporter(mut self) -> Self {
        self.outlives_exporter = true;
        self
    }

    /// Requires that importers can map the memory at addresses that they keep ([`OpenBuilder::reserved`](crate::OpenBuilder::reserved)).
    pub const fn remappable(mut self) -> Self {
        self.remappable = true;
        self
    }

    /// Returns whether any memory fits.
    pub(crate) fn is_any(self) -> bool {
        self == Self::new()
    }

    /// Returns the kind that was requested.
    pub(crate) const fn requested_kind(self) -> Option<HandleKind> {
        self.kind
    }

    /// Returns the first requirement, besides the kind, that memory of this kind does not meet.
    pub(crate) fn unmet(self, info: &HandleKindInfo) -> Option<&'static str> {
        let requirements = [
            (!self.read_only || info.read_only, "importers cannot be restricted to read-only access"),
            (!self.isolated || info.isolated, "importers can reach neighbouring memory"),
            (
                !self.across_pid_namespaces || info.across_pid_namespaces,
                "other pid namespaces cannot open it",
            ),
            (
                !self.outlives_exporter || info.lifetime == Lifetime::Pins,
                "its mappings end with the exporter",
            ),
            (!self.remappable || info.remappable, "importers cannot map it at addresses that they keep"),
        ];
        requirements.into_iter().find(|(is_met, _)| !is_met).map(|(_, unmet)| unmet)
    }
}

/// Describes the requirements, for errors.
impl fmt::Display for MemoryUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stated = [
            (self.read_only, "that importers can open read-only"),
            (self.isolated, "that is isolated"),
            (self.across_pid_namespaces, "that other pid namespaces can open"),
            (self.outlives_exporter, "whose mappings outlive the exporter"),
            (self.remappable, "that importers can map at addresses that they keep"),
        ];
        let mut separator = "";
        if let Some(HandleKind(kind)) = self.kind {
            write!(f, "of kind {kind}")?;
            separator = " and ";
        }
        for (_, text) in stated.into_iter().filter(|(is_stated, _)| *is_stated) {
            write!(f, "{separator}{text}")?;
            separator = " and ";
        }
        Ok(())
    }
}

impl From<HandleKind> for MemoryUse {
    fn from(kind: HandleKind) -> Self {
        Self::new().kind(kind)
    }
}
