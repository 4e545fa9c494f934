//! The properties of devices and of kinds of handle.

use serde::{Deserialize, Serialize};

/// A kind of handle of one backend: a number that only this backend gives a meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HandleKind(pub u16);

/// The properties of every handle of a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandleKindInfo {
    /// The number in descriptors and messages.
    pub kind: HandleKind,
    /// The vendor's word for it; distinct among the kinds of a backend.
    pub name: &'static str,
    /// Whether a mapping can be made read-only, protected by the hardware. A property of the importer's mapping, not of the
    /// handle: a handle of a read-only share opens read-write as well.
    pub read_only: bool,
    /// Whether the handle travels with file descriptors, in addition to its bytes.
    pub carries_fds: bool,
    /// The effect of the exporter's termination on the importers.
    pub lifetime: Lifetime,
    /// Whether a process may open the handle on one device only, once. For another device it gets a further handle: the
    /// exporter calls [`DeviceIpc::export`](super::DeviceIpc::export) again.
    pub one_open_per_process: bool,
    /// Whether each importer must be permitted by [`DeviceIpc::authorize`](super::DeviceIpc::authorize).
    pub whitelist: bool,
    /// Whether an importer reaches nothing but the allocation itself. False where small blocks share a page
    /// ([`DeviceIpc::reach`](super::DeviceIpc::reach)).
    pub isolated: bool,
    /// Whether it works between pid namespaces, also where both sides have the same pid value.
    pub across_pid_namespaces: bool,
}

/// The effect of the exporter's termination on mappings in importers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lifetime {
    /// Importers pin the memory: it stays until the last of them has closed.
    Pins,
    /// The exporter's close, free or death revokes the importers' mappings.
    Revokes,
}

/// The capabilities of a device. What is not known to work is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Events that two processes share.
    pub ipc_events: bool,
    /// Streams write and wait for 64-bit words in host memory, which other processes map too
    /// ([`DeviceTimelines`](super::DeviceTimelines)).
    pub timelines: bool,
    /// The vendor numbers its allocations ([`Extent::generation`](crate::Extent)), so that another allocation at the same
    /// address is noticed.
    pub generations: bool,
}

impl Capabilities {
    /// Nothing at all.
    pub const NONE: Self = Self { ipc_events: false, timelines: false, generations: false };

    /// With or without events that two processes share.
    pub const fn with_ipc_events(mut self, yes: bool) -> Self {
        self.ipc_events = yes;
        self
    }

    /// With or without words that streams write and wait on.
    pub const fn with_timelines(mut self, yes: bool) -> Self {
        self.timelines = yes;
        self
    }

    /// With or without numbers of allocations.
    pub const fn with_generations(mut self, yes: bool) -> Self {
        self.generations = yes;
        self
    }
}
