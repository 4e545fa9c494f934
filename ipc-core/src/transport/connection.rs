//! One importer's connection, seen from the exporter. Runs on the poller's thread: nothing here may block.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::Metrics;
use super::service::{Next, Session};
use super::socket::{self, PeerCredentials, PeerSocket, PlainMessage};
use crate::os::clock;
use crate::os::log::Throttle;
use crate::wire::protocol::{Reply, Request, decode, encode};

/// Maximum number of queued replies. Notifications are exempt: they are unsolicited, bounded to two per export, and a peer that
/// receives thousands at once needs time to drain them.
const MAX_UNSENT: usize = 1024;

/// Maximum number of messages of one peer that are answered before the event loop turns to the others.
const MESSAGES_PER_TURN: u32 = 32;

/// Maximum number of messages of one peer in a [`RATE_PERIOD`]; the rest wait for the next period.
const MESSAGES_PER_PERIOD: u32 = 10_000;
const RATE_PERIOD: Duration = Duration::from_millis(100);

/// Pause before descriptors are sent again that the kernel did not take because too many are in flight.
const DESCRIPTORS_RETRY: Duration = Duration::from_millis(1);

/// A connection and the session of its peer.
pub(crate) struct Served<S> {
    pub(crate) connection: Connection,
    pub(crate) session: S,
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

impl<S: Session> Served<S> {
    /// Reads and answers the messages that have arrived.
    pub(crate) fn read(&mut self, buffer: &mut Vec<u8>, metrics: &Metrics) -> Next {
        let Self { connection, session } = self;
        connection.begin_period();
        for _ in 0..MESSAGES_PER_TURN {
            if connection.read_in_period >= MESSAGES_PER_PERIOD {
                return Next::Pause(connection.period + RATE_PERIOD);
            }
            if session.is_full() {
                return Next::Keep;
            }
            let len = match connection.socket.take_plain(buffer) {
                Ok(PlainMessage::Bytes(len)) => len,
                Ok(PlainMessage::WithDescriptors) => {
                    return connection.violated("it sends descriptors, which no request brings");
                }
                Ok(PlainMessage::Closed) => return Next::Close,
                Err(Errno::AGAIN) => return Next::Keep,
                Err(error) => return connection.violated(&error.to_string()),
            };
            connection.read_in_period += 1;
            metrics.messages_total.add(1);
            let request: Request = match decode(&buffer[..len]) {
                Ok(request) => request,
                Err(error) => return connection.violated(&error.to_string()),
            };
            let waits = request.has_an_answer();
            let next = session.answer(request, connection);
            // A peer that waits for a reply has mostly sent nothing behind; the kernel reports where there is more.
            if waits || next == Next::Close {
                return next;
            }
        }
        Next::Keep
    }

    /// Returns the events to wait for from now on, where they have changed.
    pub(super) fn take_change_of_interest(&mut self, paused: bool) -> Option<EventFlags> {
        let connection = &mut self.connection;
        let reads = !paused && !self.session.is_full();
        let writes = !paused && !connection.unsent.is_empty();
        let reading = if reads { EventFlags::IN } else { EventFlags::empty() };
        let writing = if writes { EventFlags::OUT } else { EventFlags::empty() };
        let before = std::mem::replace(&mut connection.interest, reading | writing);
        (before != connection.interest).then_some(connection.interest)
    }
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

    fn begin_period(&mut self) {
        if clock::elapsed(self.period) >= RATE_PERIOD {
            self.period = clock::now();
            self.read_in_period = 0;
        }
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
