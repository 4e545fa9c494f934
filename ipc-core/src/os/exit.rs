//! A function that runs when the process exits in order: by `exit`, or by a return from `main`.
//!
//! A process that is killed, crashes or calls `_exit` does not run it.

#![allow(unsafe_code, reason = "the standard library has no call for atexit(3)")]

/// Registers a function that the process runs at its exit. It must not panic, and must not wait for another thread: that
/// thread may have ended. Forked children inherit the registration.
pub(crate) fn at_exit(run: extern "C" fn()) {
    // SAFETY: the function is part of this library, which is never unloaded. Without memory for the registration it does not
    // run, as in a process that is killed.
    unsafe { libc::atexit(run) };
}
