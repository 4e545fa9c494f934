//! The thread of a relay that sends by TCP.

use std::net::{Shutdown, TcpStream};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use device_ipc_tcp::{AuthenticatedSender, TcpError};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::super::counters::{Direction, Slot};
use super::super::limits::MessagesInFlight;
use super::{RelayShared, WINDOW};
use crate::model::error::{Error, Result};
use crate::os::{clock, log};
use crate::transport::socket::{self, Packet};
use crate::wire::channel::{MAX_ENDED_GRANTS, PacketMessage, message_of};
use crate::wire::protocol::encode;
use crate::wire::relay::{MAX_PART_BYTES, Relayed, RelayedState};

/// The thread that sends by TCP.
pub(super) struct Sender {
    shared: Arc<RelayShared>,
    tcp: AuthenticatedSender,
    on_the_way: MessagesInFlight,
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
    pub(super) fn new(shared: Arc<RelayShared>, tcp: AuthenticatedSender) -> Self {
        Self {
            shared,
            tcp,
            on_the_way: MessagesInFlight::new(WINDOW),
            sent: RelayedState::default(),
            buffer: Vec::new(),
            is_control_closed: false,
        }
    }

    pub(super) fn socket(&self) -> &TcpStream {
        self.tcp.socket()
    }

    pub(super) fn run(&mut self) {
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
        let (link, relay) = (&shared.link, &shared.relay);
        // Cleared before anything is looked at, so that every later change wakes this thread.
        relay.wake.clear();
        self.read_wakes();
        self.send_ended()?;
        // Loaded before the socket is read: this process stores it after its last message.
        let closed = link.counters.peers(Slot::Closed).load(Ordering::Acquire);
        let may_send = self.has_room();
        let (mut is_drained, mut is_over, mut has_sent) = (false, false, false);
        if may_send {
            match socket::receive(link.messages.fd(), &mut self.buffer) {
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
        let has_room = self.on_the_way.room_at(1).is_none();
        self.shared.is_blocked.store(!has_room, Ordering::Relaxed);
        has_room
    }

    /// Reads the wake-ups of this process, which has received messages.
    fn read_wakes(&mut self) {
        while !self.is_control_closed {
            match socket::receive(self.shared.link.wakes.fd(), &mut self.buffer) {
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
        let size = match message_of(&packet.bytes, packet.fds)? {
            PacketMessage::None => return Ok(()),
            PacketMessage::Whole(message) => {
                self.send(&Relayed::Last(message))?;
                message.len() as u64
            }
            PacketMessage::InFile(file, bytes) => {
                self.forward_file(&file, bytes)?;
                bytes
            }
        };
        self.on_the_way.push(size);
        if self.shared.relay.wants_socket.swap(false, Ordering::SeqCst) {
            self.shared.link.wake_peers_sender();
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
        let link = &self.shared.link;
        // Asks for a wake-up at the next message that this process receives.
        let room = link.counters.room();
        let received = loop {
            let received = room.received();
            room.ask(received + 1);
            if room.received() == received {
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
            settled: link.counters.peers(Slot::Settled).load(Ordering::Acquire),
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
        let link = &self.shared.link;
        let mut files = vec![PollFd::new(&self.shared.relay.wake, PollFlags::IN)];
        if !self.is_control_closed {
            files.push(PollFd::from_borrowed_fd(link.wakes.fd(), PollFlags::IN));
        }
        if may_send {
            files.push(PollFd::from_borrowed_fd(link.messages.fd(), PollFlags::IN));
        }
        let _ = clock::poll(&mut files, None);
    }
}
