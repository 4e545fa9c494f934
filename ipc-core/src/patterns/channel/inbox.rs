//! An inbox: shared memory for one small message, which is sent and received without a system call.
//!
//! Each end has one inbox, which the peer writes. The sender puts a message into the inbox if the receiver has taken the
//! previous one and is not asleep. A sleeping receiver waits at the socket, which carries all other messages. The messages of
//! a channel are numbered from 1, and the message in the inbox has its number, so the receiver knows whether the next message
//! is in the inbox or arrives by the socket.
//!
//! A receiver stores that it sleeps and then polls the inbox once more; a sender stores the message and then checks whether the
//! receiver sleeps. Because of the fence on either side, at least one of them observes the store of the other.
//!
//! The peer may write at any time. Therefore the receiver first copies a message, word by word, and then parses the copy.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::os::kill::kill_point;

/// The number of slots of the counter page that an inbox occupies.
const SLOTS: u32 = 16;
/// The first slot of the listening end's inbox. Earlier slots contain counters.
const LISTENER_SLOT: u32 = 128;

/// The number of words of an inbox.
pub(super) const WORDS: usize = 512;
/// The number of words before the message. They are polled, and occupy a separate cache line.
const HEAD_WORDS: usize = 8;
const NUMBER: usize = 0;
const LENGTH: usize = 1;

const WORD_BYTES: usize = size_of::<u64>();

/// Returns the first slot of the inbox that the listening end reads, or of the connecting end's.
pub(super) const fn first_slot(is_listener: bool) -> u32 {
    if is_listener { LISTENER_SLOT } else { LISTENER_SLOT + SLOTS }
}

/// A word of shared memory, abstract for the model checker.
pub(super) trait SharedWord {
    fn load(&self, ordering: Ordering) -> u64;
    fn store(&self, value: u64, ordering: Ordering);
    /// Issues a sequentially consistent fence.
    fn fence();
}

impl SharedWord for AtomicU64 {
    fn load(&self, ordering: Ordering) -> u64 {
        self.load(ordering)
    }

    fn store(&self, value: u64, ordering: Ordering) {
        self.store(value, ordering);
    }

    fn fence() {
        fence(Ordering::SeqCst);
    }
}

/// An inbox from the view of either end.
#[derive(Debug)]
pub(super) struct Inbox<'a, W = AtomicU64> {
    /// The number of the last taken message, written by the receiver.
    pub(super) taken: &'a W,
    /// 1 while the receiver is awake, written by the receiver.
    pub(super) awake: &'a W,
    /// The [`WORDS`] words of the message and its head, written by the sender.
    pub(super) words: &'a [W],
}

/// The result of putting a message into an inbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PutResult {
    /// The message must be sent by the socket: it is too long, the inbox is full, or the receiver sleeps.
    Refused,
    /// The receiver will find the message.
    Done,
    /// The message is in the inbox, but the receiver may have fallen asleep without noticing it.
    Unnoticed,
}

impl<W: SharedWord> Inbox<'_, W> {
    /// Puts a message with a number into the inbox, for the sender. `last` is the number of the previous message in this inbox.
    pub(super) fn put(&self, last: u64, number: u64, message: &[u8]) -> PutResult {
        if message.len() > self.capacity_bytes()
            || self.taken.load(Ordering::Acquire) != last
            || !self.has_awake_receiver()
        {
            return PutResult::Refused;
        }
        for (word, bytes) in self.words[HEAD_WORDS..].iter().zip(message.chunks(WORD_BYTES)) {
            let mut whole = [0; WORD_BYTES];
            whole[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_ne_bytes(whole), Ordering::Relaxed);
        }
        self.words[LENGTH].store(message.len() as u64, Ordering::Relaxed);
        self.words[NUMBER].store(number, Ordering::Release);
        kill_point!("sender:channel-put");
        W::fence();
        if self.has_awake_receiver() { PutResult::Done } else { PutResult::Unnoticed }
    }

    /// Returns whether the receiver is awake and polls the inbox before it sleeps, for the sender.
    pub(super) fn has_awake_receiver(&self) -> bool {
        self.awake.load(Ordering::Relaxed) == 1
    }

    /// Marks the receiver as awake.
    pub(super) fn wake_up(&self) {
        self.awake.store(1, Ordering::Relaxed);
    }

    /// Marks the receiver as asleep. Returns `false`, with the receiver awake, if the message `next` is in the inbox.
    pub(super) fn fall_asleep(&self, next: u64) -> bool {
        self.awake.store(0, Ordering::Relaxed);
        W::fence();
        let sleeps = !self.has(next);
        if !sleeps {
            self.wake_up();
        }
        sleeps
    }

    /// Returns whether the inbox contains the message with this number.
    pub(super) fn has(&self, number: u64) -> bool {
        self.words[NUMBER].load(Ordering::Acquire) == number
    }

    /// Takes the message with this number, which the inbox contains. `None` if its length is invalid.
    pub(super) fn take(&self, number: u64) -> Option<Vec<u8>> {
        let message = self.copy();
        self.taken.store(number, Ordering::Release);
        message
    }

    fn copy(&self) -> Option<Vec<u8>> {
        let length = usize::try_from(self.words[LENGTH].load(Ordering::Relaxed)).ok()?;
        if length > self.capacity_bytes() {
            return None;
        }
        let mut message = vec![0; length.next_multiple_of(WORD_BYTES)];
        for (bytes, word) in message.chunks_exact_mut(WORD_BYTES).zip(&self.words[HEAD_WORDS..]) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        message.truncate(length);
        Some(message)
    }

    fn capacity_bytes(&self) -> usize {
        (self.words.len() - HEAD_WORDS) * WORD_BYTES
    }
}

#[cfg(test)]
mod tests;
