//! Receiving, by the caller's thread.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::arrival::{Arrival, Place};
use super::connection::{Connection, LONGEST_RECEIVE, Slot};
use super::maps::{ResolvedMap, position};
use super::received::{Received, ReceivedExport};
use crate::model::device::DeviceIdentity;
use crate::model::error::{Error, Result};
use crate::os::kill::kill_point;
use crate::os::process::ProcessIdentity;
use crate::os::{Pace, SPIN};
use crate::sharing::Runtime;
use crate::sharing::import::HeldGrant;
use crate::sharing::timeline::TIMELINE_END;
use crate::transport::Deadline;
use crate::transport::socket::{self, Packet};
use crate::wire::Token;
use crate::wire::channel::{Head, Incoming, Item, Payload, read, read_message};
use crate::wire::descriptor::{Descriptor, NamedExport};

/// How long a receiver spins where the other end slept when it was sent to: that has to wake before it can answer.
const WAKING: Duration = Duration::from_micros(200);

/// So many packets that only wake are read though the time is over: a few may stand before a message.
const MOST_LOOKS: u32 = 64;

/// How long a channel that is dropped discards messages that were not received.
const DISCARDING: Duration = Duration::from_millis(500);

/// How often a spinning receiver looks at a word before it looks at the time.
const LOOKS: u32 = 16;

/// Whoever holds it receives.
#[derive(Debug, Default)]
pub(super) struct Receiving {
    buffer: Vec<u8>,
    messages: u64,
    /// Messages that have been taken, also those that could not be read.
    taken: u64,
    /// Packets of the socket that were messages.
    by_socket: u64,
    /// A packet that came while the message before it lay in the inbox, or while this end slept.
    early: Option<Packet>,
    pace: Pace,
    /// The kernel has said that there is something.
    polled: bool,
    /// The other end has said that nothing more comes, or its socket has.
    ended: bool,
}

/// How what a message brings may be opened.
struct At<'a> {
    runtime: &'a Runtime,
    map: Option<&'a ResolvedMap>,
    ready: u64,
}

impl Connection {
    /// The next message, waiting for one.
    pub(super) fn receive(self: &Arc<Self>, deadline: Deadline) -> Result<Received> {
        Runtime::get()?;
        self.owner.check()?;
        let receiving = self.receiving.enter(deadline);
        let mut receiving =
            receiving.ok_or_else(|| deadline.passed("the receiving of another thread", ""))?;
        let mut looks = 0;
        loop {
            // Looked at before the queue, which it speaks of.
            let closed = self.peer_has_closed();
            match self.next(&mut receiving, closed)? {
                Some(Incoming::End) => receiving.ended = true,
                // A peer that says nothing else does not keep this end busy for longer than it wants to wait.
                Some(Incoming::Look) if looks == MOST_LOOKS && deadline.left().is_zero() => {
                    return Err(self.nothing_came(deadline));
                }
                Some(Incoming::Look) => looks = MOST_LOOKS.min(looks + 1),
                Some(Incoming::Message { head, bytes }) => {
                    receiving.messages += 1;
                    let received = self.take(head, bytes)?;
                    self.own_word(Slot::Received).store(receiving.messages, Ordering::Release);
                    kill_point!("receiver:channel-received");
                    return Ok(received);
                }
                None if closed || receiving.ended => {
                    receiving.ended = true;
                    return Err(self.why_over());
                }
                None => self.wait_for_message(&mut receiving, deadline)?,
            }
        }
    }

    /// Has the other end sent what has not been taken, or is there something else to look for in the queue? It is only what
    /// that end says; [`sleep`](Self::sleep) asks the kernel.
    fn has_sent(&self, receiving: &Receiving) -> bool {
        self.inbox().has(receiving.taken + 1)
            || self.peers_word(Slot::Sent).load(Ordering::Acquire) != receiving.by_socket
            || receiving.ended
            || self.has_gone()
            || self.is_broken()
    }

