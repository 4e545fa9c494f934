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
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::sharing::timeline::{Word, WordPage};
    use crate::wire::channel::read_message;

    const MOST_BYTES: usize = (WORDS - HEAD_WORDS) * WORD_BYTES;

    fn page() -> Arc<WordPage> {
        WordPage::create().unwrap().0
    }

    fn inbox(page: &WordPage, listening_ends: bool) -> Inbox<'_> {
        let (slot, word) = (u32::from(listening_ends), Word::FromExporter);
        let (taken, awake) = (page.word(slot, word), page.word(2 + slot, word));
        Inbox { taken, awake, words: page.words(first_slot(listening_ends), WORDS) }
    }

    #[test]
    fn a_message_is_read_back_whatever_its_length() {
        let page = page();
        let inbox = inbox(&page, true);
        assert!(!inbox.has(1), "it is empty");
        inbox.wake_up();
        let lengths = [0, 1, 7, 8, 9, 200, MOST_BYTES - 1, MOST_BYTES];
        for (number, length) in (1..).zip(lengths) {
            let message: Vec<u8> = (0..length).map(|index| (index % 251) as u8 + 1).collect();
            assert_eq!(inbox.put((number - 1, number), &message), Put::Done);
            assert!(inbox.has(number) && !inbox.has(number + 1));
            assert_eq!(inbox.take(number), Some(message));
        }
    }

    #[test]
    fn what_finds_no_room_or_nobody_awake_goes_by_the_socket() {
        let page = page();
        let inbox = inbox(&page, false);
        assert_eq!(inbox.put((0, 1), b"one"), Put::Refused, "nobody has said to be awake");
        inbox.wake_up();
        assert_eq!(inbox.put((0, 2), &[0; MOST_BYTES + 1]), Put::Refused, "it is too long");
        assert_eq!(inbox.put((0, 3), b"three"), Put::Done);
        assert_eq!(inbox.put((3, 4), b"four"), Put::Refused, "there is another one");
        assert!(!inbox.fall_asleep(3), "what is there keeps it awake");
        assert!(inbox.has_awake_owner());
        assert_eq!(inbox.take(3), Some(b"three".to_vec()));
        assert!(inbox.fall_asleep(4));
        assert_eq!(inbox.put((3, 5), b"five"), Put::Refused, "it sleeps");
    }

    #[test]
    fn the_two_do_not_overlap_each_other_or_the_words() {
        let page = page();
        let word = page.word(LISTENING_ENDS - 1, Word::Total);
        word.store(7, Ordering::Relaxed);
        let inboxes = [true, false].map(|listening| inbox(&page, listening));
        for (inbox, byte) in inboxes.iter().zip([1, 2]) {
            inbox.wake_up();
            assert_eq!(inbox.put((0, 3 + u64::from(byte)), &[byte; MOST_BYTES]), Put::Done);
        }
        for (inbox, byte) in inboxes.iter().zip([1, 2]) {
            assert!(inbox.has(3 + u64::from(byte)));
            assert_eq!(inbox.copy(), Some(vec![byte; MOST_BYTES]));
        }
        assert_eq!(word.load(Ordering::Relaxed), 7);
    }

    #[test]
    fn a_length_that_no_message_has_is_refused() {
        let page = page();
        let inbox = inbox(&page, true);
        for length in [MOST_BYTES as u64 + 1, u64::MAX] {
            inbox.words[LENGTH].store(length, Ordering::Relaxed);
            assert_eq!(inbox.take(1), None);
        }
    }

    /// A peer writes whenever it likes: what is read is a message or an error.
    #[test]
    fn who_scribbles_over_it_meanwhile_does_no_harm() {
        let page = page();
        let (inbox, done) = (inbox(&page, true), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut random = 0x9e37_79b9_7f4a_7c15_u64;
                while !done.load(Ordering::Relaxed) {
                    random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                    let at = (random >> 40) as usize % (4 * HEAD_WORDS);
                    inbox.words[at].store((random >> 20) % (2 * MOST_BYTES as u64), Ordering::Relaxed);
                }
            });
            let (mut copied, mut refused) = (0, 0);
            while copied < 1000 || refused < 1000 {
                match inbox.copy() {
                    Some(message) => {
                        assert!(message.len() <= MOST_BYTES);
                        copied += 1;
                        let _ = read_message(message);
                    }
                    None => refused += 1,
                }
            }
            done.store(true, Ordering::Relaxed);
        });
    }
}
