//! Which functions a process calls, for tests that count them.
//!
//! A program that has loaded the library asks for it by two functions that the driver does not have, so that nothing is noted
//! where nobody asks.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::simulator::lock;

static ON: AtomicBool = AtomicBool::new(false);
static CALLS: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());

/// Notes a call, whichever thread makes it.
pub(crate) fn note(function: &'static str) {
    if ON.load(Ordering::Acquire) {
        lock(&CALLS).push(function);
    }
}

/// From now on the calls of this process are noted.
#[unsafe(no_mangle)]
extern "C" fn device_ipc_sim_cuda_record() {
    lock(&CALLS).clear();
    ON.store(true, Ordering::Release);
}

/// From now on no more. The position of a call, from 0 on: writes its name, without the version's suffix and with a NUL behind
/// it, to at most `capacity` bytes at `name`. False where there were fewer, or the name is longer.
///
/// # Safety
///
/// As many bytes can be written at `name`.
#[unsafe(no_mangle)]
unsafe extern "C" fn device_ipc_sim_cuda_recorded(position: usize, name: *mut u8, capacity: usize) -> bool {
    ON.store(false, Ordering::Release);
    let calls = lock(&CALLS);
    let Some(call) = calls.get(position).map(|call| crate::entry::plain_name(call)) else { return false };
    if call.len() >= capacity {
        return false;
    }
    // SAFETY: the name and the NUL fit what the caller promised; it is memory of the caller's own.
    unsafe {
        name.copy_from_nonoverlapping(call.as_ptr(), call.len());
        name.add(call.len()).write(0);
    }
    true
}
