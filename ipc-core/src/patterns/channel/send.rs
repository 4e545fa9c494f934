//! Sending. Every step that can fail precedes the packet and is reverted if the packet is not sent.

use std::borrow::Cow;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::connection::ChannelConnection;
use super::counters::{Direction, Slot};
use super::inbox::PutResult;
use super::message::{Message, MessagePart, TrySendError};
use super::progress::SendState;
use crate::backend::stream::BorrowedStream;
use crate::model::error::{Error, Result};
use crate::model::one_or_many::OneOrMany;
use crate::os::kill::kill_point;
use crate::os::{SPIN, clock};
use crate::sharing::Runtime;
use crate::sharing::export::{Bearer, check_backend};
use crate::transport::{Deadline, socket};
use crate::wire::Token;
use crate::wire::channel::MAX_MESSAGE_TENSORS;
use crate::wire::channel::{DescriptorBytes, GrantTokens, Head, Item, OutgoingPacket};
use crate::wire::descriptor::ExportId;

/// Maximum time for which a call that does not wait waits for another thread's call.
const MAX_CONTENTION: Duration = Duration::from_millis(10);

/// Maximum time of one sleep of a thread that waits for room.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// Maximum number of wake-ups read at a time. Further ones wake the thread again.
const MAX_WAKES_READ: u32 = 256;

/// The result of a send that does not wait.
enum SendNow {
    Sent,
    /// The peer must receive earlier messages first. It will make the sender's descriptor readable.
    Full,
}

/// Grants and ended grants of a message, reverted on drop unless the message was sent.
struct PendingGrants<'a> {
    runtime: &'static Runtime,
    connection: &'a ChannelConnection,
    grants: Vec<(ExportId, Token)>,
    ended: Vec<(ExportId, Token)>,
}

impl PendingGrants<'_> {
    /// Keeps the grants because the message was sent.
    fn commit(&mut self) {
        self.grants.clear();
        self.ended.clear();
    }

    /// Encodes a part of the message with its grants.
    fn item<'p>(&mut self, part: &'p MessagePart<'p>, bearer: &Bearer) -> Result<Item<'p>> {
        let descriptor = part.descriptor();
        let grants = match part {
            MessagePart::Export(_) => {
                descriptor.exports().map(|export| self.grant(export, bearer)).collect::<Result<_>>()?
            }
            MessagePart::Descriptor(_) => OneOrMany::NONE,
        };
        Ok(Item { descriptor: DescriptorBytes(Cow::Borrowed(descriptor)), grants: GrantTokens(grants) })
    }

    fn grant(&mut self, export: ExportId, bearer: &Bearer) -> Result<Token> {
        let token = self.runtime.exports.begin_grant(export, bearer)?;
        self.grants.push((export, token));
        Ok(token)
    }
}

impl Drop for PendingGrants<'_> {
    fn drop(&mut self) {
        for (export, token) in self.grants.drain(..) {
            self.runtime.exports.end_grant(export, token);
        }
        let (peer, channel) = (&self.connection.peer.process, self.connection.id());
        self.runtime.imports.ended.put_back(peer, channel, std::mem::take(&mut self.ended));
    }
}

impl ChannelConnection {
    /// Sends a message. Waits until the messages in flight leave room for it.
    pub(super) fn send(&self, message: &Message<'_>, reply: bool, deadline: Deadline) -> Result<()> {
        loop {
            match self.send_now(message, reply, deadline)? {
                SendNow::Sent => return Ok(()),
                SendNow::Full if deadline.left().is_zero() => return Err(self.not_received(deadline)),
                SendNow::Full => self.wait_for_room(deadline)?,
            }
        }
    }

