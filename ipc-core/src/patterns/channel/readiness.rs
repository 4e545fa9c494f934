//! The descriptors that event loops wait for: of a receiver, of a sender, and of a listener.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use crate::os::Readiness;

/// An epoll instance, which is readable while one of its descriptors is.
#[derive(Debug)]
pub(super) struct PollSet(OwnedFd);

impl PollSet {
    pub(super) fn new() -> rustix::io::Result<Self> {
        epoll::create(CreateFlags::CLOEXEC).map(Self)
    }

    /// Adds a descriptor, which stays until it is closed or removed.
    pub(super) fn add(&self, fd: BorrowedFd<'_>) -> rustix::io::Result<()> {
        epoll::add(&self.0, fd, EventData::new_u64(0), EventFlags::IN)
    }

    pub(super) fn remove(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.0, fd);
    }
}

impl AsFd for PollSet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The readiness of one direction of a channel: a socket, and a flag that this process sets.
#[derive(Debug)]
pub(super) struct SocketReadiness {
    pub(super) flag: Readiness,
    set: PollSet,
}

impl SocketReadiness {
    pub(super) fn new(socket: BorrowedFd<'_>) -> rustix::io::Result<Self> {
        let (flag, set) = (Readiness::new()?, PollSet::new()?);
        set.add(socket)?;
        set.add(flag.as_fd())?;
        Ok(Self { flag, set })
    }
}

impl AsFd for SocketReadiness {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}
