use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::*;
use crate::sharing::timeline::{Word, WordPage};
use crate::wire::channel::read_message;

const CAPACITY_BYTES: usize = (WORDS - HEAD_WORDS) * WORD_BYTES;

fn page() -> Arc<WordPage> {
    WordPage::create().unwrap().0
}

fn inbox(page: &WordPage, is_listener: bool) -> Inbox<'_> {
    let (slot, word) = (u32::from(is_listener), Word::FromExporter);
    let (taken, awake) = (page.word(slot, word), page.word(2 + slot, word));
    Inbox { taken, awake, words: page.words(first_slot(is_listener), WORDS) }
}

#[test]
fn messages_of_any_length_round_trip() {
    let page = page();
    let inbox = inbox(&page, true);
    assert!(!inbox.has(1), "the inbox is empty");
    inbox.wake_up();
    let lengths = [0, 1, 7, 8, 9, 200, CAPACITY_BYTES - 1, CAPACITY_BYTES];
    for (number, length) in (1..).zip(lengths) {
        let message: Vec<u8> = (0..length).map(|index| (index % 251) as u8 + 1).collect();
        assert_eq!(inbox.put(number - 1, number, &message), PutResult::Done);
        assert!(inbox.has(number) && !inbox.has(number + 1));
        assert_eq!(inbox.take(number), Some(message));
    }
}

#[test]
fn put_into_full_or_sleeping_inbox_is_refused() {
    let page = page();
    let inbox = inbox(&page, false);
    assert_eq!(inbox.put(0, 1, b"one"), PutResult::Refused, "the receiver is not awake");
    inbox.wake_up();
    assert_eq!(inbox.put(0, 2, &[0; CAPACITY_BYTES + 1]), PutResult::Refused, "the message is too long");
    assert_eq!(inbox.put(0, 3, b"three"), PutResult::Done);
    assert_eq!(inbox.put(3, 4, b"four"), PutResult::Refused, "the inbox is full");
    assert!(!inbox.fall_asleep(3), "the message keeps the receiver awake");
    assert!(inbox.has_awake_receiver());
    assert_eq!(inbox.take(3), Some(b"three".to_vec()));
    assert!(inbox.fall_asleep(4));
    assert_eq!(inbox.put(3, 5, b"five"), PutResult::Refused, "the receiver sleeps");
}

#[test]
fn inboxes_overlap_neither_each_other_nor_counters() {
    let page = page();
    let word = page.word(LISTENER_SLOT - 1, Word::Total);
    word.store(7, Ordering::Relaxed);
    let inboxes = [true, false].map(|listening| inbox(&page, listening));
    for (inbox, byte) in inboxes.iter().zip([1, 2]) {
        inbox.wake_up();
        assert_eq!(inbox.put(0, 3 + u64::from(byte), &[byte; CAPACITY_BYTES]), PutResult::Done);
    }
    for (inbox, byte) in inboxes.iter().zip([1, 2]) {
        assert!(inbox.has(3 + u64::from(byte)));
        assert_eq!(inbox.copy(), Some(vec![byte; CAPACITY_BYTES]));
    }
    assert_eq!(word.load(Ordering::Relaxed), 7);
}

#[test]
fn invalid_length_is_rejected() {
    let page = page();
    let inbox = inbox(&page, true);
    for length in [CAPACITY_BYTES as u64 + 1, u64::MAX] {
        inbox.words[LENGTH].store(length, Ordering::Relaxed);
        assert_eq!(inbox.take(1), None);
    }
}

/// The peer may write at any time: the receiver gets a message or an error.
#[test]
fn concurrent_writes_of_peer_are_harmless() {
    let page = page();
    let (inbox, done) = (inbox(&page, true), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut random = 0x9e37_79b9_7f4a_7c15_u64;
            while !done.load(Ordering::Relaxed) {
                random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                let at = (random >> 40) as usize % (4 * HEAD_WORDS);
                inbox.words[at].store((random >> 20) % (2 * CAPACITY_BYTES as u64), Ordering::Relaxed);
            }
        });
        let (mut copied, mut refused) = (0, 0);
        while copied < 1000 || refused < 1000 {
            match inbox.copy() {
                Some(message) => {
                    assert!(message.len() <= CAPACITY_BYTES);
                    copied += 1;
                    let _ = read_message(message);
                }
                None => refused += 1,
            }
        }
        done.store(true, Ordering::Relaxed);
    });
}
