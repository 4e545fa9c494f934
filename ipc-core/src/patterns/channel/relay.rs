//! The relay of a channel to another host: two threads of this process that act as the peer.
//!
//! The end of this process is an ordinary [`Connection`] whose sockets and page belong to this process alone. One thread, the
//! *sender*, takes packets out of the socket and sends their messages by TCP, and the counters that the process has changed. The
//! other one, the *receiver*, puts the messages of the other host into the socket, and the counters of the other process into
//! the page. So limits, descriptors for event loops, closing and errors are those of a channel within one host.
//!
//! The receiver never waits for this process, so that counters always arrive: a sender has at most [`WINDOW`] messages on the
//! way that the other process has not received, and the packets of so many fit into the socket, because longer messages are
//! in memory files.
//!
//! Device words are not shared between hosts. The host waits for the streams of a message before it sends the message.

use std::fmt;
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use device_ipc_tcp::{AuthenticatedConnection, AuthenticatedReceiver, AuthenticatedSender, TcpError};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::sockopt;

use super::connection::{Connection, Direction, Slot};
use super::limits::{InFlight, Limits};
use crate::model::error::{Error, Result};
use crate::os::{ClosedByFork, Condvar, Readiness, log, spawn_without_signals};
use crate::sharing::Runtime;
use crate::sharing::import::GrantReturn;
use crate::sharing::timeline::{Word, WordPage};
use crate::transport::socket::{self, Packet, PeerSocket, timespec};
use crate::wire::Token;
use crate::wire::channel::{Contents, Incoming, MAX_ENDED_GRANTS, Outgoing, contents_of, read_message};
use crate::wire::descriptor::ExportId;
use crate::wire::protocol::encode;
use crate::wire::relay::{MAX_PART_BYTES, Relayed, RelayedState};

/// The messages of one direction that are on the way: sent by TCP and not received by the other process. One more may begin
/// while there are fewer of either.
const WINDOW: Limits = Limits { messages: 64, bytes: 16 << 20 };

/// Maximum size of a message in a packet of this process, in bytes; a longer one is in a memory file. The packets of a whole
/// [`WINDOW`] fit into the buffer of a socket, 208 KiB on Linux.
const MAX_WHOLE_BYTES: usize = 1024;

/// The time for which a receive waits for the rest of a message whose first bytes have arrived. The next one continues with it.
const REST_OF_MESSAGE: Duration = Duration::from_millis(100);

/// The interval at which the receiver of a closed channel looks whether the sender has finished.
const TICK: Duration = Duration::from_millis(100);

/// Maximum time for which the end of the other process is awaited after everything has been sent.
const LINGER: Duration = Duration::from_secs(10);

/// Maximum time for which a drop waits until the other process knows it.
pub(super) const CLOSING: Duration = Duration::from_secs(1);

/// The time without a packet of the peer after which the system asks whether its host exists, and the interval of repetitions.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(5));

/// The time after which the system gives up a peer that acknowledges nothing.
const LOST: Duration = Duration::from_secs(30);

/// The connection's view of its relay.
pub(super) struct Relay {
    /// Wakes the sender: a counter or a grant has changed.
    wake: Readiness,
    /// Whether this process waits until the socket has room.
    wants_socket: AtomicBool,
    state: Mutex<RelayState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct RelayState {
    /// Grants of the other process that are no longer needed.
    ended: Vec<(ExportId, Token)>,
    /// The directions that this process has closed, as the other process has confirmed them.
    seen: u64,
    /// Whether the connection has ended.
    is_over: bool,
}

impl Relay {
    pub(super) fn new() -> Result<Arc<Self>> {
        let wake = Readiness::new().map_err(|error| Error::io("creating an eventfd", error))?;
        let (wants_socket, state) = (AtomicBool::new(false), Mutex::default());
        Ok(Arc::new(Self { wake, wants_socket, state, changed: Condvar::new() }))
    }

    /// Asks for a wake-up when the sender has taken a packet out of the socket. The caller then tries again.
    pub(super) fn ask_for_socket(&self) {
        self.wants_socket.store(true, Ordering::SeqCst);
    }

    /// Reports that a counter of this process has changed.
    pub(super) fn wake(&self) {
        self.wake.set();
    }

