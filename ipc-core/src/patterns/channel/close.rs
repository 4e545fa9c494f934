//! Closing, of one direction or both.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::net::Shutdown;

use super::connection::ChannelConnection;
use super::counters::{BOTH, Direction, Slot};
use super::relay_handle::CLOSING;
use crate::model::error::{Error, Result};
use crate::os::kill::kill_point;
use crate::os::{clock, wait_for_words};
use crate::sharing::Runtime;
use crate::transport::socket::{self, ReceivedFds};
use crate::transport::{Deadline, check_may_wait};
use crate::wire::channel::{IncomingPacket, OutgoingPacket};

/// Maximum time for which a dropped channel discards unreceived messages.
const DISCARD_TIMEOUT: Duration = Duration::from_millis(500);

impl ChannelConnection {
    /// Waits until the peer has received every message, and opened or discarded every tensor in them.
    fn wait_settled(&self, deadline: Deadline) -> Result<()> {
        let runtime = self.runtime.check()?;
        let sending = self.sending.lock(deadline);
        let sending = sending.ok_or_else(|| deadline.passed("the send call of another thread", ""))?;
        let taken = || {
            let [received, settled] =
                [Slot::Received, Slot::Settled].map(|slot| self.link.counters.peers(slot));
            (received.load(Ordering::Acquire), settled.load(Ordering::Acquire))
        };
        let holds = || {
            let state = self.check();
            let (received, settled) = taken();
            // A peer that has closed its end may still open received memory while its process lives.
            let may_settle =
                received >= sending.messages && matches!(state, Err(Error::ChannelClosed { .. }));
            match state {
                _ if received >= sending.messages && settled >= sending.tensors => Ok(true),
                Err(error) if !may_settle || self.has_gone() => Err(error),
                _ => Ok(false),
            }
        };
        wait_for_words(deadline.left(), holds, || {
            let (received, settled) = taken();
            let detail = format!(
                "; {} has received {received} of {} messages, and opened or discarded {settled} of {} tensors",
                self.peer, sending.messages, sending.tensors
            );
            deadline.passed("the receipt of the sent messages", &detail)
        })?;
        // Each grant is a lease or has ended by now.
        runtime.exports.end_grants_of(self.id());
        Ok(())
    }

    /// Closes both directions after the peer has received every message, or after the timeout.
    pub(super) fn close_after(self: &Arc<Self>, timeout: Duration) -> Result<()> {
        check_may_wait("closing a channel", timeout)?;
        self.runtime.check()?;
        if self.link.counters.is_closed_both_ways() {
            return Ok(());
        }
        let deadline = Deadline::after(timeout);
        let settled = self.wait_settled(deadline);
        self.close_directions(BOTH, deadline.left().min(CLOSING));
        settled
    }

    /// Closes directions.
    pub(super) fn close(self: &Arc<Self>, directions: u64) {
        self.close_directions(directions, CLOSING);
    }

    /// Closes directions. Waits for at most `wait` until a process of another host knows it, so that this process may exit.
    fn close_directions(self: &Arc<Self>, directions: u64, wait: Duration) {
        let Some(runtime) = self.runtime.here() else { return };
        let closed = self.link.counters.mark_closed(directions);
        if closed & Direction::Receiving as u64 != 0 {
            kill_point!("closer:channel-ending");
            self.finish_receiving();
        }
        if closed & Direction::Sending as u64 != 0 {
            self.finish_sending(runtime);
        }
        if closed != 0
            && let Some(relay) = &self.relay
        {
            relay.wake();
            relay.wait_seen(closed, wait);
        }
    }

    /// Notifies the peer that this end sends no further messages. Wakes the send calls of this process.
    fn finish_sending(self: &Arc<Self>, runtime: &Runtime) {
        self.descriptors.wake_senders();
        // Wakes a waiting peer. If the socket is full, the peer has packets to read, and polls the word before it waits.
        if let Ok(end) = OutgoingPacket::end() {
            let _ = socket::send(self.link.messages.fd(), &end.packet, &[]);
        }
        kill_point!("closer:channel-ended");
        if let Some(order) = self.signals.unfinished() {
            runtime.poller.keep_until_arrived(Arc::clone(order), Arc::clone(self) as _);
        }
        if !self.has_gone() {
            runtime.exports.keep_while_granted(self.id(), Arc::clone(self) as _);
        }
    }

    /// Receives no further messages, and discards the ones that have arrived. Wakes the receive calls of this process and the
    /// send calls of the peer.
    fn finish_receiving(self: &Arc<Self>) {
        let _ = rustix::net::shutdown(self.link.messages.fd(), Shutdown::Read);
        self.link.wake_peers_sender();
        self.discard_unread();
        self.report_readiness();
    }

    /// Discards unreceived messages, so that their grants end now and not when the connection ends.
    ///
    /// The time is limited, because the peer may continue to send.
    fn discard_unread(self: &Arc<Self>) {
        // A receive call of another thread returns when the direction is closed.
        let Some(mut receiving) = self.receiving.lock(Deadline::after(DISCARD_TIMEOUT)) else { return };
        let until = clock::now() + DISCARD_TIMEOUT;
        while let Ok(Some(incoming)) = self.next(&mut receiving, true) {
            match incoming {
                IncomingPacket::Message { head, bytes } => drop(self.take(head, bytes)),
                IncomingPacket::Look => {}
                IncomingPacket::File(file) => drop(file.into_iter().collect::<ReceivedFds>()),
                IncomingPacket::End => break,
            }
            if clock::now() >= until {
                return;
            }
        }
    }
}
