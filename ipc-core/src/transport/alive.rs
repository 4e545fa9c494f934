//! A word in shared memory that the kernel changes when a thread terminates.
//!
//! A repeated open takes neither a message nor a system call. The importer still must not mistake a terminated exporter for a
//! live one, from the moment at which any process can know of the termination. The closing of a socket takes a system call to
//! see, and reaches the poller a little later. So the exporter's poller, which runs as long as the
//! process, holds a robust futex in the page that importers read (set_robust_list(2), and "Robust futexes" in the kernel's
//! documentation): when the thread terminates, for any reason, the kernel marks the word, before the process can be
//! waited for.

#![allow(unsafe_code, reason = "a list that the kernel reads when the thread ends")]

use std::ffi::c_long;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering, fence};

/// The bit that the kernel sets in the word (`linux/futex.h`).
const OWNER_DIED: u32 = 0x4000_0000;

/// `struct robust_list` of `linux/futex.h`.
#[repr(C)]
struct Node {
    next: *mut Node,
}

/// `struct robust_list_head` of `linux/futex.h`, and the list's only node.
#[repr(C)]
struct RobustList {
    first: Node,
    /// Offset of a node's word, from the node.
    offset: c_long,
    pending: *mut Node,
    node: Node,
}

/// Ties the word to the calling thread for the rest of its life. The thread must not use robust mutexes, and the word stays
/// mapped until the process ends. Where the kernel does not support it the word stays 0, which means unknown.
pub(super) fn tie_to_this_thread(word: &'static AtomicU32) {
    let list = Box::into_raw(Box::new(RobustList {
        first: Node { next: ptr::null_mut() },
        offset: 0,
        pending: ptr::null_mut(),
        node: Node { next: ptr::null_mut() },
    }));
    // SAFETY: the list was just made, is never freed, and no other thread has it before the system call.
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

/// Returns whether the word's thread is alive. `None` where that is unknown.
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
mod tests;
