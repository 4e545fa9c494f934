//! Environment variables, ignored by programs with elevated privileges.
//!
//! A set-user-id program, or a program with file capabilities, runs with privileges that the user who started it may not have,
//! but that user controls the environment. A variable that names a library to load or a directory for sockets would give those
//! privileges to the user. Therefore all variables of this project are read here, and such a program ignores them
//! (`AT_SECURE`, getauxval(3)), as the dynamic linker ignores `LD_LIBRARY_PATH` there.

#![allow(unsafe_code, reason = "getauxval")]

use std::ffi::OsString;

/// Returns the value of an environment variable, or `None` if it is not set or [ignored](is_ignored).
pub fn variable(name: &str) -> Option<OsString> {
    let value = std::env::var_os(name)?;
    if is_ignored() {
        tracing::warn!(target: super::log::ENVIRONMENT,
            name,
            "ignoring the environment variable: this program runs with elevated privileges (AT_SECURE)"
        );
        return None;
    }
    Some(value)
}

/// Returns all environment variables, or none if they are [ignored](is_ignored).
pub fn variables() -> impl Iterator<Item = (OsString, OsString)> {
    (!is_ignored()).then(std::env::vars_os).into_iter().flatten()
}

/// Returns the value of an environment variable, unless it is empty.
pub(crate) fn nonempty_variable(name: &str) -> Option<OsString> {
    variable(name).filter(|value| !value.is_empty())
}

/// Returns whether the environment is ignored because this program has more privileges than the user who started it.
pub fn is_ignored() -> bool {
    // SAFETY: reads a value that the kernel gave the process when it started.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}
