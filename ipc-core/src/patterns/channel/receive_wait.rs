//! The waits of a receiver: it spins, then sleeps at the socket, or an event loop waits for its descriptor.

use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::connection::{ChannelConnection, LONGEST_RECEIVE};
use super::counters::{Direction, Slot};
use super::progress::ReceiveState;
use crate::model::error::{Error, Result};
use crate::os::clock;
use crate::os::kill::kill_point;
use crate::transport::Deadline;
use crate::transport::socket;

/// The number of polls of a spinning receiver between two reads of the clock.
const POLLS_PER_CLOCK_READ: u32 = 16;

impl ChannelConnection {
    /// Returns the descriptor that is readable when a receive call has a result.
    pub(super) fn receiver_descriptor(&self) -> Result<BorrowedFd<'_>> {
        let descriptor = self.descriptors.receiver(self.link.messages.fd())?;
        if self.descriptors.begin_use_of_receiver() {
            self.report_readiness();
        }
        Ok(descriptor)
    }

    /// Makes the receiver's descriptor readable if a receive call has a result that the socket does not show, and else unreadable.
    ///
    /// While the descriptor is in use, this end is asleep between receive calls, so that every message comes by the socket.
    pub(super) fn report_readiness(&self) {
        if !self.descriptors.has_receiver() {
            return;
        }
        // A thread that holds the lock reports when it has released the lock.
        let Some(receiving) = self.receiving.try_lock() else { return };
        let is_asleep = self.link.counters.inbox().fall_asleep(receiving.taken + 1);
        self.descriptors.set_receiver(!is_asleep || receiving.has_packet());
    }

    /// Marks this end as awake, unless an event loop waits for its descriptor.
    fn wake_up(&self) {
        if !self.descriptors.has_receiver() {
            self.link.counters.inbox().wake_up();
        }
    }

    /// Returns whether the shared words show an untaken message, or the channel has ended.
    ///
    /// The words are claims of the peer; [`sleep`](Self::sleep) queries the kernel.
    pub(super) fn has_sent(&self, receiving: &ReceiveState) -> bool {
        let counters = &self.link.counters;
        counters.inbox().has(receiving.taken + 1)
            || counters.peers(Slot::Sent).load(Ordering::Acquire) != receiving.by_socket
            || receiving.ended
            || self.has_gone()
            || self.is_violated()
            || counters.is_closed(Direction::Receiving)
    }

    /// Waits until a message is available or the connection has ended.
    pub(super) fn wait_for_message(&self, receiving: &mut ReceiveState, deadline: Deadline) -> Result<()> {
        // If the peer claims a message that has not arrived, spinning would not help.
        let spins = self.spinning.is_permitted() && receiving.pace.spins() && !self.has_sent(receiving);
        if !spins {
            receiving.pace.slept();
            return self.sleep(receiving, deadline);
        }
        let arrived = self.spin(receiving, self.spinning.take_limit(), deadline);
        receiving.pace.spun(arrived);
        if arrived { Ok(()) } else { self.sleep(receiving, deadline) }
    }

    /// Spins for at most `limit` and returns whether a message arrived. Reads the clock only after the first polls.
    fn spin(&self, receiving: &ReceiveState, limit: Duration, deadline: Deadline) -> bool {
        let mut until = None;
        loop {
            for _ in 0..POLLS_PER_CLOCK_READ {
                if self.has_sent(receiving) || self.link.counters.peer_has_finished() {
                    return true;
                }
                std::hint::spin_loop();
            }
            let now = clock::now();
            if now >= *until.get_or_insert_with(|| deadline.at.min(now + limit)) {
                return false;
            }
        }
    }

    /// Sleeps at the socket. Every later message wakes this end.
    fn sleep(&self, receiving: &mut ReceiveState, deadline: Deadline) -> Result<()> {
        kill_point!("receiver:channel-sleeping");
        let inbox = self.link.counters.inbox();
        if !inbox.fall_asleep(receiving.taken + 1) {
            return Ok(());
        }
        let slept = self.wait_at_socket(receiving, deadline);
        self.wake_up();
        slept
    }

    fn wait_at_socket(&self, receiving: &mut ReceiveState, deadline: Deadline) -> Result<()> {
        if receiving.early.is_none() && deadline.left() > LONGEST_RECEIVE {
            match socket::receive_asleep(self.link.messages.fd(), &mut receiving.buffer) {
                Ok(Some(packet)) => receiving.early = Some(packet),
                Err(Errno::MSGSIZE) => return Err(self.too_large()),
                // Any other result occurs again at the next receive.
                Ok(None) | Err(_) => receiving.polled = true,
            }
            return Ok(());
        }
        let waited = socket::wait_until(self.link.messages.fd(), PollFlags::IN, deadline.at);
        if !waited.map_err(|error| Error::io("waiting for the peer of the channel", error))? {
            return Err(self.timed_out(deadline));
        }
        // The peer stores the word after it sends the packet, or never.
        receiving.polled = true;
        Ok(())
    }

    pub(super) fn timed_out(&self, deadline: Deadline) -> Error {
        deadline.passed("the receipt of a message", &format!("; {} is still connected", self.peer))
    }
}
