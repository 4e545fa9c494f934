//! Receiving on the caller's thread.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::arrival::{Arrival, OpenDevice};
use super::connection::ChannelConnection;
use super::counters::Direction;
use super::maps::{ResolvedMap, position};
use super::progress::ReceiveState;
use super::received::{Received, ReceivedExport};
use crate::model::device::DeviceIdentity;
use crate::model::error::{Error, Result};
use crate::os::kill::kill_point;
use crate::os::process::ProcessIdentity;
use crate::sharing::Runtime;
use crate::sharing::import::{GrantReturn, UnusedGrant};
use crate::sharing::timeline::TIMELINE_END;
use crate::transport::Deadline;
use crate::transport::socket::{self, Packet};
use crate::wire::Token;
use crate::wire::channel::{Head, IncomingPacket, Item, Payload, read, read_message};
use crate::wire::descriptor::{Descriptor, NamedExport};

/// Maximum time for which a call that does not wait waits for another thread's call.
const MAX_CONTENTION: Duration = Duration::from_millis(10);

/// Maximum number of wake-up packets read after the deadline: a few may precede a message.
const MAX_WAKE_PACKETS: u32 = 64;

/// Maximum number of files that one channel keeps until this process takes them.
const MAX_FILES: usize = 2;

/// The result of a receive that does not wait.
enum ReceiveNow {
    Message(Received),
    Nothing,
    /// Only wake-up packets, and possibly more of them.
    Wakes,
}

/// The context for opening the memory of a message.
struct OpenContext<'a> {
    runtime: &'a Runtime,
    map: Option<&'a ResolvedMap>,
    ready: u64,
}

impl ChannelConnection {
    /// Waits for the next message and returns it.
    pub(super) fn receive(self: &Arc<Self>, deadline: Deadline) -> Result<Received> {
        let received = self.receive_until(deadline);
        self.report_readiness();
        received
    }

    /// Returns the next message if it has arrived.
    pub(super) fn try_receive(self: &Arc<Self>) -> Result<Option<Received>> {
        let received = self.receive_available();
        self.report_readiness();
        received
    }

    fn receive_until(self: &Arc<Self>, deadline: Deadline) -> Result<Received> {
        self.runtime.check()?;
        let receiving = self.receiving.lock(deadline);
        let mut receiving =
            receiving.ok_or_else(|| deadline.passed("the receive call of another thread", ""))?;
        loop {
            match self.receive_now(&mut receiving, false)? {
                ReceiveNow::Message(received) => return Ok(received),
                ReceiveNow::Nothing => self.wait_for_message(&mut receiving, deadline)?,
                // A peer that sends only wake-up packets cannot extend the wait beyond the deadline.
                ReceiveNow::Wakes if deadline.left().is_zero() => return Err(self.timed_out(deadline)),
                ReceiveNow::Wakes => {}
            }
        }
    }

    fn receive_available(self: &Arc<Self>) -> Result<Option<Received>> {
        self.runtime.check()?;
        // A thread that waits in `receive` holds the lock, and receives the message.
        let Some(mut receiving) = self.receiving.lock(Deadline::after(MAX_CONTENTION)) else {
            return Ok(None);
        };
        match self.receive_now(&mut receiving, true)? {
            ReceiveNow::Message(received) => Ok(Some(received)),
            ReceiveNow::Nothing => Ok(None),
            ReceiveNow::Wakes => Err(self.reject_peer("it sends only wake-up packets".into())),
        }
    }

    /// Returns the next message if it has arrived. Fails at the end of the channel. Reads the socket also without a reason to
    /// if `polls`.
    fn receive_now(self: &Arc<Self>, receiving: &mut ReceiveState, polls: bool) -> Result<ReceiveNow> {
        for _ in 0..=MAX_WAKE_PACKETS {
            if self.link.counters.is_closed(Direction::Receiving) {
                receiving.ended = true;
                return Err(self.close_reason(Direction::Receiving));
            }
            // Loaded before the queue: the peer stores it after its last message.
            let has_finished = self.link.counters.peer_has_finished();
            let taken = receiving.taken;
            receiving.polled |= polls;
            let next = self.next(receiving, has_finished);
            if next.is_err() && receiving.taken > taken {
                // The message is lost; the peer may send another one for it.
                self.acknowledge(receiving);
            }
            match next? {
                Some(IncomingPacket::End) => receiving.ended = true,
                Some(IncomingPacket::Look) => {}
                Some(IncomingPacket::File(file)) => self.keep_file(receiving, file)?,
                Some(IncomingPacket::Message { head, bytes }) => {
                    let received = self.take(head, bytes)?;
                    self.acknowledge(receiving);
                    kill_point!("receiver:channel-received");
                    return Ok(ReceiveNow::Message(received));
                }
                None if has_finished || receiving.ended => {
                    receiving.ended = true;
                    return Err(self.close_reason(Direction::Receiving));
                }
                None => return Ok(ReceiveNow::Nothing),
            }
        }
        Ok(ReceiveNow::Wakes)
    }

