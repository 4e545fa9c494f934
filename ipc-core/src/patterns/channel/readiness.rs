//! The descriptors that event loops wait for: of a receiver, of a sender, and of a listener.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use crate::model::error::{Error, Result};
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

/// The descriptors of one end, which an event loop or a sender waits for. The first use of each creates it.
#[derive(Debug, Default)]
pub(super) struct Descriptors {
    receiver: OnceLock<SocketReadiness>,
    sender: OnceLock<SocketReadiness>,
    /// Whether the receiver's descriptor is in use: every message must make it readable.
    has_receiver: AtomicBool,
}

impl Descriptors {
    /// Returns the descriptor that is readable while the socket is, or [`set_receiver`](Self::set_receiver) says so.
    pub(super) fn receiver(&self, socket: BorrowedFd<'_>) -> Result<BorrowedFd<'_>> {
        created(&self.receiver, socket).map(AsFd::as_fd)
    }

    /// Marks the receiver's descriptor as in use. Returns whether it was not.
    pub(super) fn begin_use_of_receiver(&self) -> bool {
        !self.has_receiver.swap(true, Ordering::SeqCst)
    }

    /// Returns whether the receiver's descriptor is in use.
    pub(super) fn has_receiver(&self) -> bool {
        self.has_receiver.load(Ordering::SeqCst)
    }

    /// Makes the receiver's descriptor readable, or unreadable unless the socket is readable.
    pub(super) fn set_receiver(&self, is_ready: bool) {
        match self.receiver.get() {
            Some(SocketReadiness { flag, .. }) if is_ready => flag.set(),
            Some(SocketReadiness { flag, .. }) => flag.clear(),
            None => {}
        }
    }

    /// Returns the descriptor that is readable while the socket is, or after [`wake_senders`](Self::wake_senders).
    pub(super) fn sender(&self, socket: BorrowedFd<'_>) -> Result<BorrowedFd<'_>> {
        created(&self.sender, socket).map(AsFd::as_fd)
    }

    /// Wakes the threads and the event loops of this process that wait to send.
    pub(super) fn wake_senders(&self) {
        if let Some(sender) = self.sender.get() {
            sender.flag.set();
        }
    }
}

/// A socket, and a flag that this process sets.
#[derive(Debug)]
struct SocketReadiness {
    flag: Readiness,
    set: PollSet,
}

impl SocketReadiness {
    fn new(socket: BorrowedFd<'_>) -> rustix::io::Result<Self> {
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

/// Returns a readiness, which the first call creates.
fn created<'a>(known: &'a OnceLock<SocketReadiness>, socket: BorrowedFd<'_>) -> Result<&'a SocketReadiness> {
    if let Some(known) = known.get() {
        return Ok(known);
    }
    let created = SocketReadiness::new(socket);
    let created = created.map_err(|error| Error::io("creating the descriptor of a channel", error))?;
    Ok(known.get_or_init(|| created))
}
