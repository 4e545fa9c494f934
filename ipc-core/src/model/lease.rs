//! Leases: "this process may have this export open".

use std::fmt;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// The number of a lease in the exporting process; never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LeaseId(pub(crate) u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A process that holds a lease on an export. The lease is in use, or idle in the import cache of that process; see
/// [`Export::holders`](crate::Export::holders).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// Its process id in the exporter's pid namespace, as the kernel tells it; 0 for a process of another one.
    pub pid: u32,
    /// Its program, as it calls itself.
    pub program: String,
    /// The bytes of the region that it holds.
    pub bytes: u64,
    /// Since when.
    pub since: Instant,
}

impl Holder {
    /// For how long it has held the export.
    pub fn held_for(&self) -> Duration {
        self.since.elapsed()
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = self.held_for().as_secs_f64();
        write!(f, "process {} ({}) has held {} bytes for {held:.1} s", self.pid, self.program, self.bytes)
    }
}

/// The processes that hold an export. Where there are none, [`opened`](Self::opened) and the text say whether any process
/// has opened it yet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holders {
    pub(crate) now: Vec<Holder>,
    pub(crate) ever: u64,
}

impl Holders {
    /// Those who hold it now.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Holder> {
        self.now.iter()
    }

    /// How many times the export has been opened so far.
    pub const fn opened(&self) -> u64 {
        self.ever
    }
}

impl Holders {
    /// Those of a further part of the same bundle, which is opened as often as all of it.
    pub(crate) fn add(&mut self, others: Self) {
        self.now.extend(others.now);
        self.ever = self.ever.max(others.ever);
    }
}

/// The exporter cannot tell whether a lease is in use.
const IDLE_LEASES_COUNT: &str = "; a lease counts until it is returned, also one that is idle in the import cache of a process \
                                 that is stopped or busy";

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
        f.write_str(IDLE_LEASES_COUNT)
    }
}
