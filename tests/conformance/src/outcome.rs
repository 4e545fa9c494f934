//! Outcomes of cases.

use std::fmt;
use std::panic::Location;

use device_ipc_core::backend::Unavailable;
use device_ipc_core::{DescriptorError, Error, LayoutError, RecoverableError};

use crate::process::ReceiveError;

/// The outcome of a case: passed, or the [`Stop`] that says why not.
pub type Outcome = Result<(), Stop>;

/// Why a case did not pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It cannot run here, and this is why.
    Skipped(String),
    /// Something is broken, and this is what.
    Failed(String),
}

impl Stop {
    /// Something is broken.
    #[track_caller]
    pub fn failed(what: impl fmt::Display) -> Self {
        Self::Failed(format!("{what}\n    at {}", Location::caller()))
    }
}

/// Ends a case that cannot run here.
///
/// # Errors
///
/// Always [`Stop::Skipped`].
pub fn skip<T>(reason: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::Skipped(reason.into()))
}

/// Ends a case in which something is broken.
///
/// # Errors
///
/// Always [`Stop::Failed`].
#[track_caller]
pub fn fail<T>(what: impl fmt::Display) -> Result<T, Stop> {
    Err(Stop::failed(what))
}

macro_rules! failures {
    ($($error:ty, $what:literal;)*) => {
        $(impl From<$error> for Stop {
            #[track_caller]
            fn from(error: $error) -> Self {
                Self::failed(format_args!(concat!("unexpected error", $what, ": {}"), error))
            }
        })*
    };
}

failures! {
    Error, "";
    DescriptorError, " of a descriptor";
    LayoutError, " of a layout";
    Unavailable, " of the backend";
    ReceiveError, " while waiting for another process";
    std::io::Error, " of the system";
    serde_json::Error, " of a message";
}

impl<T> From<RecoverableError<T>> for Stop {
    #[track_caller]
    fn from(error: RecoverableError<T>) -> Self {
        Self::failed(format_args!("unexpected error: {error}"))
    }
}
