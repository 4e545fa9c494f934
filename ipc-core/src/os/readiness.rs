//! A descriptor that is readable while an object has something to return, for `poll`, mio or an async runtime.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

/// A descriptor (an eventfd) that this process makes readable and unreadable.
///
/// A forked child shares it, and does not use it: guards of the parent do nothing there.
#[derive(Debug)]
pub(crate) struct Readiness(OwnedFd);

impl Readiness {
    /// Creates a descriptor that is not readable.
    pub(crate) fn new() -> rustix::io::Result<Self> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
    }

    /// Makes the descriptor readable.
    pub(crate) fn set(&self) {
        // A write fails only if the counter is at its maximum; the descriptor is readable then.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable.
    pub(crate) fn clear(&self) {
        // A read fails if the descriptor is not readable.
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }
}

impl AsFd for Readiness {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests;
