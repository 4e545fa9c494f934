//! The connection of the two ends of a channel: two sockets, and the counter page.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::net::Shutdown;

use super::counters::SharedCounters;
use crate::model::error::{Error, Result};
use crate::sharing::timeline::{Side, WordPage};
use crate::transport::socket::{self, PeerSocket};

/// The sockets and the counter page, from the view of one end.
#[derive(Debug)]
pub(super) struct ChannelLink {
    /// Carries messages.
    pub(super) messages: PeerSocket,
    /// Carries wake-ups of a sender that waits for room. It is open as long as the peer's process may use memory of this end.
    pub(super) wakes: PeerSocket,
    pub(super) counters: SharedCounters,
}

/// The descriptors that a listening end sends to the connecting one.
pub(super) struct PeerFiles {
    pub(super) page: OwnedFd,
    pub(super) wakes: OwnedFd,
}

impl ChannelLink {
    /// Creates the link of a listening end whose socket for messages is connected, and the files for its peer.
    pub(super) fn create(messages: PeerSocket) -> Result<(Self, PeerFiles)> {
        let (page, file) = WordPage::create()?;
        let (wakes, peers) = pair()?;
        let counters = SharedCounters::new(page, Side::Exporter);
        let link = Self { messages, wakes: PeerSocket::new(wakes, true), counters };
        Ok((link, PeerFiles { page: file, wakes: peers }))
    }

    /// Creates the link of a connecting end from the files of the listening one.
    pub(super) fn open(messages: PeerSocket, files: PeerFiles) -> Result<Self> {
        let wakes = PeerSocket::new(files.wakes, true);
        socket::check_seqpacket(wakes.fd())?;
        let counters = SharedCounters::new(WordPage::open(files.page)?, Side::Importer);
        Ok(Self { messages, wakes, counters })
    }

    /// Creates both ends within this process, the listening one first.
    pub(super) fn within_process() -> Result<[Self; 2]> {
        let ((messages, peers_messages), (wakes, peers_wakes)) = (pair()?, pair()?);
        let (page, _) = WordPage::create()?;
        let end = |messages, wakes, side| Self {
            messages: PeerSocket::new(messages, true),
            wakes: PeerSocket::new(wakes, true),
            counters: SharedCounters::new(Arc::clone(&page), side),
        };
        Ok([end(messages, wakes, Side::Exporter), end(peers_messages, peers_wakes, Side::Importer)])
    }

    /// Wakes the peer's threads and event loops that wait to send. If the socket is full, the peer has wake-ups to read.
    pub(super) fn wake_peers_sender(&self) {
        let _ = socket::send(self.wakes.fd(), &[0], &[]);
    }

    /// Ends both sockets, which wakes the waits of both ends.
    pub(super) fn shut_down(&self) {
        for socket in [&self.messages, &self.wakes] {
            let _ = rustix::net::shutdown(socket.fd(), Shutdown::Both);
        }
    }
}

fn pair() -> Result<(OwnedFd, OwnedFd)> {
    socket::pair().map_err(|error| Error::io("creating a pair of sockets", error))
}