    /// Waits until the other process knows that these directions are closed, which it does after it has all messages.
    pub(super) fn wait_seen(&self, directions: u64, timeout: Duration) {
        let until = Instant::now() + timeout;
        let mut state = self.lock();
        while !state.is_over && state.seen & directions != directions {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, RelayState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl GrantReturn for Relay {
    fn give_back(&self, export: ExportId, token: Token) {
        self.lock().ended.push((export, token));
        self.wake();
    }
}

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay").finish_non_exhaustive()
    }
}

/// The sockets and the page of a connection, from the view of the peer. The connection is the exporter's side of the page.
pub(super) struct PeerEnds {
    pub(super) socket: PeerSocket,
    pub(super) control: PeerSocket,
    pub(super) page: Arc<WordPage>,
}

impl PeerEnds {
    /// Returns a word that this process's end writes.
    fn local(&self, slot: Slot) -> &AtomicU64 {
        self.page.word(slot as u32, Word::FromExporter)
    }

    /// Returns a word that the peer writes.
    fn peers(&self, slot: Slot) -> &AtomicU64 {
        self.page.word(slot as u32, Word::FromImporter)
    }

    /// Wakes the threads and event loops of this process that wait to send. If the socket is full, they have wake-ups to read.
    fn wake_senders(&self) {
        let _ = socket::send(self.control.fd(), &[0], &[]);
    }
}

/// The state of both threads.
struct Shared {
    ends: PeerEnds,
    relay: Arc<Relay>,
    /// The messages that the receiver has taken from TCP.
    arrived: AtomicU64,
    /// The messages that the peer has received or discarded, of those that this process has sent.
    taken_by_peer: AtomicU64,
    /// Whether the sender waits until that changes.
    is_blocked: AtomicBool,
    /// The directions that the peer has closed.
    closed_by_peer: AtomicU64,
    /// Whether the sender has sent everything, and sends nothing more.
    has_finished: AtomicBool,
}

impl Shared {
    /// Returns the number of messages that this process has received or discarded.
    fn taken(&self, closed: u64, received: u64) -> u64 {
        if closed & Direction::Receiving as u64 == 0 {
            received
        } else {
            self.arrived.load(Ordering::Acquire).max(received)
        }
    }
}

/// Starts the relay of a connection. It ends with the connection, or with the TCP connection.
pub(super) fn start(
    connection: &Arc<Connection>,
    relay: Arc<Relay>,
    ends: PeerEnds,
    tcp: AuthenticatedConnection,
) -> Result<()> {
    prepare(tcp.socket()).map_err(|error| Error::io("preparing the TCP connection of a channel", error))?;
    let limit = connection.limit;
    let closed_by_fork = ClosedByFork::new(tcp.socket().as_fd());
    let (tcp_sender, tcp_receiver) = tcp.split();
    let shared = Arc::new(Shared {
        ends,
        relay,
        arrived: AtomicU64::new(0),
        taken_by_peer: AtomicU64::new(0),
        is_blocked: AtomicBool::new(false),
        closed_by_peer: AtomicU64::new(0),
        has_finished: AtomicBool::new(false),
    });
    let mut receiver = Receiver {
        shared: Arc::clone(&shared),
        tcp: tcp_receiver,
        connection: Arc::downgrade(connection),
        limit,
        partial: Vec::new(),
        on_the_way: InFlight::default(),
        delivered: 0,
        woken_for: 0,
    };
    let mut sender = Sender {
        shared,
        tcp: tcp_sender,
        on_the_way: InFlight::default(),
        sent: RelayedState::default(),
        buffer: Vec::new(),
        is_control_closed: false,
    };
    // If one thread cannot be started, the other one ends: its socket is shut down.
    let stop = sender.tcp.socket().try_clone().map_err(|error| Error::io("duplicating a socket", error))?;
    let started = spawn_without_signals("device-ipc-tcp", move || sender.run()).and_then(|()| {
        spawn_without_signals("device-ipc-tcp", move || {
            let _closed_by_fork = closed_by_fork;
            receiver.run();
        })
    });
    started.inspect_err(|_| drop(stop.shutdown(Shutdown::Both)))
}

/// Sets the options of the TCP connection: no delay, and the detection of a host that has vanished.
fn prepare(tcp: &TcpStream) -> rustix::io::Result<()> {
    let (idle, interval) = KEEPALIVE;
    sockopt::set_tcp_nodelay(tcp, true)?;
    sockopt::set_socket_keepalive(tcp, true)?;
    sockopt::set_tcp_keepidle(tcp, idle)?;
    sockopt::set_tcp_keepintvl(tcp, interval)?;
    sockopt::set_tcp_user_timeout(tcp, LOST.as_millis() as u32)
}

/// The thread that sends by TCP.
struct Sender {
    shared: Arc<Shared>,
    tcp: AuthenticatedSender,
    on_the_way: InFlight,
    /// The last state that was sent.
    sent: RelayedState,
    buffer: Vec<u8>,
    is_control_closed: bool,
}

/// The reason for which the sender ends.
enum Ended {
    /// This process's end of the channel has gone, and everything has been sent.
    Here,
    /// The connection has failed.
    There(String),
}

impl From<TcpError> for Ended {
    fn from(error: TcpError) -> Self {
        Self::There(error.to_string())
    }
}

impl From<Error> for Ended {
    fn from(error: Error) -> Self {
        Self::There(error.to_string())
    }
}

impl Sender {
    fn run(&mut self) {
        let end = loop {
            if let Err(end) = self.step() {
                break end;
            }
        };
        match end {
            Ended::Here => drop(self.tcp.socket().shutdown(Shutdown::Write)),
            Ended::There(why) => {
                tracing::debug!(target: log::CHANNEL, why, "a channel of another host sends no more");
                // The receiver takes what has arrived, and ends.
                let _ = self.tcp.socket().shutdown(Shutdown::Both);
            }
        }
        self.shared.has_finished.store(true, Ordering::Release);
    }

