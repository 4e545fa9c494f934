//! Threads with all signals blocked.
//!
//! The engine is a library. A signal handler of the program must run on a thread of the program and never
//! interrupt a stream.

use std::ffi::c_int;
use std::io;
use std::thread::{Builder, JoinHandle};

/// As large as `sigset_t` is with every libc on Linux: 1024 bits.
#[repr(C)]
struct SignalSet([u64; 16]);

/// `SIG_SETMASK` of the architectures with the generic signal numbers.
const SET_MASK: c_int = 2;

// rustix has no stable call for the mask of a thread; std already links the libc that does.
unsafe extern "C" {
    fn sigfillset(set: *mut SignalSet) -> c_int;
    fn pthread_sigmask(how: c_int, set: *const SignalSet, old: *mut SignalSet) -> c_int;
}

/// Spawns a thread that has all signals blocked from its first instruction on.
pub(crate) fn spawn_with_signals_blocked(
    name: String,
    body: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let mut all = SignalSet([0; 16]);
    let mut before = SignalSet([0; 16]);
    // A new thread inherits the mask, so the mask is set before and restored after.
    // SAFETY: both sets are valid and large enough; the calls change only the calling thread's mask.
    unsafe {
        sigfillset(&mut all);
        pthread_sigmask(SET_MASK, &all, &mut before);
    }
    let thread = Builder::new().name(name).spawn(body);
    // SAFETY: `before` was filled by the call above.
    unsafe { pthread_sigmask(SET_MASK, &before, std::ptr::null_mut()) };
    thread
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocked() -> String {
        let status = std::fs::read_to_string("/proc/thread-self/status").expect("/proc is mounted");
        status.lines().find(|line| line.starts_with("SigBlk")).expect("the status has the mask").to_owned()
    }

    #[test]
    fn spawned_thread_blocks_signals_and_its_parent_does_not() {
        let before = blocked();
        let (send, receive) = std::sync::mpsc::channel();
        let thread = spawn_with_signals_blocked("quiet".into(), move || send.send(blocked()).expect("sent"));
        let inside = receive.recv().expect("the thread answers");
        thread.expect("it starts").join().expect("it ends");
        assert_eq!(blocked(), before);
        let mask = inside.split_ascii_whitespace().nth(1).expect("a number");
        let mask = u64::from_str_radix(mask, 16).expect("in hex");
        // SIGHUP, SIGINT and SIGTERM stand for all that can be blocked.
        assert_eq!(mask & 0x4003, 0x4003);
    }
}
