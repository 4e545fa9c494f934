//! A place for one small message in the page that both ends have mapped, so that to send and to receive it takes no system
//! call.
//!
//! Each end has one, which the other end writes. A message is put there when the one before has been taken out, and its
//! receiver is not asleep: one that sleeps waits at the socket, which everything else goes by. The messages of a channel are
//! counted from 1, and the one in the inbox bears its number, so the receiver knows whether the next one is there or comes by the
//! socket.
//!
//! The other end may write at any time. So what is read is copied first, word by word, and then looked at.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::timeline::WordPage;

/// The slots of the page that an inbox takes up, and the first of them: those before are words.
const SLOTS: u32 = 16;
const LISTENING_ENDS: u32 = 128;
const CONNECTING_ENDS: u32 = LISTENING_ENDS + SLOTS;

/// All words of an inbox, and those before the message: they are looked at again and again, in a cache line of their own.
const WORDS: usize = 512;
const HEAD_WORDS: usize = 8;
const NUMBER: usize = 0;
const LENGTH: usize = 1;

const WORD_BYTES: usize = size_of::<u64>();

/// The longest message in bytes.
pub(super) const MOST_BYTES: usize = (WORDS - HEAD_WORDS) * WORD_BYTES;

/// An inbox, seen by either end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Inbox<'a> {
    words: &'a [AtomicU64],
}

impl<'a> Inbox<'a> {
    /// The one that the listening end reads, or the connecting end's.
    pub(super) fn of(page: &'a WordPage, listening_ends: bool) -> Self {
        Self { words: page.words(if listening_ends { LISTENING_ENDS } else { CONNECTING_ENDS }, WORDS) }
    }

    /// Puts a message of at most [`MOST_BYTES`] there; the one before has been taken out.
    pub(super) fn put(&self, number: u64, message: &[u8]) {
        for (word, bytes) in self.words[HEAD_WORDS..].iter().zip(message.chunks(WORD_BYTES)) {
            let mut whole = [0; WORD_BYTES];
            whole[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_ne_bytes(whole), Ordering::Relaxed);
        }
        self.words[LENGTH].store(message.len() as u64, Ordering::Relaxed);
        // In one order with the receiver's word that it sleeps: either it sees this, or the sender that.
        self.words[NUMBER].store(number, Ordering::SeqCst);
    }

    /// Is the message of this number there?
    pub(super) fn has(&self, number: u64) -> bool {
        self.words[NUMBER].load(Ordering::SeqCst) == number
    }

    /// A copy of the message that is there, or `None` where it has a length that none has.
    pub(super) fn copy(&self) -> Option<Vec<u8>> {
        let length = usize::try_from(self.words[LENGTH].load(Ordering::Relaxed)).ok()?;
        if length > MOST_BYTES {
            return None;
        }
        let mut message = vec![0; length.next_multiple_of(WORD_BYTES)];
        for (bytes, word) in message.chunks_exact_mut(WORD_BYTES).zip(&self.words[HEAD_WORDS..]) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        message.truncate(length);
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use super::super::wire::read_message;
    use super::*;
    use crate::timeline::Word;

    fn page() -> Arc<WordPage> {
        WordPage::create().unwrap()
    }

    #[test]
    fn a_message_is_read_back_whatever_its_length() {
        let page = page();
        let inbox = Inbox::of(&page, true);
        assert!(!inbox.has(1), "it is empty");
        let lengths = [0, 1, 7, 8, 9, 200, MOST_BYTES - 1, MOST_BYTES];
        for (number, length) in (1..).zip(lengths) {
            let message: Vec<u8> = (0..length).map(|index| (index % 251) as u8 + 1).collect();
            inbox.put(number, &message);
            assert!(inbox.has(number) && !inbox.has(number + 1));
            assert_eq!(inbox.copy(), Some(message));
        }
    }

    #[test]
    fn the_two_do_not_overlap_each_other_or_the_words() {
        let page = page();
        let word = page.word(LISTENING_ENDS - 1, Word::Total);
        word.store(7, Ordering::Relaxed);
        let [listening, connecting] = [true, false].map(|listening| Inbox::of(&page, listening));
        listening.put(3, &[1; MOST_BYTES]);
        connecting.put(4, &[2; MOST_BYTES]);
        assert_eq!(listening.copy(), Some(vec![1; MOST_BYTES]));
        assert_eq!(connecting.copy(), Some(vec![2; MOST_BYTES]));
        assert!(listening.has(3) && connecting.has(4));
        assert_eq!(word.load(Ordering::Relaxed), 7);
    }

    #[test]
    fn a_length_that_no_message_has_is_refused() {
        let page = page();
        let inbox = Inbox::of(&page, true);
        for length in [MOST_BYTES as u64 + 1, u64::MAX] {
            inbox.words[LENGTH].store(length, Ordering::Relaxed);
            assert_eq!(inbox.copy(), None);
        }
    }

    /// A peer writes whenever it likes: what is read is a message or an error.
    #[test]
    fn who_scribbles_over_it_meanwhile_does_no_harm() {
        let page = page();
        let (inbox, done) = (Inbox::of(&page, true), AtomicBool::new(false));
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
