//! The thread of a relay that receives by TCP.

use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use device_ipc_tcp::{AuthenticatedReceiver, TcpError};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::super::connection::ChannelConnection;
use super::super::counters::{Direction, Slot};
use super::super::limits::MessagesInFlight;
use super::{MAX_WHOLE_BYTES, RelayShared, TICK, WINDOW};
use crate::model::error::Result;
use crate::os::{clock, log};
use crate::sharing::RuntimeRef;
use crate::sharing::import::GrantReturn;
use crate::transport::socket;
use crate::wire::channel::{IncomingPacket, OutgoingPacket, read_message};
use crate::wire::relay::{Relayed, RelayedState};

/// The time for which a receive waits for the rest of a message whose first bytes have arrived. The next one continues with it.
const REST_OF_MESSAGE: Duration = Duration::from_millis(100);

/// Maximum time for which the end of the other process is awaited after everything has been sent.
const LINGER: Duration = Duration::from_secs(10);

/// The thread that receives by TCP.
pub(super) struct Receiver {
    shared: Arc<RelayShared>,
    tcp: AuthenticatedReceiver,
    connection: Weak<ChannelConnection>,
    runtime: RuntimeRef,
    /// The maximum size of a message in bytes.
    limit: u64,
    /// The parts of a message that have arrived.
    partial: Vec<u8>,
    on_the_way: MessagesInFlight,
    /// The messages that are in the socket, or were.
    delivered: u64,
    /// The last value of `WantsRoom` that a wake-up was sent for.
    woken_for: u64,
}

impl Receiver {
    pub(super) fn new(
        shared: Arc<RelayShared>,
        tcp: AuthenticatedReceiver,
        connection: &Arc<ChannelConnection>,
    ) -> Self {
        Self {
            shared,
            tcp,
            connection: Arc::downgrade(connection),
            runtime: connection.runtime,
            limit: connection.limit,
            partial: Vec::new(),
            on_the_way: MessagesInFlight::new(WINDOW),
            delivered: 0,
            woken_for: 0,
        }
    }

    pub(super) fn run(&mut self) {
        let why = loop {
            if let Err(why) = self.step() {
                break why;
            }
        };
        tracing::debug!(target: log::CHANNEL, why, "a channel of another host receives no more");
        let _ = self.tcp.socket().shutdown(Shutdown::Both);
        self.shared.link.shut_down();
        let relay = &self.shared.relay;
        relay.lock().is_over = true;
        relay.changed.notify_all();
        relay.wake();
    }

    /// Waits for the next message and handles it. Fails at the end of the connection.
    fn step(&mut self) -> Result<(), String> {
        self.wait()?;
        let message = match self.tcp.receive(Some(clock::to_system(clock::now() + REST_OF_MESSAGE))) {
            Err(TcpError::TimedOut { .. }) => return Ok(()),
            received => received.map_err(|error| self.failed(&error))?,
        };
        let handled = Relayed::decode(&message).and_then(|message| self.handle(message));
        handled.map_err(|why| self.violated(why))
    }

    /// Waits until bytes have arrived, also after this process has closed the channel, until the sender has finished and the peer
    /// has had time to close the connection.
    fn wait(&self) -> Result<(), String> {
        let mut since: Option<Instant> = None;
        loop {
            let mut files = vec![PollFd::new(self.tcp.socket(), PollFlags::IN)];
            // Reports only that the end of this process has gone.
            let is_open = since.is_none() && !self.shared.has_finished.load(Ordering::Acquire);
            if is_open {
                files.push(PollFd::from_borrowed_fd(self.shared.link.messages.fd(), PollFlags::empty()));
            }
            let until = (!is_open).then(|| clock::now() + TICK);
            if clock::poll(&mut files, until).is_err() || !files[0].revents().is_empty() {
                return Ok(());
            }
            let now = clock::now();
            let since = *since.get_or_insert(now);
            if self.shared.has_finished.load(Ordering::Acquire) && now - since >= LINGER {
                return Err("the peer has not closed the connection".into());
            }
        }
    }

    /// Ends the channel with an error if the peer has violated the protocol.
    fn violated(&self, why: String) -> String {
        if let Some(connection) = self.connection.upgrade() {
            let _ = connection.reject_peer(format!("over TCP: {why}"));
            drop_elsewhere(connection);
        }
        why
    }

    fn failed(&self, error: &TcpError) -> String {
        match error {
            TcpError::Modified | TcpError::ReceivedTooLong { .. } => self.violated(error.to_string()),
            _ => error.to_string(),
        }
    }

