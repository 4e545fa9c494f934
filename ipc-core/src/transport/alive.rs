//! A word in shared memory that the kernel changes when a thread ends.
//!
//! An importer opens what it has open already without a message and without a system call. It still must not take an
//! exporter that has died for one that lives, from the moment on at which anybody can know of the death. A socket's end
//! takes a system call to see, and reaches the poller a little later. So the exporter's poller, which runs as long as the
//! process, holds a robust futex in the page that importers read (set_robust_list(2), and "Robust futexes" in the kernel's
//! documentation): when the thread ends, however that comes about, the kernel marks the word, before the process can be
//! waited for.

#![allow(unsafe_code, reason = "a list that the kernel reads when the thread ends")]

use std::ffi::c_long;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// What the kernel sets in the word (`linux/futex.h`).
const OWNER_DIED: u32 = 0x4000_0000;

/// `struct robust_list` of `linux/futex.h`.
#[repr(C)]
struct Node {
    next: *mut Node,
}

/// `struct robust_list_head` of `linux/futex.h`, and the list's only node.
#[repr(C)]
struct List {
    first: Node,
    /// From a node to its word.
    offset: c_long,
    pending: *mut Node,
    node: Node,
}

/// Ties the word to the calling thread for the rest of its life. The thread must not use robust mutexes, and the word stays
/// mapped until the process ends. Where the kernel does not do it the word stays 0, and tells nothing.
pub(super) fn tie_to_this_thread(word: &'static AtomicU32) {
    let list = Box::into_raw(Box::new(List {
        first: Node { next: ptr::null_mut() },
        offset: 0,
        pending: ptr::null_mut(),
        node: Node { next: ptr::null_mut() },
    }));
    // SAFETY: the list was just made, is never freed, and nobody else has it until the kernel is told.
    let status = unsafe {
        let (head, node) = (&raw mut (*list).first, &raw mut (*list).node);
        (*head).next = node;
        // The last node points to the head.
        (*node).next = head;
        (*list).offset = (word.as_ptr() as c_long).wrapping_sub(node as c_long);
        libc::syscall(libc::SYS_set_robust_list, list, size_of::<[usize; 3]>())
    };
    if status == 0 {
        // SAFETY: asks for a number.
        let thread = unsafe { libc::syscall(libc::SYS_gettid) };
        word.store(thread as u32, Ordering::Release);
    }
}

/// Does the word's thread still run? `None` where the word tells nothing.
pub(super) fn runs(word: &AtomicU32) -> Option<bool> {
    // Importers map it read-only, where std promises relaxed loads alone.
    let value = word.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    match value {
        0 => None,
        value => Some(value & OWNER_DIED == 0),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn the_word_tells_the_end_of_its_thread_as_soon_as_it_can_be_known() {
        let word: &'static AtomicU32 = Box::leak(Box::new(AtomicU32::new(0)));
        assert_eq!(runs(word), None);
        let ((tied, is_tied), (end, ended)) = (channel(), channel::<()>());
        let thread = std::thread::spawn(move || {
            tie_to_this_thread(word);
            tied.send(()).unwrap();
            let _ = ended.recv();
        });
        is_tied.recv().unwrap();
        assert_eq!(runs(word), Some(true));
        drop(end);
        thread.join().unwrap();
        assert_eq!(runs(word), Some(false));
    }
}
