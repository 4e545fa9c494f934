//! The end of the process while threads call NIXL.
//!
//! `exit` runs the destructors of NIXL's and UCX's static objects on one thread, while the others continue. A thread of this
//! process that destroys an agent or transfers bytes meanwhile corrupts the heap: a reader of a ring of another host that is dropped just
//! before the end of `main` ends on a thread of the library. So the exit waits for calls of NIXL, and later ones do not return.

#![allow(unsafe_code, reason = "the standard library has no call for atexit(3)")]

use std::cell::Cell;
use std::process;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum time for which the exit waits for calls.
const PATIENCE: Duration = Duration::from_secs(5);

/// The number of threads that call NIXL.
static CALLS: AtomicUsize = AtomicUsize::new(0);
static IS_EXITING: AtomicBool = AtomicBool::new(false);
/// The process that has loaded NIXL: in a forked child, no thread calls it.
static PROCESS: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// The number of guards of this thread, and whether it has begun the exit.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static EXITS: Cell<bool> = const { Cell::new(false) };
}

/// A call of NIXL. Calls may be nested.
#[derive(Debug)]
pub(crate) struct Call {
    /// It belongs to its thread.
    _thread: std::marker::PhantomData<*const ()>,
}

impl Call {
    /// Begins a call. Does not return if the process is exiting by another thread.
    pub(crate) fn begin() -> Self {
        let depth = DEPTH.get();
        if depth == 0 {
            CALLS.fetch_add(1, Ordering::SeqCst);
            if must_stop() {
                stop();
            }
        }
        DEPTH.set(depth + 1);
        Self { _thread: std::marker::PhantomData }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
        if DEPTH.get() == 0 {
            // A thread that ended now would run destructors of UCX beside those of the exit.
            if must_stop() {
                stop();
            }
            CALLS.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Returns whether another thread has begun the exit.
fn must_stop() -> bool {
    IS_EXITING.load(Ordering::SeqCst) && !EXITS.get()
}

/// Stops this thread, which is counted, until the process has ended.
fn stop() -> ! {
    CALLS.fetch_sub(1, Ordering::SeqCst);
    loop {
        thread::park();
    }
}

/// Lets exits wait for calls from now on. Called after NIXL has been loaded, so that the exit waits before NIXL's own destructors.
pub(crate) fn watch() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        PROCESS.store(process::id(), Ordering::Relaxed);
        // SAFETY: the function is part of this library, which core keeps loaded: it has begun the process's state before a copy.
        unsafe { libc::atexit(wait) };
    });
}

extern "C" fn wait() {
    if PROCESS.load(Ordering::Relaxed) != process::id() {
        return;
    }
    EXITS.set(true);
    IS_EXITING.store(true, Ordering::SeqCst);
    let until = Instant::now() + PATIENCE;
    while CALLS.load(Ordering::SeqCst) > 0 && Instant::now() < until {
        thread::sleep(Duration::from_millis(1));
    }
}
