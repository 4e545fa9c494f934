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
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn is_readable(readiness: &Readiness) -> bool {
        let mut fds = [PollFd::new(readiness, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
    }

    #[test]
    fn readiness_is_set_until_it_is_cleared() {
        let readiness = Readiness::new().unwrap();
        assert!(!is_readable(&readiness), "a new one is not readable");
        readiness.clear();
        for _ in 0..3 {
            readiness.set();
        }
        assert!(is_readable(&readiness) && is_readable(&readiness), "polling does not clear it");
        readiness.clear();
        assert!(!is_readable(&readiness), "one clear undoes all sets");
    }
}