    /// Sends one message of the channel, and the state if it has changed; waits if there was neither.
    fn step(&mut self) -> Result<(), Ended> {
        let shared = Arc::clone(&self.shared);
        let (ends, relay) = (&shared.ends, &shared.relay);
        // Cleared before anything is looked at, so that every later change wakes this thread.
        relay.wake.clear();
        self.read_wakes();
        self.send_ended()?;
        // Loaded before the socket is read: this process stores it after its last message.
        let closed = ends.local(Slot::Closed).load(Ordering::Acquire);
        let may_send = self.has_room();
        let (mut is_drained, mut is_over, mut has_sent) = (false, false, false);
        if may_send {
            match socket::receive(ends.socket.fd(), &mut self.buffer) {
                Ok(Some(packet)) => {
                    self.forward(packet)?;
                    has_sent = true;
                }
                Ok(None) => (is_drained, is_over) = (true, true),
                Err(Errno::AGAIN) => is_drained = true,
                Err(Errno::CONNRESET) => has_sent = true,
                Err(error) => return Err(Ended::There(error.to_string())),
            }
        }
        let changed = self.send_state(closed, is_drained)?;
        if is_over {
            return Err(Ended::Here);
        }
        if relay.lock().is_over {
            return Err(Ended::There("the connection has ended".into()));
        }
        if !has_sent && !changed {
            self.wait(may_send);
        }
        Ok(())
    }

    /// Returns whether a further message may be sent. If not, the receiver wakes this thread.
    fn has_room(&mut self) -> bool {
        self.shared.is_blocked.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.on_the_way.acknowledge(self.shared.taken_by_peer.load(Ordering::Acquire));
        let has_room = self.on_the_way.room_at(1, WINDOW).is_none();
        self.shared.is_blocked.store(!has_room, Ordering::Relaxed);
        has_room
    }

    /// Reads the wake-ups of this process, which has received messages.
    fn read_wakes(&mut self) {
        while !self.is_control_closed {
            match socket::receive(self.shared.ends.control.fd(), &mut self.buffer) {
                Ok(Some(_)) => {}
                Err(Errno::AGAIN) => return,
                Ok(None) | Err(_) => self.is_control_closed = true,
            }
        }
    }

    fn send_ended(&mut self) -> Result<(), Ended> {
        let ended = std::mem::take(&mut self.shared.relay.lock().ended);
        for ended in ended.chunks(MAX_ENDED_GRANTS) {
            self.send(&Relayed::Ended(ended.to_vec()))?;
        }
        Ok(())
    }

