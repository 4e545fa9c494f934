//! Limits of the messages that one end has sent and the peer has not received.

use std::collections::VecDeque;

/// Default maximum number of messages in flight.
const DEFAULT_MESSAGES_IN_FLIGHT: u64 = 128;

/// Default maximum number of bytes in flight.
const DEFAULT_BYTES_IN_FLIGHT: u64 = 256 * 1024 * 1024;

/// The limits of one end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) messages: u64,
    pub(super) bytes: u64,
}

impl Limits {
    pub(super) const DEFAULT: Self =
        Self { messages: DEFAULT_MESSAGES_IN_FLIGHT, bytes: DEFAULT_BYTES_IN_FLIGHT };
}

/// The messages in flight, within limits.
#[derive(Debug)]
pub(super) struct MessagesInFlight {
    limits: Limits,
    /// The number of messages that were received.
    received: u64,
    /// The bytes of each later message, in the order of sending.
    sizes: VecDeque<u64>,
    bytes: u64,
}

impl MessagesInFlight {
    pub(super) const fn new(limits: Limits) -> Self {
        Self { limits, received: 0, sizes: VecDeque::new(), bytes: 0 }
    }

    pub(super) const fn limits(&self) -> Limits {
        self.limits
    }

    /// Adds a message that was sent.
    pub(super) fn push(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.sizes.push_back(bytes);
    }

    /// Removes the messages that the peer claims to have received, at most all of them.
    ///
    /// A peer that claims too much, or decreases its counter, changes the count of its own messages and nothing else.
    pub(super) fn acknowledge(&mut self, received: u64) {
        while self.received < received
            && let Some(bytes) = self.sizes.pop_front()
        {
            self.received += 1;
            self.bytes = self.bytes.saturating_sub(bytes);
        }
    }

    /// Returns the number of received messages at which a message of `bytes` bytes may be sent. `None` if it may be sent now.
    ///
    /// A message that exceeds the limit of bytes may be sent when no other message is in flight.
    pub(super) fn room_at(&self, bytes: u64) -> Option<u64> {
        let limits = self.limits;
        let excess = (self.messages() + 1).saturating_sub(limits.messages.max(1)).min(self.messages());
        let mut left = self.bytes;
        let mut needed = 0;
        for size in &self.sizes {
            if needed >= excess && left.saturating_add(bytes) <= limits.bytes {
                break;
            }
            needed += 1;
            left = left.saturating_sub(*size);
        }
        (needed > 0).then_some(self.received + needed)
    }

    /// Returns the number of messages in flight.
    pub(super) fn messages(&self) -> u64 {
        self.sizes.len() as u64
    }

    /// Returns the number of bytes in flight.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of messages that were received.
    pub(super) const fn received(&self) -> u64 {
        self.received
    }
}

#[cfg(test)]
mod tests;
