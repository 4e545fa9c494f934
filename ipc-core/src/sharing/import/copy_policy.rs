//! The policy of copies in place of opened memory, and their progress.

use std::fmt;
use std::str::FromStr;

use crate::model::error::Error;

/// The condition under which [`OpenBuilder::copy`](crate::OpenBuilder::copy) copies memory instead of opening it, and the way.
///
/// A **staged** copy passes through page-locked host memory that both processes map, chunk by chunk; both processes are on one
/// host. A **pulled** copy passes over the network. It needs a transfer engine on both sides
/// ([`IpcBuilder::remote`](crate::IpcBuilder::remote)), of which the exporter's [listens](crate::Remote::listen); on
/// [trusted networks](crate::Remote#trusted-networks-only) only.
///
/// Memory cannot be opened on a device that has no peer access to its home device, or where the vendor cannot open it, if its home
/// device is hidden from this process, or if its exporter is on another host or in another network namespace. Other errors are
/// returned under each policy: an export that was dropped, a process that has exited, a user who is not permitted.
///
/// A policy is written and parsed as its name in lower case with hyphens, as in the program and in Python: `staged-if-needed`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CopyPolicy {
    /// Returns an error for memory that cannot be opened.
    #[default]
    Never,
    /// Copies memory that cannot be opened: staged on one host, pulled otherwise.
    IfNeeded,
    /// Copies memory of this host that cannot be opened.
    StagedIfNeeded,
    /// Copies memory that cannot be opened over the network, also on one host.
    PulledIfNeeded,
    /// Copies in any case: staged, or pulled where that is not possible.
    Always,
    /// Copies through host memory in any case.
    Staged,
    /// Copies over the network in any case, also on one host.
    Pulled,
}

/// The policies by their names.
const NAMES: [(&str, CopyPolicy); 7] = [
    ("never", CopyPolicy::Never),
    ("if-needed", CopyPolicy::IfNeeded),
    ("staged-if-needed", CopyPolicy::StagedIfNeeded),
    ("pulled-if-needed", CopyPolicy::PulledIfNeeded),
    ("always", CopyPolicy::Always),
    ("staged", CopyPolicy::Staged),
    ("pulled", CopyPolicy::Pulled),
];

impl fmt::Display for CopyPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(NAMES.iter().find(|(_, policy)| policy == self).map_or("", |(name, _)| name))
    }
}

impl FromStr for CopyPolicy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let found = NAMES.iter().find(|(name, _)| *name == text).map(|(_, policy)| *policy);
        found.ok_or_else(|| {
            let names = NAMES.map(|(name, _)| name).join(", ");
            Error::invalid_input(format!("copy policy {text:?}"), format!("expected one of {names}"))
        })
    }
}

impl CopyPolicy {
    /// Returns whether memory is copied that could be opened.
    pub(super) const fn is_unconditional(self) -> bool {
        matches!(self, Self::Always | Self::Staged | Self::Pulled)
    }

    /// Returns the policy without staged copies; `None` if it permits no others.
    pub(crate) const fn without_staging(self) -> Option<Self> {
        match self {
            Self::StagedIfNeeded | Self::Staged => None,
            Self::IfNeeded => Some(Self::PulledIfNeeded),
            Self::Always => Some(Self::Pulled),
            Self::Never | Self::PulledIfNeeded | Self::Pulled => Some(self),
        }
    }

    pub(super) const fn stages(self) -> bool {
        matches!(self, Self::IfNeeded | Self::StagedIfNeeded | Self::Always | Self::Staged)
    }

    pub(super) const fn pulls(self) -> bool {
        matches!(self, Self::IfNeeded | Self::PulledIfNeeded | Self::Always | Self::Pulled)
    }
}

/// The progress of a copy; see [`OpenBuilder::on_progress`](crate::OpenBuilder::on_progress).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CopyProgress {
    /// The number of bytes that have arrived.
    pub copied_bytes: u64,
    /// The number of bytes of the whole copy.
    pub total_bytes: u64,
}

/// The function that receives the progress of copies.
#[derive(Clone, Copy)]
pub(super) struct ProgressReport<'a>(pub(super) Option<&'a dyn Fn(CopyProgress)>);

impl ProgressReport<'_> {
    pub(super) fn call(&self, copied_bytes: u64, total_bytes: u64) {
        if let Some(report) = self.0 {
            report(CopyProgress { copied_bytes, total_bytes });
        }
    }
}

impl fmt::Debug for ProgressReport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Some" } else { "None" })
    }
}

#[cfg(test)]
mod tests {
    use super::{CopyPolicy, NAMES};

    #[test]
    fn policy_is_parsed_from_its_text() {
        for (name, policy) in NAMES {
            assert_eq!((policy.to_string().as_str(), name.parse().ok()), (name, Some(policy)));
        }
        let error = "maybe".parse::<CopyPolicy>().unwrap_err().to_string();
        assert!(
            error.starts_with("invalid copy policy \"maybe\": expected one of never, if-needed"),
            "{error}"
        );
    }
}