    /// Waits until there is something to be taken, or the connection has ended.
    fn wait_for_message(&self, receiving: &mut Receiving, deadline: Deadline) -> Result<()> {
        // What has been said to be sent and is not there is nothing to spin for.
        let spins =
            self.may_spin.load(Ordering::Relaxed) && receiving.pace.spins() && !self.has_sent(receiving);
        if !spins {
            receiving.pace.slept();
            return self.sleep(receiving, deadline);
        }
        let patience = if self.has_woken.swap(false, Ordering::Relaxed) { WAKING } else { SPIN };
        let came = self.spin(receiving, patience, deadline);
        receiving.pace.spun(came);
        if came { Ok(()) } else { self.sleep(receiving, deadline) }
    }

    /// Looks again and again. False where nothing came in time; the clock is read when it has not come at once.
    fn spin(&self, receiving: &Receiving, patience: Duration, deadline: Deadline) -> bool {
        let mut until = None;
        loop {
            for _ in 0..LOOKS {
                if self.has_sent(receiving) || self.peer_has_closed() {
                    return true;
                }
                std::hint::spin_loop();
            }
            let now = Instant::now();
            if now >= *until.get_or_insert_with(|| deadline.at.min(now + patience)) {
                return false;
            }
        }
    }

    /// Sleeps at the socket: whoever sends from now on wakes it.
    fn sleep(&self, receiving: &mut Receiving, deadline: Deadline) -> Result<()> {
        kill_point!("receiver:channel-sleeping");
        let inbox = self.inbox();
        if !inbox.fall_asleep(receiving.taken + 1) {
            return Ok(());
        }
        let slept = self.wait_at_socket(receiving, deadline);
        inbox.wake_up();
        slept
    }

    fn wait_at_socket(&self, receiving: &mut Receiving, deadline: Deadline) -> Result<()> {
        if receiving.early.is_none() && deadline.left() > LONGEST_RECEIVE {
            match socket::receive_asleep(self.socket.fd(), &mut receiving.buffer) {
                Ok(Some(packet)) => receiving.early = Some(packet),
                Err(Errno::MSGSIZE) => return Err(self.too_large()),
                // Whatever else it is, it is met again.
                Ok(None) | Err(_) => receiving.polled = true,
            }
            return Ok(());
        }
        let waited = socket::wait_until(self.socket.fd(), PollFlags::IN, deadline.at);
        if !waited.map_err(|error| Error::io("waiting for the other end of the channel", error))? {
            return Err(self.nothing_came(deadline));
        }
        // The word may come a moment later, or not at all.
        receiving.polled = true;
        Ok(())
    }

    fn nothing_came(&self, deadline: Deadline) -> Error {
        let detail = format!("; process {} ({}) is still there", self.peer.pid, self.peer.program);
        deadline.passed("the receiving of a message", &detail)
    }

    /// The next message, or what else is said, if there is something: out of the inbox, or by the socket where there is a
    /// reason to look there, which is a system call.
    fn next(&self, receiving: &mut Receiving, closed: bool) -> Result<Option<Incoming>> {
        if self.is_broken() {
            return Err(self.why_over());
        }
        if let Some(message) = self.out_of_inbox(receiving)? {
            return Ok(Some(message));
        }
        let look = closed || std::mem::take(&mut receiving.polled) || receiving.early.is_some();
        if !look && !self.has_sent(receiving) {
            return Ok(None);
        }
        kill_point!("receiver:channel-looked");
        let packet = self.packet(receiving)?;
        // What came behind a message in the inbox, also the end: that was there before it.
        if let Some(message) = self.out_of_inbox(receiving)? {
            receiving.early = packet;
            return Ok(Some(message));
        }
        let Some(packet) = packet else { return Ok(None) };
        let read = read(packet.bytes, packet.fds, self.limit);
        if !matches!(read, Ok(Incoming::End | Incoming::Look)) {
            receiving.by_socket += 1;
            receiving.taken += 1;
        }
        self.accepted(read).map(Some)
    }

    /// The next message, if it lies in the inbox.
    fn out_of_inbox(&self, receiving: &mut Receiving) -> Result<Option<Incoming>> {
        let inbox = self.inbox();
        if !inbox.has(receiving.taken + 1) {
            return Ok(None);
        }
        receiving.taken += 1;
        let message = inbox.take(receiving.taken);
        let message = message.ok_or_else(|| Error::Protocol("its message is longer than an inbox".into()));
        self.accepted(message.and_then(read_message)).map(Some)
    }

