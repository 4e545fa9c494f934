//! The record of the functions that a process calls, for tests that count them.
//!
//! A program starts the record by two functions that the driver does not have; without that, no call is recorded.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::simulator::lock;

static ON: AtomicBool = AtomicBool::new(false);
static CALLS: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());

/// Records a call, of any thread.
pub(crate) fn note(function: &'static str) {
    if ON.load(Ordering::Acquire) {
        lock(&CALLS).push(function);
    }
}

/// Starts to record the calls of this process.
#[unsafe(no_mangle)]
extern "C" fn device_ipc_sim_cuda_record() {
    lock(&CALLS).clear();
    ON.store(true, Ordering::Release);
}

/// Stops recording, and returns a call by its index from 0 on: writes its NUL-terminated name without the version's
/// suffix to at most `capacity` bytes at `name`. Returns false if there are fewer calls, or the name is longer.
///
/// # Safety
///
/// `capacity` bytes can be written at `name`.
#[unsafe(no_mangle)]
unsafe extern "C" fn device_ipc_sim_cuda_recorded(position: usize, name: *mut u8, capacity: usize) -> bool {
    ON.store(false, Ordering::Release);
    let calls = lock(&CALLS);
    let Some(call) = calls.get(position).map(|call| crate::entry::plain_name(call)) else { return false };
    if call.len() >= capacity {
        return false;
    }
    // SAFETY: the name and the NUL fit into the bytes that the caller promised, which are the caller's memory.
    unsafe {
        name.copy_from_nonoverlapping(call.as_ptr(), call.len());
        name.add(call.len()).write(0);
    }
    true
}
