//! Sending: everything that can fail is done before the packet goes, and taken back where it does not.

use std::borrow::Cow;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::connection::{Connection, Slot, wait_until};
use super::inbox::Put;
use super::message::{Message, Part};
use crate::backend::stream::BorrowedStream;
use crate::model::error::{Error, Result};
use crate::model::one_or_many::OneOrMany;
use crate::os::kill::kill_point;
use crate::sharing::Runtime;
use crate::sharing::export::{Bearer, check_backend};
use crate::sharing::timeline::timelines_of;
use crate::transport::{Deadline, socket};
use crate::wire::Token;
use crate::wire::channel::MAX_MESSAGE_TENSORS;
use crate::wire::channel::{DescriptorBytes, Grants, Head, Item, Outgoing};
use crate::wire::descriptor::ExportId;

/// What has been sent. Whoever holds it sends.
#[derive(Debug, Default)]
pub(super) struct Sending {
    messages: u64,
    /// Those of them that went by the socket, and the number of the last that did not.
    by_socket: u64,
    last_put: u64,
    tensors: u64,
    /// The last value of the own counter that was submitted to a stream.
    signalled: u64,
    /// What the last packet was written in.
    buffer: Vec<u8>,
}

/// What ends where a message is not sent.
struct Unsent<'a> {
    runtime: &'static Runtime,
    connection: &'a Connection,
    grants: Vec<(ExportId, Token)>,
    ended: Vec<(ExportId, Token)>,
}

impl Unsent<'_> {
    fn has_been_sent(&mut self) {
        self.grants.clear();
        self.ended.clear();
    }

    /// A part of the message, with its grants.
    fn item<'p>(&mut self, part: &Part<'p>, bearer: &Bearer) -> Result<Item<'p>> {
        let descriptor = part.descriptor();
        let grants = match part {
            Part::Export(_) => {
                descriptor.exports().map(|export| self.grant(export, bearer)).collect::<Result<_>>()?
            }
            Part::Descriptor(_) => OneOrMany::NONE,
        };
        Ok(Item { descriptor: DescriptorBytes(Cow::Borrowed(descriptor)), grants: Grants(grants) })
    }

    fn grant(&mut self, export: ExportId, bearer: &Bearer) -> Result<Token> {
        let token = self.runtime.exports.begin_grant(export, bearer)?;
        self.grants.push((export, token));
        Ok(token)
    }
}

impl Drop for Unsent<'_> {
    fn drop(&mut self) {
        for (export, token) in self.grants.drain(..) {
            self.runtime.exports.end_grant(export, token);
        }
        let (peer, channel) = (&self.connection.peer.process, self.connection.id);
        self.runtime.imports.put_back_ended(peer, channel, std::mem::take(&mut self.ended));
    }
}

impl Connection {
    /// Sends a message, waiting for a receiver that does not read.
    pub(super) fn send(&self, message: &Message<'_>, reply: bool, deadline: Deadline) -> Result<()> {
        let runtime = Runtime::get()?;
        self.owner.check()?;
        let sending = self.sending.enter(deadline);
        let mut sending = sending.ok_or_else(|| deadline.passed("the sending of another thread", ""))?;
        self.check()?;
        self.check_devices(message, reply)?;
        let mut unsent = Unsent { runtime, connection: self, grants: Vec::new(), ended: Vec::new() };
        let items = self.items(message, &mut unsent)?;
        kill_point!("sender:channel-granted");
        let ready = self.signal_ready(message, &mut sending)?;
        kill_point!("sender:channel-signalled");
        unsent.ended = runtime.imports.take_ended(&self.peer.process, self.id);
        let ended = unsent.ended.iter().take(crate::wire::channel::MAX_ENDED_GRANTS).copied().collect();
        // Those beyond are few, and told another time.
        let later = unsent.ended.split_off(unsent.ended.len().min(crate::wire::channel::MAX_ENDED_GRANTS));
        runtime.imports.put_back_ended(&self.peer.process, self.id, later);
        let tensors = items.len() as u64;
        let (head, buffer) = (Head { reply, ready, ended, items }, std::mem::take(&mut sending.buffer));
        let outgoing = Outgoing::of(&head, message.payload(), self.limit, buffer)?;
        // An end that has been closed takes nothing more, though its inbox may be empty.
        self.check()?;
        if !self.put(&outgoing, &mut sending) {
            self.has_woken.store(!self.outbox().has_awake_owner(), Ordering::Relaxed);
            self.send_packet(&outgoing, deadline)?;
            sending.by_socket += 1;
            self.own_word(Slot::Sent).store(sending.by_socket, Ordering::Release);
        }
        unsent.has_been_sent();
        sending.messages += 1;
        sending.buffer = outgoing.packet;
        sending.tensors += tensors;
        kill_point!("sender:channel-sent");
        Ok(())
    }

    /// Puts the message into the other end's inbox. False where it has to go by the socket.
    fn put(&self, outgoing: &Outgoing, sending: &mut Sending) -> bool {
        let Some(message) = outgoing.message() else { return false };
        let numbers = (sending.last_put, sending.messages + 1);
        let put = self.outbox().put(numbers, message);
        if put == Put::Refused {
            return false;
        }
        sending.last_put = numbers.1;
        // Where there is no room for this the receiver has something to wake it.
        if put == Put::Unseen
            && let Ok(look) = Outgoing::look()
        {
            let _ = socket::send(self.socket.fd(), &look.packet, &[]);
        }
        true
    }

