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
