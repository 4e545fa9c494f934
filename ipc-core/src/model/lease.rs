//! Leases, and the processes that hold them.

use std::fmt;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// The number of a lease in the exporting process. Numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LeaseId(pub(crate) u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The use of an export by a [holder](Holder).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LeaseState {
    /// A mapping uses the lease.
    InUse,
    /// The last mapping was dropped without a stream, after its address was used: no mapping uses the lease, but device work that
    /// was submitted before may still use the memory. Only the importer can wait for that work, so an importer that is stopped
    /// keeps the lease until it continues or terminates.
    Draining,
    /// No mapping and no device work uses the lease: only the import cache of the process keeps it. The exporter can end it
    /// without the process; see [`Export::recall`](crate::Export::recall).
    Idle,
    /// There is no lease yet: the process has been sent a message with the export, and has not opened it.
    InMessage,
}

impl fmt::Display for LeaseState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::InUse => "in use",
            Self::Draining => "draining",
            Self::Idle => "idle",
            Self::InMessage => "in a message",
        })
    }
}

/// A process that holds a lease on an export; see [`Export::holders`](crate::Export::holders).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// The process id in the exporter's pid namespace, as reported by the kernel; 0 for a process of another namespace.
    pub pid: u32,
    /// The program's name, as the process states it.
    pub program: String,
    /// The size of the held region in bytes.
    pub bytes: u64,
    /// The time at which the lease began.
    pub since: Instant,
    /// The use of the memory.
    pub state: LeaseState,
}

impl Holder {
    /// Returns the age of the lease.
    #[allow(clippy::disallowed_methods, reason = "the begin is a time of the system's clock")]
    pub fn held_for(&self) -> Duration {
        self.since.elapsed()
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = self.held_for().as_secs_f64();
        write!(f, "process {} ({}) has held {} bytes for {held:.1} s", self.pid, self.program, self.bytes)?;
        match self.state {
            // `Display` shows the process id and the program already.
            LeaseState::InMessage => Ok(()),
            state => write!(f, ", {state}"),
        }
    }
}

/// The processes that hold an export. If there are none, [`opened`](Self::opened) and the text show whether any process has
/// opened the export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holders {
    pub(crate) now: Vec<Holder>,
    pub(crate) ever: u64,
    pub(crate) died: Vec<Holder>,
}

impl Holders {
    /// Returns the current holders.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Holder> {
        self.now.iter()
    }

    /// Returns the number of holders in a state.
    pub fn count(&self, state: LeaseState) -> usize {
        self.now.iter().filter(|holder| holder.state == state).count()
    }

    /// Returns the processes that died while they used the memory, at most the last 64: killed, crashed, or exited before their device
    /// work had finished. What they were writing may be incomplete. Their state is that at their death, in use or draining: a lease
    /// that was idle then is a release.
    pub fn died(&self) -> impl ExactSizeIterator<Item = &Holder> {
        self.died.iter()
    }

    /// Returns the number of times that the export has been opened.
    pub const fn opened(&self) -> u64 {
        self.ever
    }
}

impl Holders {
    /// Adds the holders of a further part of the same export. All parts are opened equally often.
    pub(crate) fn add(&mut self, others: Self) {
        self.now.extend(others.now);
        self.died.extend(others.died);
        self.ever = self.ever.max(others.ever);
    }
}

impl fmt::Display for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.now.is_empty() {
            return f.write_str(if self.ever == 0 {
                "no process has opened it yet"
            } else {
                "no process holds it"
            });
        }
        for (index, holder) in self.now.iter().enumerate() {
            write!(f, "{}{holder}", if index == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}