    fn send_packet(&self, outgoing: &Outgoing, deadline: Deadline) -> Result<()> {
        let file = outgoing.file.as_ref().map(AsFd::as_fd);
        loop {
            // An end that has been closed reads nothing more, though its socket may still be there.
            self.check()?;
            match socket::send(self.socket.fd(), &outgoing.packet, file.as_slice()) {
                Ok(()) => return Ok(()),
                // The other end has gone with something unread: what it is has to be asked a second time.
                Err(Errno::CONNRESET) => {}
                Err(Errno::AGAIN) => {
                    let waited = socket::wait_until(self.socket.fd(), PollFlags::OUT, deadline.at);
                    if !waited
                        .map_err(|error| Error::io("waiting for the other end of the channel", error))?
                    {
                        return Err(self.does_not_read(deadline));
                    }
                }
                Err(Errno::PIPE | Errno::NOTCONN | Errno::CONNREFUSED) => return Err(self.why_over()),
                Err(error) => return Err(Error::io("sending a message", error)),
            }
        }
    }

    fn does_not_read(&self, deadline: Deadline) -> Error {
        let detail = format!(
            "; process {} ({}) does not read, and its queue is full. Nothing of the message has been sent",
            self.peer.pid, self.peer.program
        );
        deadline.passed("the sending of a message", &detail)
    }

    /// Memory on a device that the map does not name is no use to the receiver.
    fn check_devices(&self, message: &Message<'_>, reply: bool) -> Result<()> {
        let map = if reply { &self.maps.replying } else { &self.maps.outgoing };
        let Some(map) = map else { return Ok(()) };
        for part in &message.parts {
            // What the receiver shares itself is at home there.
            let descriptor = part.descriptor();
            if *descriptor.exporter() == self.peer.process {
                continue;
            }
            if let Some(home) = descriptor.homes().find(|home| map.get(*home).is_none()) {
                let peer = format!("process {} ({})", self.peer.pid, self.peer.program);
                return Err(Error::NotInDeviceMap { home, peer: Some(peer) });
            }
        }
        Ok(())
    }

    fn items<'a>(&self, message: &Message<'a>, unsent: &mut Unsent<'_>) -> Result<Vec<Item<'a>>> {
        let size = message.parts.len();
        if size > MAX_MESSAGE_TENSORS {
            let (size, limit) = (size as u64, MAX_MESSAGE_TENSORS as u64);
            return Err(Error::MessageTooLarge { of: "tensors", size, limit });
        }
        let items =
            message.parts.iter().map(|part| unsent.item(part, &self.bearer)).collect::<Result<_>>()?;
        // It may have gone in between, and its grants have ended: these would stay.
        self.check()?;
        Ok(items)
    }

    /// Has the streams signal, one after the other; the value that the receiver waits for.
    fn signal_ready(&self, message: &Message<'_>, sending: &mut Sending) -> Result<u64> {
        let before = sending.signalled;
        for stream in &message.ready {
            self.signal_ready_on(*stream, sending)?;
        }
        Ok(if sending.signalled > before { sending.signalled } else { 0 })
    }

    fn signal_ready_on(&self, stream: BorrowedStream<'_>, sending: &mut Sending) -> Result<()> {
        let backend = self.ipc.backend();
        check_backend("the stream", stream.backend(), backend.info().name)?;
        if timelines_of(&**backend, stream.device()).is_err() {
            return backend.memory().synchronize(stream);
        }
        let order = self.order()?;
        let signalled = self.words().signal_in_turn(sending.signalled + 1, stream, order);
        signalled.map_err(|error| self.check().err().unwrap_or(error))?;
        sending.signalled += 1;
        Ok(())
    }

    /// Waits until the other end has received every message, and opened or discarded every tensor of them.
    pub(super) fn wait_taken(&self, deadline: Deadline) -> Result<()> {
        self.owner.check()?;
        let sending = self.sending.enter(deadline);
        let sending = sending.ok_or_else(|| deadline.passed("the sending of another thread", ""))?;
        let taken = || {
            let [received, settled] = [Slot::Received, Slot::Settled].map(|slot| self.peers_word(slot));
            (received.load(Ordering::Acquire), settled.load(Ordering::Acquire))
        };
        let holds = || {
            let over = self.check();
            let (received, settled) = taken();
            // What it has received it may open also after it has closed its end, as long as it lives.
            let goes_on = received >= sending.messages && matches!(over, Err(Error::ChannelClosed { .. }));
            match over {
                _ if received >= sending.messages && settled >= sending.tensors => Ok(true),
                Err(error) if !goes_on || self.has_gone() => Err(error),
                _ => Ok(false),
            }
        };
        wait_until(deadline, holds, || {
            let (received, settled) = taken();
            let detail = format!(
                "; process {} ({}) has received {received} of {} messages, and opened or discarded {settled} of {} tensors",
                self.peer.pid, self.peer.program, sending.messages, sending.tensors
            );
            deadline.passed("the receiving of what was sent", &detail)
        })?;
        // Each of them is a lease by now, or has gone back.
        Runtime::get()?.exports.end_grants_of(self.id);
        Ok(())
    }

    /// Tells the other end that nothing more comes, and that nobody reads any longer.
    pub(super) fn close(self: &Arc<Self>) {
        let Some(runtime) = Runtime::of_guard(&self.owner) else { return };
        self.own_word(Slot::Closed).store(1, Ordering::Release);
        kill_point!("closer:channel-ending");
        self.discard_unread();
        // Wakes an end that waits. Where there is no room it has something to read, and looks at the word before it waits.
        if let Ok(end) = Outgoing::end() {
            let _ = socket::send(self.socket.fd(), &end.packet, &[]);
        }
        kill_point!("closer:channel-ended");
        if let Some(order) = self.order.get().filter(|order| !order.has_arrived()) {
            runtime.poller.keep_until_arrived(Arc::clone(order), Arc::clone(self) as _);
        }
        if !self.has_gone() {
            runtime.exports.keep_while_granted(self.id, Arc::clone(self) as _);
        }
    }
}
