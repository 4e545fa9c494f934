//! Threads that leave the program's signals alone.

#![allow(unsafe_code, reason = "the standard library has no call for the signal mask")]

use std::mem::MaybeUninit;
use std::ptr;
use std::thread;

use crate::model::error::{Error, Result};

/// Starts a thread that no signal of the program is ever delivered to.
///
/// # Errors
///
/// [`Error::Io`] where the system starts no thread.
pub(crate) fn spawn_without_signals(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    let mut all = MaybeUninit::uninit();
    let mut before = MaybeUninit::uninit();
    // SAFETY: both sets are large enough, and `all` has been filled when it is read. The mask is changed for this
    // thread only; the new thread inherits it, so there is no moment at which a signal could reach it.
    let blocked = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr())
    };
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(body).map(drop);
    if blocked == 0 {
        // SAFETY: `before` was filled by the successful call above.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut()) };
    }
    spawned.map_err(|error| {
        Error::io(
            format!("starting the thread {name} (raise the limit of processes and threads: ulimit -u, or the container's)"),
            error,
        )
    })
}
