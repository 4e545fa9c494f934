//! Closing a forked child's copies of our sockets.
//!
//! A child that keeps a copy of a socket keeps the connection open although its parent has died. The peers also watch
//! the process itself, but not every process can be watched from another pid namespace, so the child closes its copies
//! at once. Between `fork` and `exec` only system calls are safe (signal-safety(7)): the descriptors stand in a table
//! that is read without a lock.
//!
//! Forks are counted here too, so that a guard can tell whose it is without asking the kernel.

#![allow(
    unsafe_code,
    reason = "pthread_atfork, and closing descriptors whose owners do not exist in the child"
)]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

/// More than a process may have sockets of ours: connections are limited, and each has a descriptor for its process.
const SLOTS: usize = 16 * 1024;

const FREE: i32 = -1;

static DESCRIPTORS: [AtomicI32; SLOTS] = [const { AtomicI32::new(FREE) }; SLOTS];

/// Forks between the process that this library was first used in and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Does the system tell of forks? It does not where it had no memory left for that.
static TOLD: AtomicBool = AtomicBool::new(false);

/// Another number in a forked child than in its parent: the same call gives the same number in one process.
pub(crate) fn generation() -> u32 {
    ask_to_be_told();
    if TOLD.load(Ordering::Relaxed) { FORKS.load(Ordering::Relaxed) } else { std::process::id() }
}

fn ask_to_be_told() {
    static ASKED: Once = Once::new();
    ASKED.call_once(|| {
        // SAFETY: the handler makes system calls only. It stays for the life of the process, as this library does.
        let status = unsafe { libc::pthread_atfork(None, None, Some(after_fork)) };
        TOLD.store(status == 0, Ordering::Relaxed);
    });
}

/// A descriptor that a forked child closes; taken back when dropped. Keep it beside the descriptor's owner, before it.
#[derive(Debug)]
pub(crate) struct ClosedByFork(Option<usize>);

impl ClosedByFork {
    /// Has a forked child close its copy of this descriptor.
    pub(crate) fn new(descriptor: BorrowedFd<'_>) -> Self {
        ask_to_be_told();
        let raw = descriptor.as_raw_fd();
        // Descriptors are small numbers, so its own number is mostly the first place to try and free.
        let start = raw as usize % SLOTS;
        let take = |slot: &usize| {
            DESCRIPTORS[*slot].compare_exchange(FREE, raw, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        Self((start..SLOTS).chain(0..start).find(take))
    }
}

impl Drop for ClosedByFork {
    fn drop(&mut self) {
        if let Some(slot) = self.0 {
            DESCRIPTORS[slot].store(FREE, Ordering::Release);
        }
    }
}

extern "C" fn after_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    for slot in &DESCRIPTORS {
        let raw = slot.swap(FREE, Ordering::AcqRel);
        if raw != FREE {
            // SAFETY: the parent's owners are memory that nobody runs in this process: guards do nothing here, and the
            // threads that served the sockets do not exist.
            unsafe { libc::close(raw) };
        }
    }
}
