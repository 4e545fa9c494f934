//! Fork detection, and closing of inherited sockets in forked children.
//!
//! A child that inherits a socket keeps the connection open after its parent has died. Peers also watch the process itself, but
//! cannot watch every process of another pid namespace, so the child closes its copies at once. Between `fork` and `exec` only
//! system calls are safe (signal-safety(7)), so the descriptors are in a table that is read without a lock.
//!
//! The module also counts forks, so that a guard detects without a system call whether it belongs to this process.

#![allow(unsafe_code, reason = "pthread_atfork, and closing descriptors whose owners never run in the child")]

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};

use super::exit::stay_loaded;

/// Maximum number of sockets in the table. It exceeds the limit of connections, each with a socket and a pidfd.
const SLOTS: usize = 16 * 1024;

const FREE: i32 = -1;

static DESCRIPTORS: [AtomicI32; SLOTS] = [const { AtomicI32::new(FREE) }; SLOTS];

/// The number of forks between the process that first used this library and this process.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Whether the fork handler is installed. The installation fails if the system has no memory for it.
static HANDLER_INSTALLED: AtomicBool = AtomicBool::new(false);

/// Returns a number that is constant within a process and different in a forked child.
pub fn process_epoch() -> u32 {
    install_handler();
    if HANDLER_INSTALLED.load(Ordering::Relaxed) { FORKS.load(Ordering::Relaxed) } else { std::process::id() }
}

fn install_handler() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        stay_loaded();
        // SAFETY: the handler makes only system calls, and this library stays loaded.
        let status = unsafe { libc::pthread_atfork(None, None, Some(after_fork)) };
        HANDLER_INSTALLED.store(status == 0, Ordering::Relaxed);
    });
}

/// The registration of a descriptor that forked children close.
///
/// Dropping it removes the registration. Declare it before the descriptor's owner, so that it is dropped first.
#[derive(Debug)]
pub(crate) struct ClosedByFork(Option<usize>);

impl ClosedByFork {
    /// Registers a descriptor.
    pub(crate) fn new(descriptor: BorrowedFd<'_>) -> Self {
        install_handler();
        let raw = descriptor.as_raw_fd();
        // Descriptors are small numbers, so the slot with the same number is usually free.
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
            // SAFETY: no code of this process uses the inherited owners: guards do nothing here, and the threads that served
            // the sockets do not exist.
            unsafe { libc::close(raw) };
        }
    }
}
