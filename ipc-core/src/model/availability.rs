//! The state of a backend: its devices, or the reason why it cannot be used.

use std::fmt;

use super::device::DeviceInfo;

/// The availability of a backend.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BackendStatus {
    /// The backend's name.
    pub name: &'static str,
    /// At least one device, or the reason why the backend is unavailable.
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

/// The reason why a backend is unavailable on this machine or in this process.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// The vendor's library was not found.
    #[error("library not found (looked for {}): {detail}. {hint}", .searched.join(", "))]
    LibraryNotFound {
        /// The names and paths that were tried, in order.
        searched: Vec<String>,
        /// The message of the loader.
        detail: String,
        /// The advice to the user.
        hint: String,
    },
    /// The library lacks a function that the backend needs.
    #[error("{library} is too old: it lacks {missing}; install {needed}")]
    TooOld {
        /// The library that was loaded.
        library: String,
        /// The first function that is missing.
        missing: String,
        /// The oldest version with that function.
        needed: String,
    },
    /// The library is a stub that is only for linking.
    #[error("{library} is the vendor's stub library, for linking only; {hint}")]
    StubLibrary {
        /// The library that was loaded.
        library: String,
        /// The advice to the user.
        hint: String,
    },
    /// No device is visible to this process.
    #[error("no device: {detail}")]
    NoDevice {
        /// The vendor's message, and the environment variable that hides devices.
        detail: String,
    },
    /// The driver was found but does not work.
    #[error("{detail}")]
    Failed {
        /// The failure.
        detail: String,
    },
}
