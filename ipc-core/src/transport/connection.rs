//! One importer's connection, seen from the exporter. Runs on the poller's thread: nothing here may block.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::Metrics;
use super::socket::{self, PeerCredentials, PeerSocket, PlainMessage};
use crate::os::clock;
use crate::os::log::Throttle;
use crate::wire::protocol::{Reply, Request, decode, encode};

/// Maximum number of queued replies. Notifications are exempt: they are unsolicited, bounded to two per export, and a peer that
/// receives thousands at once needs time to drain them.
const MAX_UNSENT: usize = 1024;

/// Maximum number of messages of one peer in a [`RATE_PERIOD`]; the rest wait for the next period.
const MESSAGES_PER_PERIOD: u32 = 10_000;
const RATE_PERIOD: Duration = Duration::from_millis(100);

/// Pause before descriptors are sent again that the kernel did not take because too many are in flight.
const DESCRIPTORS_RETRY: Duration = Duration::from_millis(1);

/// The state of a connection after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// The connection stays open.
    Keep,
    /// The connection stays open; nothing is read from it or sent over it before this time.
    Pause(Instant),
    /// The peer has closed the connection or violated the protocol.
    Close,
}

/// The socket of a connection, with its queue of replies.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: PeerSocket,
    peer: PeerCredentials,
    unsent: VecDeque<Unsent>,
    unsent_replies: usize,
    /// The events that the event loop waits for.
    interest: EventFlags,
    period: Instant,
    read_in_period: u32,
}

/// A message that the peer has not made room for yet.
#[derive(Debug)]
struct Unsent {
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
    is_reply: bool,
}

impl Connection {
    pub(crate) fn new(socket: PeerSocket, peer: PeerCredentials) -> Self {
        Self {
            socket,
            peer,
            unsent: VecDeque::new(),
            unsent_replies: 0,
            interest: EventFlags::IN,
            period: clock::now(),
            read_in_period: 0,
        }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.fd()
    }

    /// Returns the peer's credentials, as the kernel reports them.
    pub(crate) fn peer(&self) -> &PeerCredentials {
        &self.peer
    }

    /// Returns whether the event loop waits for requests of this peer.
    pub(super) fn is_read(&self) -> bool {
        self.interest.contains(EventFlags::IN)
    }

    /// Begins another period of the peer's rate if the last one has passed.
    pub(super) fn begin_period(&mut self) {
        if clock::elapsed(self.period) >= RATE_PERIOD {
            self.period = clock::now();
            self.read_in_period = 0;
        }
    }

    /// Returns the time from which on the peer is read again, if it has sent too much in this period.
    pub(super) fn rate_limit(&self) -> Option<Instant> {
        (self.read_in_period >= MESSAGES_PER_PERIOD).then(|| self.period + RATE_PERIOD)
    }

    /// Receives the next request. The error is the state of a connection without one.
    pub(super) fn take_request(&mut self, buffer: &mut Vec<u8>, metrics: &Metrics) -> Result<Request, Next> {
        let len = match self.socket.take_plain(buffer) {
            Ok(PlainMessage::Bytes(len)) => len,
            Ok(PlainMessage::WithDescriptors) => {
                return Err(self.violated("it sends descriptors, which no request brings"));
            }
            Ok(PlainMessage::Closed) => return Err(Next::Close),
            Err(Errno::AGAIN) => return Err(Next::Keep),
            Err(error) => return Err(self.violated(&error.to_string())),
        };
        self.read_in_period += 1;
        metrics.messages_total.add(1);
        decode(&buffer[..len]).map_err(|error| self.violated(&error.to_string()))
    }

    /// Notes whether the event loop waits for requests. Returns the events to wait for from now on, where they have changed.
    pub(super) fn take_change_of_interest(&mut self, reads: bool, paused: bool) -> Option<EventFlags> {
        let writes = !paused && !self.unsent.is_empty();
        let reading = if reads && !paused { EventFlags::IN } else { EventFlags::empty() };
        let writing = if writes { EventFlags::OUT } else { EventFlags::empty() };
        let before = std::mem::replace(&mut self.interest, reading | writing);
        (before != self.interest).then_some(self.interest)
    }

    /// Sends a message now if the peer reads, later otherwise; a peer that never reads loses its connection.
    pub(crate) fn send(&mut self, reply: &Reply, fds: &[BorrowedFd<'_>]) -> Next {
        let Ok(bytes) = encode(reply) else { return Next::Close };
        if self.unsent.is_empty() {
            match socket::send(self.socket.fd(), &bytes, fds) {
                Ok(()) => return Next::Keep,
                Err(Errno::AGAIN | Errno::TOOMANYREFS) => {}
                Err(_) => return Next::Close,
            }
        }
        let is_reply = !matches!(reply, Reply::Dropped { .. } | Reply::Recall { .. });
        if is_reply && self.unsent_replies >= MAX_UNSENT {
            return self.violated("it does not read its messages");
        }
        let owned: std::io::Result<Vec<_>> = fds.iter().map(BorrowedFd::try_clone_to_owned).collect();
        match owned {
            Ok(fds) => {
                self.unsent_replies += usize::from(is_reply);
                self.unsent.push_back(Unsent { bytes, fds, is_reply });
                Next::Keep
            }
            Err(error) => self.violated(&format!("its descriptors could not be kept: {error}")),
        }
    }

    /// Sends the queued messages.
    pub(crate) fn flush(&mut self) -> Next {
        while let Some(first) = self.unsent.front() {
            let borrowed: Vec<_> = first.fds.iter().map(AsFd::as_fd).collect();
            match socket::send(self.socket.fd(), &first.bytes, &borrowed) {
                Ok(()) => {
                    self.unsent_replies -= usize::from(first.is_reply);
                    self.unsent.pop_front();
                }
                Err(Errno::AGAIN) => return Next::Keep,
                // The user has as many descriptors in flight as the kernel allows; peers that read make room.
                Err(Errno::TOOMANYREFS) => return Next::Pause(clock::now() + DESCRIPTORS_RETRY),
                Err(_) => return Next::Close,
            }
        }
        Next::Keep
    }

    /// Closes the connection of a peer that has violated the protocol.
    pub(crate) fn violated(&self, how: &str) -> Next {
        static WARNINGS: Throttle = Throttle::new();
        if let Some(count) = WARNINGS.count() {
            tracing::warn!(target: crate::os::log::TRANSPORT,
                pid = self.peer.pid,
                uid = self.peer.uid,
                count,
                how,
                "the connection of an importer is closed"
            );
        }
        Next::Close
    }
}
