//! A place for one small message in the page that both ends have mapped, so that to send and to receive it takes no system
//! call.
//!
//! Each end has one, which the other end writes. A message is put there when the one before has been taken out, and its
//! receiver is not asleep: one that sleeps waits at the socket, which everything else goes by. The messages of a channel are
//! counted from 1, and the one in the inbox bears its number, so the receiver knows whether the next one is there or comes by the
//! socket.
//!
//! A receiver says that it sleeps and then looks once more; a sender puts the message there and then looks whether the
//! receiver sleeps. Behind a fence on either side one of the two sees what the other has done.
//!
//! The other end may write at any time. So what is read is copied first, word by word, and then looked at.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::os::kill::kill_point;

/// The slots of the page that an inbox takes up, and the first of them: those before are words.
const SLOTS: u32 = 16;
const LISTENING_ENDS: u32 = 128;

/// All words of an inbox, and those before the message: they are looked at again and again, in a cache line of their own.
pub(super) const WORDS: usize = 512;
const HEAD_WORDS: usize = 8;
const NUMBER: usize = 0;
const LENGTH: usize = 1;

const WORD_BYTES: usize = size_of::<u64>();

/// Where an inbox begins: the one that the listening end reads, or the connecting end's.
pub(super) const fn first_slot(listening_ends: bool) -> u32 {
    if listening_ends { LISTENING_ENDS } else { LISTENING_ENDS + SLOTS }
}

/// A word of shared memory; another kind for the model checker.
pub(super) trait SharedWord {
    fn load(&self, ordering: Ordering) -> u64;
    fn store(&self, value: u64, ordering: Ordering);
    /// One order of everything before and behind it, on all sides.
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

/// An inbox, seen by either end.
#[derive(Debug)]
pub(super) struct Inbox<'a, W = AtomicU64> {
    /// Its owner's: the number of the last message that it has taken out.
    pub(super) taken: &'a W,
    /// Its owner's: 1 while it is awake.
    pub(super) awake: &'a W,
    /// The other end's: [`WORDS`] of them.
    pub(super) words: &'a [W],
}

/// What has become of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Put {
    /// It has to go by the socket: it is too long, there is another one, or the receiver sleeps.
    Refused,
    Done,
    /// It is there, and the receiver may have gone to sleep without having seen it.
    Unseen,
}

impl<W: SharedWord> Inbox<'_, W> {
    /// For the end that sends: puts a message there. `last` is the number of the one before.
    pub(super) fn put(&self, (last, number): (u64, u64), message: &[u8]) -> Put {
        if message.len() > self.most_bytes()
            || self.taken.load(Ordering::Acquire) != last
            || !self.has_awake_owner()
        {
            return Put::Refused;
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
        if self.has_awake_owner() { Put::Done } else { Put::Unseen }
    }

    /// For the end that sends: does the other one look here before it sleeps?
    pub(super) fn has_awake_owner(&self) -> bool {
        self.awake.load(Ordering::Relaxed) == 1
    }

    /// For the end that receives: from now on it looks here.
    pub(super) fn wake_up(&self) {
        self.awake.store(1, Ordering::Relaxed);
    }

    /// For the end that receives: from now on it looks at the socket alone. False where the message of this number is here.
    pub(super) fn fall_asleep(&self, next: u64) -> bool {
        self.awake.store(0, Ordering::Relaxed);
        W::fence();
        let sleeps = !self.has(next);
        if !sleeps {
            self.wake_up();
        }
        sleeps
    }

    /// Is the message of this number there?
    pub(super) fn has(&self, number: u64) -> bool {
        self.words[NUMBER].load(Ordering::Acquire) == number
    }

    /// Takes the message of this number out, which is there: a copy of it, or `None` where it has a length that none has.
    pub(super) fn take(&self, number: u64) -> Option<Vec<u8>> {
        let message = self.copy();
        self.taken.store(number, Ordering::Release);
        message
    }

    fn copy(&self) -> Option<Vec<u8>> {
        let length = usize::try_from(self.words[LENGTH].load(Ordering::Relaxed)).ok()?;
        if length > self.most_bytes() {
            return None;
        }
        let mut message = vec![0; length.next_multiple_of(WORD_BYTES)];
        for (bytes, word) in message.chunks_exact_mut(WORD_BYTES).zip(&self.words[HEAD_WORDS..]) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        message.truncate(length);
        Some(message)
    }

    fn most_bytes(&self) -> usize {
        (self.words.len() - HEAD_WORDS) * WORD_BYTES
    }
}

#[cfg(test)]
mod tests;
