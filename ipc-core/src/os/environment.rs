//! Environment variables, which programs with raised privileges ignore.
//!
//! A set-user-id program, or one with file capabilities, runs with rights that the user who started it may not have, and the
//! environment is that user's. A variable that names a library to load, or a directory for sockets, would hand him those
//! rights. So every variable of this project is read here, and none in such a program (`AT_SECURE`, getauxval(3)), as the
//! dynamic linker ignores `LD_LIBRARY_PATH` there.

#![allow(unsafe_code, reason = "getauxval")]

use std::ffi::OsString;

/// Returns the value of an environment variable. `None` where it is not set, or where [`is_ignored`] holds.
pub fn variable(name: &str) -> Option<OsString> {
    let value = std::env::var_os(name)?;
    if is_ignored() {
        tracing::warn!(name, "the variable is ignored: this program runs with raised privileges (AT_SECURE)");
        return None;
    }
    Some(value)
}

/// Returns the value of an environment variable, unless it is empty.
pub(crate) fn nonempty_variable(name: &str) -> Option<OsString> {
    variable(name).filter(|value| !value.is_empty())
}

/// Returns whether the environment is ignored, because this program was started with more rights than the user has who
/// started it.
pub fn is_ignored() -> bool {
    // SAFETY: reads a value that the kernel gave the process when it started.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}
