//! File descriptors that the driver makes.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use device_ipc_core::{Error, Result};
use rustix::io::FdFlags;

/// What to say where an export fails for a reason that the call does not tell.
pub(crate) const LIMIT_HINT: &str = "The process may have too many files open: see ulimit -n";

/// Takes a descriptor that `call` has made, and keeps it from the programs that this process starts: who has it can
/// open the memory.
///
/// # Safety
///
/// Nobody else owns the descriptor.
///
/// # Errors
///
/// [`Error::Io`] where `raw` is no descriptor.
pub(crate) unsafe fn adopt(call: &'static str, raw: RawFd) -> Result<OwnedFd> {
    if raw < 0 {
        return Err(Error::Protocol(format!("{call} succeeded, and gave the file descriptor {raw}")));
    }
    // SAFETY: open and nobody else's, as the caller promised.
    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
    rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC).map_err(|error| {
        Error::io(format!("keeping the file descriptor of {call} from child programs"), error)
    })?;
    Ok(fd)
}
