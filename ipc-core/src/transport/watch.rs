//! The sockets that the poller watches for their owners, and the list of the kernel in which the owners arm them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use crate::os::ClosedByFork;

/// The id of the wake-up among the poller's sources.
pub(super) const WAKE: u64 = 0;

/// A bit of every client's id, which no id of the poller's own sources has.
pub(super) const CLIENT_BIT: u64 = 1 << 63;

/// A bit of every watched socket's id.
pub(super) const SOCKET_BIT: u64 = 1 << 62;

/// The kernel's list of descriptors that the poller's thread waits on.
pub(super) struct Epoll {
    fd: OwnedFd,
    _closed_by_fork: ClosedByFork,
}

/// A client whose messages the poller reads while no caller waits for a reply.
pub(super) trait WatchedClient: Send + Sync {
    /// Returns the client's id, with [`CLIENT_BIT`].
    fn watch_id(&self) -> u64;
    /// Returns the socket.
    fn socket(&self) -> BorrowedFd<'_>;
    /// Reads the messages that have arrived. Returns false where a caller is reading.
    fn on_readable(&self) -> bool;
    /// Returns whether the connection is known to have closed.
    fn is_gone(&self) -> bool;
    /// Notes that the peer has terminated.
    fn mark_gone(&self);
}

/// A socket that its owner reads from, and that the poller only watches: for a hang-up, or for data.
pub(crate) trait WatchedSocket: Send + Sync {
    /// Returns the socket.
    fn socket(&self) -> BorrowedFd<'_>;
    /// Returns whether the poller watches for data too.
    fn awaits_data(&self) -> bool {
        false
    }
    /// Handles the hang-up of the peer, the termination of its process, or data: once for the socket, until
    /// [`Poller::arm_socket`](super::Poller::arm_socket), and once for the process. Called on the poller's thread: it may not block.
    fn ready(self: Arc<Self>);
}

/// Returns a number for a watched socket, which is never given twice.
pub(crate) fn new_socket_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Epoll {
    pub(super) fn new() -> rustix::io::Result<Self> {
        let fd = epoll::create(CreateFlags::CLOEXEC)?;
        Ok(Self { _closed_by_fork: ClosedByFork::new(fd.as_fd()), fd })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Lets the poller read a client's messages, or keeps it away while a caller reads its reply. One-shot, so that a socket that
    /// its owner reads from costs the poller no wake-up.
    pub(super) fn arm(&self, watch_id: u64, socket: BorrowedFd<'_>, armed: bool) {
        let interest = if armed { EventFlags::IN | EventFlags::ONESHOT } else { EventFlags::ONESHOT };
        let _ = epoll::modify(&self.fd, socket, EventData::new_u64(watch_id), interest);
    }

    /// Removes a socket before another thread closes it. While `epoll_wait` looks at a socket it holds a reference to the open
    /// file; a socket that is closed at that moment would be released on the poller's thread, which would then close the
    /// descriptors in its queue, for as long as their sender decides.
    pub(super) fn remove(&self, socket: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.fd, socket);
    }
}