    fn handle(&mut self, message: Relayed<'_>) -> Result<(), String> {
        match message {
            Relayed::Part(part) => self.append(part),
            Relayed::Last(part) if self.partial.is_empty() => {
                self.check_room(part.len())?;
                self.deliver(part)
            }
            Relayed::Last(part) => {
                self.append(part)?;
                let message = std::mem::take(&mut self.partial);
                self.deliver(&message)
            }
            Relayed::State(state) => {
                self.apply(state);
                Ok(())
            }
            Relayed::Ended(grants) => {
                if let Some(runtime) = self.runtime.here() {
                    grants.into_iter().for_each(|(export, token)| runtime.exports.end_grant(export, token));
                }
                Ok(())
            }
        }
    }

    fn append(&mut self, part: &[u8]) -> Result<(), String> {
        self.check_room(part.len())?;
        self.partial.extend_from_slice(part);
        Ok(())
    }

    /// Checks that the peer may send these bytes of a message.
    fn check_room(&mut self, bytes: usize) -> Result<(), String> {
        let size = (self.partial.len() + bytes) as u64;
        if size > self.limit {
            return Err(format!("its message has more than {} B, the agreed limit", self.limit));
        }
        if self.partial.is_empty() {
            let link = &self.shared.link;
            let [closed, received] =
                [Slot::Closed, Slot::Received].map(|slot| link.counters.peers(slot).load(Ordering::Acquire));
            self.on_the_way.acknowledge(self.shared.taken(closed, received));
            if self.on_the_way.room_at(1).is_some() {
                return Err("it sends more messages than this process has room for".into());
            }
        }
        Ok(())
    }

    /// Puts a message into the socket of this process.
    fn deliver(&mut self, message: &[u8]) -> Result<(), String> {
        self.on_the_way.push(message.len() as u64);
        let shared = &self.shared;
        let outgoing =
            OutgoingPacket::relayed(message, MAX_WHOLE_BYTES).map_err(|error| error.to_string())?;
        let file = outgoing.file.as_ref().map(AsFd::as_fd);
        loop {
            match socket::send(shared.link.messages.fd(), &outgoing.packet, file.as_slice()) {
                Ok(()) => {
                    self.delivered += 1;
                    shared.link.counters.own(Slot::Sent).store(self.delivered, Ordering::Release);
                    shared.arrived.fetch_add(1, Ordering::AcqRel);
                    return Ok(());
                }
                // The system's buffers are smaller than usual.
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS) => {
                    let _ =
                        socket::wait_until(shared.link.messages.fd(), PollFlags::OUT, clock::now() + TICK);
                }
                // This process receives no further messages.
                Err(_) => {
                    shared.arrived.fetch_add(1, Ordering::AcqRel);
                    self.discard(message);
                    shared.relay.wake();
                    return Ok(());
                }
            }
        }
    }

    /// Gives back the grants of a message that this process does not receive.
    fn discard(&self, message: &[u8]) {
        let Ok(IncomingPacket::Message { head, .. }) = read_message(message.to_vec()) else { return };
        if let Some(runtime) = self.runtime.here() {
            head.ended.into_iter().for_each(|(export, token)| runtime.exports.end_grant(export, token));
        }
        for item in &head.items {
            for (export, token) in item.descriptor.0.exports().zip(item.grants.0.iter()) {
                self.shared.relay.give_back(export, *token);
            }
        }
    }

    /// Stores the counters of the peer, and wakes the threads of this process that wait for them.
    fn apply(&mut self, state: RelayedState) {
        let shared = &self.shared;
        let (link, relay) = (&shared.link, &shared.relay);
        link.counters.own(Slot::Settled).store(state.settled, Ordering::Release);
        if let Some(wanted) = link.counters.peers_room().acknowledge(state.received)
            && wanted != self.woken_for
        {
            self.woken_for = wanted;
            link.wake_peers_sender();
        }
        let taken = state.received.saturating_add(state.discarded);
        shared.taken_by_peer.store(taken, Ordering::Release);
        fence(Ordering::SeqCst);
        let closed = u64::from(state.closed);
        let newly = link.counters.mark_closed(closed);
        if newly & Direction::Sending as u64 != 0
            && let Ok(end) = OutgoingPacket::end()
        {
            // If the socket is full, this process has packets to read, and looks at the word before it waits.
            let _ = socket::send(link.messages.fd(), &end.packet, &[]);
        }
        if newly & Direction::Receiving as u64 != 0 {
            link.wake_peers_sender();
        }
        shared.closed_by_peer.fetch_or(closed, Ordering::AcqRel);
        if newly != 0 || shared.is_blocked.load(Ordering::Relaxed) {
            relay.wake();
        }
        let mut known = relay.lock();
        if known.seen != u64::from(state.seen) {
            known.seen = u64::from(state.seen);
            relay.changed.notify_all();
        }
    }
}

/// Drops a reference to a connection, which may be the last one, on the worker.
fn drop_elsewhere(connection: Arc<ChannelConnection>) {
    if let Some(runtime) = connection.runtime.here() {
        runtime.worker.submit(move || drop(connection));
    }
}
