//! Properties of devices and of kinds of handle.

use serde::{Deserialize, Serialize};

/// A kind of handle, identified by a number that is specific to one backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HandleKind(pub u16);

/// The properties of a kind of handle. A backend makes it by [`new`](Self::new), and sets the fields that differ.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HandleKindInfo {
    /// The number of the kind in descriptors and messages.
    pub kind: HandleKind,
    /// The vendor's name of the kind, unique among the kinds of a backend.
    pub name: &'static str,
    /// Whether the hardware can protect a mapping as read-only. This is a property of the importer's mapping, not of the
    /// handle: the driver also opens the handle of a read-only share read-write.
    pub read_only: bool,
    /// Whether the handle consists of file descriptors in addition to its bytes.
    pub carries_fds: bool,
    /// The effect of the exporter's termination on the importers.
    pub lifetime: Lifetime,
    /// Whether a process may open the handle only once, on one device. For another device the exporter calls
    /// [`DeviceIpc::export`](super::DeviceIpc::export) again and sends the new handle.
    pub one_open_per_process: bool,
    /// Whether [`DeviceIpc::authorize`](super::DeviceIpc::authorize) must permit each importer.
    pub whitelist: bool,
    /// Whether an importer can access only the allocation itself. False if several small blocks share a page
    /// ([`DeviceIpc::reach`](super::DeviceIpc::reach)).
    pub isolated: bool,
    /// Whether the handle can be opened in another pid namespace, also if both processes have the same pid value.
    pub across_pid_namespaces: bool,
    /// Whether importers can map the memory at addresses that they have reserved, and unmap it while the addresses stay
    /// ([`DeviceReservations`](super::DeviceReservations)).
    pub remappable: bool,
}

impl HandleKindInfo {
    /// Returns a kind that pins the memory, travels as bytes, and has no other property.
    pub const fn new(kind: HandleKind, name: &'static str) -> Self {
        Self {
            kind,
            name,
            read_only: false,
            carries_fds: false,
            lifetime: Lifetime::Pins,
            one_open_per_process: false,
            whitelist: false,
            isolated: false,
            across_pid_namespaces: false,
            remappable: false,
        }
    }
}

/// The effect of the exporter's termination on the mappings of importers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lifetime {
    /// Importers pin the memory: it stays allocated until the last importer has closed it.
    Pins,
    /// The exporter's close, free or termination revokes the importers' mappings.
    Revokes,
}

/// The capabilities of a device. A capability is absent unless it is known to work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Events can be shared between processes.
    pub ipc_events: bool,
    /// Streams can write and wait for 64-bit words in host memory that other processes map too
    /// ([`DeviceTimelines`](super::DeviceTimelines)).
    pub timelines: bool,
    /// The vendor numbers its allocations ([`Extent::generation`](super::Extent)), which reveals a new allocation at an old
    /// address.
    pub generations: bool,
    /// A fault of the device work of one process, such as a write to a read-only mapping, and the termination of a process
    /// while its work runs, leave the other processes' use of the device intact. CUDA has this except under MPS.
    pub fault_isolation: bool,
}

impl Capabilities {
    /// No capabilities.
    pub const NONE: Self =
        Self { ipc_events: false, timelines: false, generations: false, fault_isolation: false };

    /// Sets [`ipc_events`](Self::ipc_events).
    pub const fn with_ipc_events(mut self, yes: bool) -> Self {
        self.ipc_events = yes;
        self
    }

    /// Sets [`timelines`](Self::timelines).
    pub const fn with_timelines(mut self, yes: bool) -> Self {
        self.timelines = yes;
        self
    }

    /// Sets [`generations`](Self::generations).
    pub const fn with_generations(mut self, yes: bool) -> Self {
        self.generations = yes;
        self
    }

    /// Sets [`fault_isolation`](Self::fault_isolation).
    pub const fn with_fault_isolation(mut self, yes: bool) -> Self {
        self.fault_isolation = yes;
        self
    }
}

/// A description of a backend for users and logs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackendInfo {
    /// The backend's name, as in descriptors and in `DEVICE_IPC_BACKEND`.
    pub name: &'static str,
    /// The vendor's versions, for example `driver 580.159, CUDA 13.0`.
    pub version: String,
    /// The file of the vendor's library that was loaded; `None` for a backend without a library.
    pub library: Option<String>,
}

impl BackendInfo {
    /// Creates a description.
    pub fn new(name: &'static str, version: impl Into<String>, library: Option<String>) -> Self {
        Self { name, version: version.into(), library }
    }
}
