//! Threads with all signals blocked.

#![allow(unsafe_code, reason = "the standard library has no call for the signal mask")]

use std::mem::MaybeUninit;
use std::ptr;
use std::thread;

use super::exit::stay_loaded;
use crate::model::error::{Error, Result};

/// Starts a thread with all signals blocked.
///
/// # Errors
///
/// [`Error::Io`] if the system cannot start a thread.
pub(crate) fn spawn_without_signals(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    stay_loaded();
    let mut all = MaybeUninit::uninit();
    let mut before = MaybeUninit::uninit();
    // SAFETY: both sets are large enough, and `all` is initialised before it is read. The call changes the mask of this thread
    // only; the new thread inherits it, so no signal can be delivered to it at any time.
    let blocked = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr())
    };
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(body).map(drop);
    if blocked == 0 {
        // SAFETY: the successful call above initialised `before`.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut()) };
    }
    spawned.map_err(|error| {
        Error::io(
            format!("starting the thread {name}; raise the limit on processes and threads (ulimit -u, or the container's limit)"),
            error,
        )
    })
}