    fn send(&mut self, message: &Relayed<'_>) -> Result<(), Ended> {
        Ok(self.tcp.send(&encode(message)?, None)?)
    }

    /// Sends the message of a packet.
    fn forward(&mut self, packet: Packet) -> Result<(), Ended> {
        let size = match contents_of(&packet.bytes, packet.fds)? {
            Contents::None => return Ok(()),
            Contents::Whole(message) => {
                self.send(&Relayed::Last(message))?;
                message.len() as u64
            }
            Contents::InFile(file, bytes) => {
                self.forward_file(&file, bytes)?;
                bytes
            }
        };
        self.on_the_way.push(size);
        if self.shared.relay.wants_socket.swap(false, Ordering::SeqCst) {
            self.shared.ends.wake_senders();
        }
        Ok(())
    }

    fn forward_file(&mut self, file: &std::fs::File, bytes: u64) -> Result<(), Ended> {
        let mut part = Vec::new();
        let mut at = 0;
        loop {
            let left = bytes - at;
            part.resize(left.min(MAX_PART_BYTES as u64) as usize, 0);
            file.read_exact_at(&mut part, at).map_err(|error| Ended::There(error.to_string()))?;
            at += part.len() as u64;
            if at == bytes {
                return self.send(&Relayed::Last(&part));
            }
            self.send(&Relayed::Part(&part))?;
        }
    }

    /// Sends the state if it has changed. The peer learns after the last message that there are no further ones.
    fn send_state(&mut self, closed: u64, is_drained: bool) -> Result<bool, Ended> {
        let ends = &self.shared.ends;
        // Asks for a wake-up at the next message that this process receives.
        let received = loop {
            let received = ends.local(Slot::Received).load(Ordering::Acquire);
            ends.peers(Slot::WantsRoom).store(received + 1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if ends.local(Slot::Received).load(Ordering::Acquire) == received {
                break received;
            }
        };
        let mut reported = closed & Direction::Receiving as u64;
        if is_drained {
            reported |= closed & Direction::Sending as u64;
        }
        let state = RelayedState {
            received,
            discarded: self.shared.taken(closed, received) - received,
            settled: ends.local(Slot::Settled).load(Ordering::Acquire),
            closed: self.sent.closed | reported as u8,
            seen: self.shared.closed_by_peer.load(Ordering::Acquire) as u8,
        };
        let has_changed = state != self.sent;
        if has_changed {
            self.send(&Relayed::State(state))?;
            self.sent = state;
        }
        Ok(has_changed)
    }

    /// Waits until there may be something to send.
    fn wait(&self, may_send: bool) {
        let ends = &self.shared.ends;
        let mut files = vec![PollFd::new(&self.shared.relay.wake, PollFlags::IN)];
        if !self.is_control_closed {
            files.push(PollFd::from_borrowed_fd(ends.control.fd(), PollFlags::IN));
        }
        if may_send {
            files.push(PollFd::from_borrowed_fd(ends.socket.fd(), PollFlags::IN));
        }
        let _ = poll(&mut files, None);
    }
}

/// The thread that receives by TCP.
struct Receiver {
    shared: Arc<Shared>,
    tcp: AuthenticatedReceiver,
    connection: Weak<Connection>,
    /// The maximum size of a message in bytes.
    limit: u64,
    /// The parts of a message that have arrived.
    partial: Vec<u8>,
    on_the_way: InFlight,
    /// The messages that are in the socket, or were.
    delivered: u64,
    /// The last value of `WantsRoom` that a wake-up was sent for.
    woken_for: u64,
}

impl Receiver {
    fn run(&mut self) {
        let why = loop {
            if let Err(why) = self.step() {
                break why;
            }
        };
        tracing::debug!(target: log::CHANNEL, why, "a channel of another host receives no more");
        let _ = self.tcp.socket().shutdown(Shutdown::Both);
        for socket in [&self.shared.ends.socket, &self.shared.ends.control] {
            let _ = rustix::net::shutdown(socket.fd(), rustix::net::Shutdown::Both);
        }
        let relay = &self.shared.relay;
        relay.lock().is_over = true;
        relay.changed.notify_all();
        relay.wake();
    }