    fn keep_file(&self, receiving: &mut ReceiveState, file: Option<OwnedFd>) -> Result<()> {
        if receiving.files.len() >= MAX_FILES {
            return Err(self.reject_peer(format!("it hands over more than {MAX_FILES} files")));
        }
        receiving.files.push_back(file.into_iter().collect());
        Ok(())
    }

    /// Waits for the next file that the peer hands over. A message before it ends the channel.
    pub(super) fn take_file(self: &Arc<Self>, deadline: Deadline) -> Result<OwnedFd> {
        let receiving = self.receiving.lock(deadline);
        let mut receiving =
            receiving.ok_or_else(|| deadline.passed("the receive call of another thread", ""))?;
        loop {
            if let Some(file) = receiving.files.pop_front() {
                return file
                    .take_first()
                    .ok_or_else(|| Error::io("receiving a file (ulimit -n)", Errno::MFILE));
            }
            let has_finished = self.link.counters.peer_has_finished();
            match self.next(&mut receiving, true)? {
                Some(IncomingPacket::File(file)) => self.keep_file(&mut receiving, file)?,
                Some(IncomingPacket::Look) => {}
                Some(IncomingPacket::End) => receiving.ended = true,
                Some(IncomingPacket::Message { .. }) => {
                    return Err(self.reject_peer("it sent a message instead of a file".into()));
                }
                None if has_finished || receiving.ended => {
                    return Err(self.close_reason(Direction::Receiving));
                }
                None => {
                    let waited = socket::wait_until(self.link.messages.fd(), PollFlags::IN, deadline.at);
                    if !waited.map_err(|error| Error::io("waiting for the peer of the channel", error))? {
                        return Err(self.timed_out(deadline));
                    }
                }
            }
        }
    }

    /// Reports to the peer how many messages this end has received, and wakes the peer if it waits for that. Never blocks.
    fn acknowledge(&self, receiving: &mut ReceiveState) {
        if let Some(wanted) = self.link.counters.peers_room().acknowledge(receiving.taken)
            && wanted != receiving.woken_for
        {
            receiving.woken_for = wanted;
            self.link.wake_peers_sender();
        }
    }

    /// Returns the next message or control packet, if there is one, from the inbox or the socket.
    ///
    /// It polls the socket, which is a system call, only if there is a reason to.
    pub(super) fn next(&self, receiving: &mut ReceiveState, closed: bool) -> Result<Option<IncomingPacket>> {
        if self.is_violated() {
            return Err(self.close_reason(Direction::Receiving));
        }
        if let Some(message) = self.take_from_inbox(receiving)? {
            return Ok(Some(message));
        }
        let poll_socket = closed || std::mem::take(&mut receiving.polled) || receiving.early.is_some();
        if !poll_socket && !self.has_sent(receiving) {
            return Ok(None);
        }
        kill_point!("receiver:channel-looked");
        let packet = self.next_packet(receiving)?;
        // A message in the inbox precedes the packet, also if the packet is the end.
        if let Some(message) = self.take_from_inbox(receiving)? {
            receiving.early = packet;
            return Ok(Some(message));
        }
        let Some(packet) = packet else { return Ok(None) };
        let read = read(packet.bytes, packet.fds, self.limit);
        if !matches!(read, Ok(IncomingPacket::End | IncomingPacket::Look | IncomingPacket::File(_))) {
            receiving.by_socket += 1;
            receiving.taken += 1;
        }
        self.check_read(read).map(Some)
    }

    /// Takes the next message from the inbox, if it is there.
    fn take_from_inbox(&self, receiving: &mut ReceiveState) -> Result<Option<IncomingPacket>> {
        let inbox = self.link.counters.inbox();
        if !inbox.has(receiving.taken + 1) {
            return Ok(None);
        }
        receiving.taken += 1;
        let message = inbox.take(receiving.taken);
        let message = message.ok_or_else(|| Error::Protocol("its message is longer than an inbox".into()));
        self.check_read(message.and_then(read_message)).map(Some)
    }

