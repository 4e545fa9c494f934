//! Closes descriptors that other processes sent, on threads that nothing waits for.
//!
//! The process that sends a descriptor decides how long its last close takes: a TCP socket with `SO_LINGER` and unsent data
//! waits for its peer, and a file of a FUSE file system for its server, which may be the sender. The kernel also closes what
//! still lies unread in a socket's queue when that socket is closed, on the closing thread. So descriptors that nobody expects,
//! and sockets in whose queues there may be some, are closed here.

use std::any::Any;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::os::{Condvar, spawn_without_signals};

/// Maximum number of threads that close at a time. They exist only while there is something to close.
const MAX_THREADS: usize = 8;

/// The descriptors that wait to be closed, and the number of closing threads.
#[derive(Default)]
struct Closer {
    waiting: Vec<Box<dyn Any + Send>>,
    threads: usize,
}

static CLOSER: Mutex<Closer> = Mutex::new(Closer { waiting: Vec::new(), threads: 0 });

/// Notified when a thread has nothing left to close.
static IDLE: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, Closer> {
    CLOSER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Drops the owner of descriptors on another thread.
pub(crate) fn close_elsewhere(owner: impl Send + 'static) {
    let mut closer = lock();
    closer.waiting.push(Box::new(owner));
    if closer.threads == MAX_THREADS {
        return;
    }
    closer.threads += 1;
    drop(closer);
    if spawn_without_signals("device-ipc-close", close_waiting).is_err() {
        // Without a thread this one has to.
        close_waiting();
    }
}

/// Waits until everything is closed. False after the timeout.
#[cfg(feature = "kill-points")]
pub(crate) fn wait_until_closed(timeout: std::time::Duration) -> bool {
    IDLE.wait_timeout_while(&CLOSER, lock(), timeout, |closer| closer.threads > 0).threads == 0
}

/// Returns how many owners wait until a thread has closed those before them.
pub(super) fn backlog() -> usize {
    lock().waiting.len()
}

fn close_waiting() {
    loop {
        let mut closer = lock();
        let Some(owner) = closer.waiting.pop() else {
            closer.threads -= 1;
            IDLE.notify_all();
            return;
        };
        drop(closer);
        drop(owner);
    }
}

#[cfg(test)]
mod tests;