    /// Waits for the next message and handles it. Fails at the end of the connection.
    fn step(&mut self) -> Result<(), String> {
        self.wait()?;
        let message = match self.tcp.receive(Some(Instant::now() + REST_OF_MESSAGE)) {
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
                files.push(PollFd::from_borrowed_fd(self.shared.ends.socket.fd(), PollFlags::empty()));
            }
            let tick = timespec(TICK);
            if poll(&mut files, (!is_open).then_some(&tick)).is_err() || !files[0].revents().is_empty() {
                return Ok(());
            }
            let now = Instant::now();
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
                if let Some(runtime) = Runtime::existing() {
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
            let ends = &self.shared.ends;
            let [closed, received] =
                [Slot::Closed, Slot::Received].map(|slot| ends.local(slot).load(Ordering::Acquire));
            self.on_the_way.acknowledge(self.shared.taken(closed, received));
            if self.on_the_way.room_at(1, WINDOW).is_some() {
                return Err("it sends more messages than this process has room for".into());
            }
        }
        Ok(())
    }

    /// Puts a message into the socket of this process.
    fn deliver(&mut self, message: &[u8]) -> Result<(), String> {
        self.on_the_way.push(message.len() as u64);
        let shared = &self.shared;
        let outgoing = Outgoing::relayed(message, MAX_WHOLE_BYTES).map_err(|error| error.to_string())?;
        let file = outgoing.file.as_ref().map(AsFd::as_fd);
        loop {
            match socket::send(shared.ends.socket.fd(), &outgoing.packet, file.as_slice()) {
                Ok(()) => {
                    self.delivered += 1;
                    shared.ends.peers(Slot::Sent).store(self.delivered, Ordering::Release);
                    shared.arrived.fetch_add(1, Ordering::AcqRel);
                    return Ok(());
                }
                // The system's buffers are smaller than usual.
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS) => {
                    let _ =
                        socket::wait_until(shared.ends.socket.fd(), PollFlags::OUT, Instant::now() + TICK);
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
        let Ok(Incoming::Message { head, .. }) = read_message(message.to_vec()) else { return };
        if let Some(runtime) = Runtime::existing() {
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
        let (ends, relay) = (&shared.ends, &shared.relay);
        ends.peers(Slot::Settled).store(state.settled, Ordering::Release);
        ends.peers(Slot::Received).store(state.received, Ordering::Release);
        fence(Ordering::SeqCst);
        let wanted = ends.local(Slot::WantsRoom).load(Ordering::Relaxed);
        if (1..=state.received).contains(&wanted) && wanted != self.woken_for {
            self.woken_for = wanted;
            ends.wake_senders();
        }
        let taken = state.received.saturating_add(state.discarded);
        shared.taken_by_peer.store(taken, Ordering::Release);
        fence(Ordering::SeqCst);
        let closed = u64::from(state.closed);
        let newly = closed & !ends.peers(Slot::Closed).fetch_or(closed, Ordering::AcqRel);
        if newly & Direction::Sending as u64 != 0
            && let Ok(end) = Outgoing::end()
        {
            // If the socket is full, this process has packets to read, and looks at the word before it waits.
            let _ = socket::send(ends.socket.fd(), &end.packet, &[]);
        }
        if newly & Direction::Receiving as u64 != 0 {
            ends.wake_senders();
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
fn drop_elsewhere(connection: Arc<Connection>) {
    if let Some(runtime) = Runtime::existing() {
        runtime.worker.submit(move || drop(connection));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_a_whole_window_fit_into_a_socket() {
        let (near, _far) = socket::pair().unwrap();
        let message = vec![7; MAX_WHOLE_BYTES];
        for _ in 0..WINDOW.messages {
            let outgoing = Outgoing::relayed(&message, MAX_WHOLE_BYTES).unwrap();
            assert!(outgoing.file.is_none());
            socket::send(near.as_fd(), &outgoing.packet, &[]).unwrap();
        }
        assert!(Outgoing::relayed(&[7; MAX_WHOLE_BYTES + 1], MAX_WHOLE_BYTES).unwrap().file.is_some());
    }
}
