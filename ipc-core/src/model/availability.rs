//! The state of a backend: its devices, or the reason why it cannot be used.

use std::fmt;

use super::device::DeviceInfo;

/// A backend, and what there is of it.
#[derive(Clone, Debug)]
pub struct BackendStatus {
    /// The backend's name.
    pub name: &'static str,
    /// Its devices, at least one, or why it cannot be used.
    pub state: Result<Vec<DeviceInfo>, Unavailable>,
}

impl fmt::Display for BackendStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.state {
            Ok(devices) => write!(f, "{}: {} device(s)", self.name, devices.len()),
            Err(reason) => write!(f, "{}: {reason}", self.name),
        }
    }
}

/// Why a backend cannot be used on this machine or by this process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// The vendor's library is not there.
    #[error("library not found (looked for {}): {detail}. {hint}", .searched.join(", "))]
    LibraryNotFound {
        /// The names and paths that were tried, in order.
        searched: Vec<String>,
        /// What the loader said.
        detail: String,
        /// What to install or to set.
        hint: String,
    },
    /// The library lacks a function that this backend needs.
    #[error("{library} is too old: it lacks {missing}; {needed} is needed")]
    TooOld {
        /// The library that was loaded.
        library: String,
        /// The first function that is missing.
        missing: String,
        /// The oldest version that has it.
        needed: String,
    },
    /// A library that only serves to link against.
    #[error("{library} is the vendor's stub library, for linking only; {hint}")]
    StubLibrary {
        /// The library that was loaded.
        library: String,
        /// What to change.
        hint: String,
    },
    /// There is no device, or none that this process may see.
    #[error("no device: {detail}")]
    NoDevice {
        /// What the vendor says, and what hides devices from this process.
        detail: String,
    },
    /// The driver is there and does not work.
    #[error("{detail}")]
    Failed {
        /// What failed.
        detail: String,
    },
}