    /// Sends a message if the messages in flight leave room for it, and else returns it.
    pub(super) fn try_send<'m>(&self, message: Message<'m>, reply: bool) -> Result<(), TrySendError<'m>> {
        match self.send_now(&message, reply, Deadline::after(MAX_CONTENTION)) {
            Ok(SendNow::Sent) => Ok(()),
            Ok(SendNow::Full) => Err(TrySendError::Full(message)),
            Err(error) => Err(TrySendError::Failed(error)),
        }
    }

    /// Sends a message if there is room for it. Waits for other threads' calls alone.
    fn send_now(&self, message: &Message<'_>, reply: bool, deadline: Deadline) -> Result<SendNow> {
        let runtime = self.runtime.check()?;
        let sending = self.sending.lock(deadline);
        let mut sending = sending.ok_or_else(|| deadline.passed("the send call of another thread", ""))?;
        self.check()?;
        self.check_devices(message, reply)?;
        let bytes = message.bytes_in_flight();
        if !self.has_room(&mut sending, bytes) {
            return Ok(SendNow::Full);
        }
        let mut pending = PendingGrants { runtime, connection: self, grants: Vec::new(), ended: Vec::new() };
        let items = self.items(message, &mut pending)?;
        kill_point!("sender:channel-granted");
        let ready = self.signal_ready(message, &mut sending)?;
        kill_point!("sender:channel-signalled");
        pending.ended = runtime.imports.ended.take(&self.peer.process, self.id());
        let ended = pending.ended.iter().take(crate::wire::channel::MAX_ENDED_GRANTS).copied().collect();
        // A later message reports the remaining few.
        let later = pending.ended.split_off(pending.ended.len().min(crate::wire::channel::MAX_ENDED_GRANTS));
        runtime.imports.ended.put_back(&self.peer.process, self.id(), later);
        let tensors = items.len() as u64;
        let (head, buffer) = (Head { reply, ready, ended, items }, std::mem::take(&mut sending.buffer));
        let outgoing = OutgoingPacket::of(&head, message.payload(), self.limit, buffer)?;
        // A closed peer takes no messages, although its inbox may be empty.
        self.check()?;
        if !self.put(&outgoing, &mut sending) {
            self.spinning.note_sent(self.link.counters.outbox().has_awake_receiver());
            if !self.send_packet(&outgoing, &mut sending)? {
                return Ok(SendNow::Full);
            }
            sending.by_socket += 1;
            self.link.counters.own(Slot::Sent).store(sending.by_socket, Ordering::Release);
        }
        pending.commit();
        sending.messages += 1;
        sending.in_flight.push(bytes);
        sending.buffer = outgoing.packet;
        sending.tensors += tensors;
        kill_point!("sender:channel-sent");
        Ok(SendNow::Sent)
    }

    /// Returns whether a message may be sent. If not, the peer sends a wake-up when it has received enough messages.
    fn has_room(&self, sending: &mut SendState, bytes: u64) -> bool {
        let Some(needed) = self.room_at(sending, bytes) else { return true };
        self.ask_for_room(sending, needed);
        self.room_at(sending, bytes).is_none()
    }

    /// Returns the number of received messages at which a message may be sent. `None` if it may be sent now.
    fn room_at(&self, sending: &mut SendState, bytes: u64) -> Option<u64> {
        sending.in_flight.acknowledge(self.link.counters.room().received());
        let needed = sending.in_flight.room_at(bytes);
        if needed.is_some() || !sending.is_socket_full {
            return needed;
        }
        let writable = socket::wait_until(self.link.messages.fd(), PollFlags::OUT, clock::now());
        sending.is_socket_full = !writable.unwrap_or(true);
        sending.is_socket_full.then(|| sending.in_flight.received() + 1)
    }

    /// Asks the peer for a wake-up when it has received this number of messages.
    fn ask_for_room(&self, sending: &mut SendState, needed: u64) {
        for _ in 0..MAX_WAKES_READ {
            if !matches!(socket::receive(self.link.wakes.fd(), &mut sending.wakes), Ok(Some(_))) {
                break;
            }
        }
        // Another thread may wait for fewer messages.
        let (room, received) = (self.link.counters.room(), sending.in_flight.received());
        let asked = room.wanted();
        room.ask(if asked > received { asked.min(needed) } else { needed });
        if let Some(relay) = self.relay.as_ref().filter(|_| sending.is_socket_full) {
            // A relay takes packets out of the socket before the peer receives them.
            relay.ask_for_socket();
        }
    }

    /// Waits until the peer may have received enough messages, or the channel has ended.
    fn wait_for_room(&self, deadline: Deadline) -> Result<()> {
        let (room, begin) = (self.link.counters.room(), clock::now());
        let wanted = room.wanted();
        while self.spinning.is_permitted() && clock::elapsed(begin) < SPIN {
            if room.received() >= wanted {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let until = deadline.at.min(begin + LONGEST_WAIT);
        let waited = socket::wait_until(self.sender_descriptor()?, PollFlags::IN, until);
        waited.map(drop).map_err(|error| Error::io("waiting for the peer of the channel", error))
    }

    /// Puts the message into the peer's inbox. Returns `false` if it must be sent by the socket.
    fn put(&self, outgoing: &OutgoingPacket, sending: &mut SendState) -> bool {
        let Some(message) = outgoing.message() else { return false };
        let number = sending.messages + 1;
        let put = self.link.counters.outbox().put(sending.last_put, number, message);
        if put == PutResult::Refused {
            return false;
        }
        sending.last_put = number;
        // If the socket is full, its packets wake the receiver.
        if put == PutResult::Unnoticed
            && let Ok(look) = OutgoingPacket::look()
        {
            let _ = socket::send(self.link.messages.fd(), &look.packet, &[]);
        }
        true
    }

    /// Sends the packet. Returns `false` if the socket is full.
    fn send_packet(&self, outgoing: &OutgoingPacket, sending: &mut SendState) -> Result<bool> {
        let file = outgoing.file.as_ref().map(AsFd::as_fd);
        let mut has_asked = false;
        loop {
            // A closed peer reads no packets, although its socket may still be open.
            self.check()?;
            match socket::send(self.link.messages.fd(), &outgoing.packet, file.as_slice()) {
                Ok(()) => {
                    sending.is_socket_full = false;
                    return Ok(true);
                }
                // The peer has closed its socket with unread packets. The next attempt returns the reason.
                Err(Errno::CONNRESET) => {}
                Err(Errno::AGAIN) if has_asked => return Ok(false),
                Err(Errno::AGAIN) => {
                    sending.is_socket_full = true;
                    self.ask_for_room(sending, sending.in_flight.received() + 1);
                    has_asked = true;
                }
                Err(Errno::PIPE | Errno::NOTCONN | Errno::CONNREFUSED) => {
                    return Err(self.close_reason(Direction::Sending));
                }
                Err(error) => return Err(Error::io("sending a message", error)),
            }
        }
    }

    /// Hands a file over to the peer, a process of this machine.
    pub(super) fn send_file(&self, file: BorrowedFd<'_>) -> Result<()> {
        self.runtime.check()?;
        self.check()?;
        let failed = |error| Error::io("handing a file over", error);
        if self.relay.is_some() {
            return Err(failed(Errno::OPNOTSUPP));
        }
        socket::send(self.link.messages.fd(), &OutgoingPacket::handed_over()?.packet, &[file]).map_err(failed)
    }

    fn not_received(&self, deadline: Deadline) -> Error {
        let state = match self.sending.try_lock() {
            Some(sending) => {
                let (in_flight, limits) = (&sending.in_flight, sending.in_flight.limits());
                format!(
                    " {} messages with {} B, which are in flight (limits: {} messages, {} B)",
                    in_flight.messages(),
                    in_flight.bytes(),
                    limits.messages,
                    limits.bytes
                )
            }
            None => " the messages in flight".into(),
        };
        let detail = format!("; {} has not received{state}. Nothing of the message has been sent", self.peer);
        deadline.passed("the sending of a message", &detail)
    }

    /// Checks that the map names the home devices of all memory; the receiver could not open other memory.
    fn check_devices(&self, message: &Message<'_>, reply: bool) -> Result<()> {
        let map = if reply { &self.maps.replying } else { &self.maps.outgoing };
        let Some(map) = map else { return Ok(()) };
        for part in &message.parts {
            // Memory of the receiver itself opens on its home device there.
            let descriptor = part.descriptor();
            if *descriptor.exporter() == self.peer.process {
                continue;
            }
            if let Some(home) = descriptor.homes().find(|home| map.get(*home).is_none()) {
                return Err(Error::NotInDeviceMap { home, peer: Some(self.peer.to_string()) });
            }
        }
        Ok(())
    }

    fn items<'a>(&self, message: &'a Message<'a>, pending: &mut PendingGrants<'_>) -> Result<Vec<Item<'a>>> {
        let size = message.parts.len();
        if size > MAX_MESSAGE_TENSORS {
            let (size, limit) = (size as u64, MAX_MESSAGE_TENSORS as u64);
            return Err(Error::MessageTooLarge { of: "tensors", size, limit });
        }
        let items =
            message.parts.iter().map(|part| pending.item(part, &self.peer.bearer)).collect::<Result<_>>()?;
        // If the peer has terminated meanwhile, its grants have ended already, and the new ones would stay.
        self.check()?;
        Ok(items)
    }

    /// Makes the streams signal in order, and returns the value that the receiver waits for.
    fn signal_ready(&self, message: &Message<'_>, sending: &mut SendState) -> Result<u64> {
        let before = sending.signalled;
        for stream in &message.ready {
            self.signal_ready_on(*stream, sending)?;
        }
        Ok(if sending.signalled > before { sending.signalled } else { 0 })
    }

    fn signal_ready_on(&self, stream: BorrowedStream<'_>, sending: &mut SendState) -> Result<()> {
        let backend = self.ipc.backend();
        check_backend("the stream", stream.backend(), backend.info().name)?;
        if self.relay.is_some() || !self.signals.are_supported_by(stream) {
            return backend.memory().synchronize(stream);
        }
        let signalled = self.signals.signal(sending.signalled + 1, stream);
        signalled.map_err(|error| self.check().err().unwrap_or(error))?;
        sending.signalled += 1;
        Ok(())
    }
}
