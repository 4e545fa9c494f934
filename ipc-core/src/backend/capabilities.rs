//! What a device and a kind of handle can do, asked before it is tried.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What an importer may do with the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Access {
    /// Read only, enforced by the hardware where the kind of handle allows it, else refused.
    ReadOnly,
    /// Read and write.
    ReadWrite,
}

impl Access {
    /// Does it permit to write?
    pub const fn is_writable(self) -> bool {
        matches!(self, Self::ReadWrite)
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ReadOnly => "read-only",
            Self::ReadWrite => "read-write",
        })
    }
}

/// A kind of handle of one backend: a number that only this backend gives a meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HandleKind(pub u16);

/// What is true of every handle of a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HandleKindInfo {
    /// The number in descriptors and messages.
    pub kind: HandleKind,
    /// The vendor's word for it.
    pub name: &'static str,
    /// Can a mapping be made read-only?
    pub read_only: bool,
    /// Does the handle travel with file descriptors?
    pub carries_fds: bool,
    /// What the exporter's end means for the importers.
    pub lifetime: Lifetime,
    /// May a process open the handle on one device only? For another device it then gets a handle of its own.
    pub one_open_per_process: bool,
    /// Must each importer be permitted by [`DeviceIpc::authorize`](super::DeviceIpc::authorize)?
    pub whitelist: bool,
    /// Does an importer reach nothing but the allocation itself? Not where small blocks share a page
    /// ([`DeviceIpc::reach`](super::DeviceIpc::reach)).
    pub isolated: bool,
    /// Does it work between pid namespaces, also where both sides have the same pid value?
    pub across_pid_namespaces: bool,
}

/// What the exporter's end means for those who have the memory open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lifetime {
    /// Importers pin the memory: it stays until the last of them has closed.
    Pins,
    /// The exporter's close, free or death revokes the importers' mappings.
    Revokes,
}

/// What a device can do. What is not known to work is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Events that two processes share.
    pub ipc_events: bool,
    /// 64-bit words in device memory that streams write and wait on.
    pub timelines: bool,
    /// The vendor numbers its allocations, so that a block put in another's place is noticed.
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
