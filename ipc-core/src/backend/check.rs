//! The check that two objects belong to one backend.

use crate::model::error::{Error, Result};

/// Checks that an object belongs to the expected backend.
///
/// # Errors
///
/// [`Error::WrongBackend`].
pub(crate) fn check_backend(what: &'static str, found: &str, expected: &str) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::WrongBackend { what, found: found.to_owned(), expected: expected.to_owned() })
}
