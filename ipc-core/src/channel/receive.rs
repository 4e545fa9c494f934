//! Receiving, by the caller's thread.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::connection::{Connection, Slot};
use super::maps::{ResolvedMap, position};
use super::received::{Place, Received, ReceivedTensor};
use super::wire::{Head, Incoming, Item, Payload, read};
use crate::broker::{Deadline, socket};
use crate::descriptor::Descriptor;
use crate::error::{Error, Result};
use crate::import::HeldGrant;
use crate::kill::kill_point;
use crate::runtime::Runtime;
use crate::timeline::TIMELINE_END;

/// Whoever holds it receives.
#[derive(Debug, Default)]
pub(super) struct Receiving {
    buffer: Vec<u8>,
    messages: u64,
    /// The other end has said that nothing more comes, or its socket has.
    ended: bool,
}

impl Connection {
    /// The next message, waiting for one.
    pub(super) fn receive(self: &Arc<Self>, deadline: Deadline) -> Result<Received> {
        Runtime::get()?;
        self.owner.check()?;
        let receiving = self.receiving.enter(deadline);
        let mut receiving =
            receiving.ok_or_else(|| deadline.passed("the receiving of another thread", ""))?;
        loop {
            // Looked at before the queue, which it speaks of.
            let closed = self.peer_has_closed();
            match self.next(&mut receiving)? {
                Some(Incoming::End) => receiving.ended = true,
                Some(Incoming::Message { head, bytes }) => {
                    receiving.messages += 1;
                    let received = self.take(head, bytes)?;
                    self.own_word(Slot::Received).store(receiving.messages, Ordering::Release);
                    kill_point!("receiver:received");
                    return Ok(received);
                }
                None if closed || receiving.ended => {
                    receiving.ended = true;
                    return Err(self.why_over());
                }
                None => {
                    let waited = socket::wait_until(self.socket.fd(), PollFlags::IN, deadline.at);
                    if !waited
                        .map_err(|error| Error::io("waiting for the other end of the channel", error))?
                    {
                        let detail =
                            format!("; process {} ({}) is still there", self.peer.pid, self.peer.program);
                        return Err(deadline.passed("the receiving of a message", &detail));
                    }
                }
            }
        }
    }

    /// The next packet, if there is one. Notes the end of the connection.
    fn next(&self, receiving: &mut Receiving) -> Result<Option<Incoming>> {
        if self.is_broken() {
            return Err(self.why_over());
        }
        if receiving.ended {
            return Ok(None);
        }
        loop {
            match socket::receive(self.socket.fd(), &mut receiving.buffer) {
                Ok(Some(packet)) => {
                    return match read(packet.bytes, packet.fds, self.limit) {
                        Err(Error::Protocol(how)) => Err(self.break_off(how)),
                        read => read.map(Some),
                    };
                }
                // The other end has gone with something unread. What it had sent is still there.
                Err(Errno::CONNRESET) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::MSGSIZE) => {
                    return Err(self.break_off("its packet is larger than packets are".into()));
                }
                Ok(None) => {
                    receiving.ended = true;
                    return Ok(None);
                }
                Err(error) => return Err(Error::io("receiving a message", error)),
            }
        }
    }

    fn take(self: &Arc<Self>, head: Head, bytes: Payload) -> Result<Received> {
        let runtime = Runtime::get()?;
        if head.ready >= TIMELINE_END {
            return Err(self.break_off("its message waits for a value that no word has".into()));
        }
        for (export, token) in head.ended {
            runtime.exports.end_grant(export, token);
        }
        let map = if head.reply {
            self.maps.outgoing.as_ref().map(ResolvedMap::inverse)
        } else {
            self.maps.incoming.clone()
        };
        let mut tensors = Vec::with_capacity(head.items.len());
        for item in head.items {
            let Item::Tensor { descriptor, grant } = item;
            let descriptor = descriptor.0;
            // A token shown to a process that does not know it counts as a guess there.
            if grant.is_some() && descriptor.exporter != self.peer.process {
                return Err(self.break_off("its message grants what another process shares".into()));
            }
            let held = grant.map(|token| {
                HeldGrant::new(&descriptor.named(), token, self.id, self.ipc.allow_list().clone())
            });
            let place = self.place(runtime, map.as_ref(), &descriptor);
            tensors.push(ReceivedTensor::new(Arc::clone(self), descriptor, held, head.ready, place));
        }
        Ok(Received::new(Arc::clone(self), bytes, tensors, head.ready))
    }

    fn place(&self, runtime: &Runtime, map: Option<&ResolvedMap>, descriptor: &Descriptor) -> Place {
        match map {
            None => Place::Anywhere,
            // One's own memory is at home.
            Some(_) if descriptor.exporter == runtime.identity => Place::Anywhere,
            Some(map) => {
                let device = map.get(descriptor.home()).and_then(|device| position(&self.devices, device));
                device.map_or(Place::Nowhere, Place::On)
            }
        }
    }

    /// Discards what nobody will receive; its grants go back.
    pub(super) fn discard_unread(self: &Arc<Self>) {
        let Some(mut receiving) = self.receiving.try_enter() else { return };
        while let Ok(Some(incoming)) = self.next(&mut receiving) {
            match incoming {
                Incoming::Message { head, bytes } => drop(self.take(head, bytes)),
                Incoming::End => return,
            }
        }
    }
}
