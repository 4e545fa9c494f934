//! The wake-up of a sender that waits for room, by two shared words.
//!
//! The sender stores the number of messages that the receiver must have received, and then reads the receiver's count. The
//! receiver stores its count, and then reads that number. Because of the fence on either side, at least one of them observes the
//! store of the other.

use std::sync::atomic::{AtomicU64, Ordering};

use super::inbox::SharedWord;

/// The two words, from the view of either end.
#[derive(Debug)]
pub(super) struct Room<'a, W = AtomicU64> {
    /// The number of messages that the receiver has received, written by the receiver.
    pub(super) received: &'a W,
    /// The number at which the sender wants a wake-up, or 0, written by the sender.
    pub(super) wanted: &'a W,
}

impl<W: SharedWord> Room<'_, W> {
    /// Returns the number of received messages as the receiver states it.
    pub(super) fn received(&self) -> u64 {
        self.received.load(Ordering::Acquire)
    }

    /// Returns the number at which the sender wants a wake-up.
    pub(super) fn wanted(&self) -> u64 {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Asks for a wake-up at this number of messages, for the sender, which then reads the count again.
    pub(super) fn ask(&self, wanted: u64) {
        self.wanted.store(wanted, Ordering::Relaxed);
        W::fence();
    }

    /// States the number of received messages, for the receiver. Returns the number that the sender waits for, if the count has
    /// reached it.
    pub(super) fn acknowledge(&self, received: u64) -> Option<u64> {
        self.received.store(received, Ordering::Release);
        W::fence();
        Some(self.wanted()).filter(|wanted| *wanted != 0 && *wanted <= received)
    }
}