    /// Ends the channel if a message is invalid.
    fn check_read(&self, read: Result<IncomingPacket>) -> Result<IncomingPacket> {
        match read {
            Err(Error::Protocol(how)) => Err(self.reject_peer(how)),
            read => read,
        }
    }

    /// Receives the next packet of the socket, if there is one. Records the end of the connection.
    fn next_packet(&self, receiving: &mut ReceiveState) -> Result<Option<Packet>> {
        if let Some(packet) = receiving.early.take() {
            return Ok(Some(packet));
        }
        if receiving.ended {
            return Ok(None);
        }
        loop {
            match socket::receive(self.link.messages.fd(), &mut receiving.buffer) {
                Ok(Some(packet)) => return Ok(Some(packet)),
                // The peer has closed its socket with unread packets. Its own packets can still be received.
                Err(Errno::CONNRESET) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::MSGSIZE) => return Err(self.too_large()),
                Ok(None) => {
                    receiving.ended = true;
                    return Ok(None);
                }
                Err(error) => return Err(Error::io("receiving a message", error)),
            }
        }
    }

    pub(super) fn too_large(&self) -> Error {
        self.reject_peer("its packet exceeds the maximum size".into())
    }

    pub(super) fn take(self: &Arc<Self>, head: Head<'_>, bytes: Payload) -> Result<Received> {
        let runtime = self.runtime.check()?;
        // Between hosts there is no counter that a stream could wait for.
        if head.ready >= TIMELINE_END || (self.relay.is_some() && head.ready > 0) {
            return Err(self.reject_peer("its message waits for an invalid counter value".into()));
        }
        for (export, token) in head.ended {
            runtime.exports.end_grant(export, token);
        }
        let map = if head.reply { &self.maps.replied } else { &self.maps.incoming };
        let mut received = Received::new(Arc::clone(self), bytes, head.ready);
        let context = OpenContext { runtime, map: map.as_ref(), ready: head.ready };
        for Item { descriptor, grants } in head.items {
            received.exports.push(self.export(&context, descriptor.0.into_owned(), &grants.0)?);
        }
        Ok(received)
    }

    fn export(
        self: &Arc<Self>,
        context: &OpenContext<'_>,
        descriptor: Descriptor,
        grants: &[Token],
    ) -> Result<ReceivedExport> {
        let contents = descriptor.contents();
        if !grants.is_empty() {
            self.check_granted(&contents.exporter)?;
            if grants.len() != contents.parts.len() {
                return Err(
                    self.reject_peer("its message contains a wrong number of grants for an export".into())
                );
            }
        }
        let held = grants.iter().enumerate().map(|(part, token)| self.held(&contents.named(part), *token));
        let held = held.collect();
        let places = descriptor.homes().map(|home| self.place(context, &contents.exporter, home)).collect();
        Ok(ReceivedExport::new(Arrival::new(self, context.ready), descriptor, held, places))
    }

    /// Checks that granted memory belongs to the peer: only the exporter makes grants.
    fn check_granted(&self, exporter: &ProcessIdentity) -> Result<()> {
        if *exporter == self.peer.process {
            return Ok(());
        }
        Err(self.reject_peer("its message grants access to memory that another process shares".into()))
    }

    fn held(&self, named: &NamedExport<'_>, token: Token) -> UnusedGrant {
        let returns = self.relay.clone().map(|relay| relay as Arc<dyn GrantReturn>);
        let bearer = Some((self.id(), self.runtime));
        UnusedGrant::new(named, token, bearer, self.ipc.allow_list().clone()).returned_by(returns)
    }

    fn place(
        &self,
        context: &OpenContext<'_>,
        exporter: &ProcessIdentity,
        home: DeviceIdentity,
    ) -> OpenDevice {
        match context.map {
            None => OpenDevice::Anywhere,
            // Memory of this process opens on its home device.
            Some(_) if *exporter == context.runtime.identity => OpenDevice::Anywhere,
            Some(map) => {
                let device = map.get(home).and_then(|device| position(&self.devices, device));
                device.map_or(OpenDevice::Nowhere, OpenDevice::On)
            }
        }
    }
}