    fn accepted(&self, read: Result<Incoming>) -> Result<Incoming> {
        match read {
            Err(Error::Protocol(how)) => Err(self.break_off(how)),
            read => read,
        }
    }

    /// The next packet of the socket, if there is one. Notes the end of the connection.
    fn packet(&self, receiving: &mut Receiving) -> Result<Option<Packet>> {
        if let Some(packet) = receiving.early.take() {
            return Ok(Some(packet));
        }
        if receiving.ended {
            return Ok(None);
        }
        loop {
            match socket::receive(self.socket.fd(), &mut receiving.buffer) {
                Ok(Some(packet)) => return Ok(Some(packet)),
                // The other end has gone with something unread. What it had sent is still there.
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

    fn too_large(&self) -> Error {
        self.break_off("its packet is larger than packets are".into())
    }

    fn take(self: &Arc<Self>, head: Head<'_>, bytes: Payload) -> Result<Received> {
        let runtime = Runtime::get()?;
        if head.ready >= TIMELINE_END {
            return Err(self.break_off("its message waits for a value that no word has".into()));
        }
        for (export, token) in head.ended {
            runtime.exports.end_grant(export, token);
        }
        let map = if head.reply { &self.maps.replied } else { &self.maps.incoming };
        let mut received = Received::new(Arc::clone(self), bytes, head.ready);
        let at = At { runtime, map: map.as_ref(), ready: head.ready };
        for Item { descriptor, grants } in head.items {
            received.exports.push(self.export(&at, descriptor.0.into_owned(), &grants.0)?);
        }
        received.put_named_last();
        Ok(received)
    }

    fn export(
        self: &Arc<Self>,
        at: &At<'_>,
        descriptor: Descriptor,
        grants: &[Token],
    ) -> Result<ReceivedExport> {
        let contents = descriptor.contents();
        if !grants.is_empty() {
            self.check_granted(&contents.exporter)?;
            if grants.len() != contents.parts.len() {
                return Err(self.break_off("its message grants other than all of an export".into()));
            }
        }
        let held = grants.iter().enumerate().map(|(part, token)| self.held(&contents.named(part), *token));
        let held = held.collect();
        let places = descriptor.homes().map(|home| self.place(at, &contents.exporter, home)).collect();
        Ok(ReceivedExport::new(Arrival::new(self, at.ready), descriptor, held, places))
    }

    /// A token shown to a process that does not know it counts as a guess there.
    fn check_granted(&self, exporter: &ProcessIdentity) -> Result<()> {
        if *exporter == self.peer.process {
            return Ok(());
        }
        Err(self.break_off("its message grants what another process shares".into()))
    }

    fn held(&self, named: &NamedExport<'_>, token: Token) -> HeldGrant {
        HeldGrant::new(named, token, self.id, self.ipc.allow_list().clone())
    }

    fn place(&self, at: &At<'_>, exporter: &ProcessIdentity, home: DeviceIdentity) -> Place {
        match at.map {
            None => Place::Anywhere,
            // One's own memory is at home.
            Some(_) if *exporter == at.runtime.identity => Place::Anywhere,
            Some(map) => {
                let device = map.get(home).and_then(|device| position(&self.devices, device));
                device.map_or(Place::Nowhere, Place::On)
            }
        }
    }

    /// Discards messages that no caller will receive, so that their grants go back now, and not when the connection goes. Not for
    /// ever: the other end may go on to send.
    pub(super) fn discard_unread(self: &Arc<Self>) {
        let Some(mut receiving) = self.receiving.try_enter() else { return };
        let until = Instant::now() + DISCARDING;
        while let Ok(Some(incoming)) = self.next(&mut receiving, true) {
            match incoming {
                Incoming::Message { head, bytes } => drop(self.take(head, bytes)),
                Incoming::Look => {}
                Incoming::End => return,
            }
            if Instant::now() >= until {
                return;
            }
        }
    }
}
