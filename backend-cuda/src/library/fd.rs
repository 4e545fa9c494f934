//! File descriptors that the driver creates.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use device_ipc_core::{Error, Result};
use rustix::io::FdFlags;

/// The hint for failed exports without a more specific cause.
pub(crate) const LIMIT_HINT: &str = "The process may have too many open files: check ulimit -n";

/// Takes ownership of a descriptor that `call` created, and sets close-on-exec: a process with the descriptor can open
/// the memory.
///
/// # Safety
///
/// No other value owns the descriptor.
///
/// # Errors
///
/// [`Error::Protocol`] if `raw` is negative, [`Error::Io`] if it is not open.
pub(crate) unsafe fn adopt(call: &'static str, raw: RawFd) -> Result<OwnedFd> {
    if raw < 0 {
        return Err(Error::Protocol(format!("{call} succeeded, but returned the file descriptor {raw}")));
    }
    // SAFETY: open and not owned by another value, as the caller promised.
    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
    rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC).map_err(|error| {
        Error::io(format!("setting close-on-exec on the file descriptor of {call}"), error)
    })?;
    Ok(fd)
}
