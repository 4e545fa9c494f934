//! What every call has in common.
//!
//! Why one place: the stub, the faults on demand, "not initialised", the thread's last error and its text
//! are the same for all, and a call that forgot one of them would be a hole.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::CString;
use std::io::Write;
use std::sync::{Mutex, OnceLock};

use crate::simulator::{Simulator, lock};
use crate::status::{Outcome, Refusal, Status, refuse};

thread_local! {
    static LAST_STATUS: Cell<Status> = const { Cell::new(Status::SUCCESS) };
    static LAST_MESSAGE: RefCell<Option<CString>> = const { RefCell::new(None) };
    /// What `aclGetRecentErrMsg` has handed out: valid until its next call on this thread.
    static HANDED_OUT: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// Calls by name: how often they were made, and the faults that are armed for later ones.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    calls: HashMap<String, u64>,
    armed: HashMap<String, Vec<(u64, i32)>>,
}

fn tally() -> &'static Mutex<Tally> {
    static TALLY: OnceLock<Mutex<Tally>> = OnceLock::new();
    TALLY.get_or_init(Mutex::default)
}

/// How often a call was made.
pub(crate) fn calls_of(name: &str) -> u64 {
    lock(tally()).calls.get(name).copied().unwrap_or(0)
}

/// Makes the `after`-th call from now on fail once.
pub(crate) fn arm(name: &str, after: u64, status: i32) {
    let mut tally = lock(tally());
    let made = tally.calls.get(name).copied().unwrap_or(0);
    tally.armed.entry(name.to_owned()).or_default().push((made + after.max(1), status));
}

/// Runs a call that needs `aclInit` before it.
pub(crate) fn run(name: &'static str, body: impl FnOnce(&'static Simulator) -> Outcome) -> i32 {
    run_always(name, |simulator| {
        if !simulator.is_initialised() {
            return refuse(Status::UNINITIALIZE, "aclInit has not been called");
        }
        body(simulator)
    })
}

/// Runs a call that can be made at any time.
pub(crate) fn run_always(name: &'static str, body: impl FnOnce(&'static Simulator) -> Outcome) -> i32 {
    let outcome = Simulator::get().and_then(|simulator| {
        if simulator.config.stub {
            return refuse(Status::COMPILING_STUB_MODE, stub_line(name));
        }
        meet_fault(simulator, name)?;
        body(simulator)
    });
    match outcome {
        Ok(()) => 0,
        Err(Refusal { status, detail }) => {
            note(status, &format!("E{}: [simulator] {name} returned {}: {detail}", status.0, status.0));
            status.0
        }
    }
}

/// For a call that returns no status: `None` where it is the stub's, or cannot be made.
pub(crate) fn value_of<T>(name: &'static str, body: impl FnOnce(&'static Simulator) -> T) -> Option<T> {
    let simulator = Simulator::get().ok()?;
    if simulator.config.stub {
        stub_line(name);
        return None;
    }
    meet_fault(simulator, name).ok()?;
    Some(body(simulator))
}

/// The vendor's stub prints to the standard output (hicann/runtime, `stub/gen_stubapi.py`).
fn stub_line(name: &str) -> String {
    let line = "stub library cannot be used for execution, please check your environment variables and \
                compilation options to make sure you use the correct library.";
    // Where nobody can be told, nobody is.
    let _ = writeln!(std::io::stdout(), "[ERROR]: {line}");
    format!("{name}: {line}")
}

fn meet_fault(simulator: &Simulator, name: &str) -> Outcome {
    let mut tally = lock(tally());
    let made = tally.calls.entry(name.to_owned()).or_default();
    *made += 1;
    let made = *made;
    let injected = |&(at, status): &(u64, i32)| (at == made).then_some(status);
    let armed = tally.armed.get(name).and_then(|faults| faults.iter().find_map(injected));
    let configured = simulator.config.faults.get(name).and_then(|faults| faults.iter().find_map(injected));
    match armed.or(configured) {
        Some(status) => refuse(Status(status), "a fault that was asked for"),
        None => Ok(()),
    }
}

/// Keeps an error for `aclGetRecentErrMsg` and `aclrtGetLastError` on this thread.
pub(crate) fn note(status: Status, message: &str) {
    if status != Status::REPEAT_INITIALIZE {
        LAST_STATUS.set(status);
    }
    let clean: Vec<u8> = message.bytes().filter(|&byte| byte != 0).collect();
    LAST_MESSAGE.set(CString::new(clean).ok());
}

/// The thread's last message, which is thereby read.
pub(crate) fn take_message() -> *const std::ffi::c_char {
    let Some(message) = LAST_MESSAGE.take() else { return std::ptr::null() };
    HANDED_OUT.with_borrow_mut(|slot| slot.insert(message).as_ptr())
}

/// The thread's last error.
pub(crate) fn last_status(reset: bool) -> Status {
    if reset { LAST_STATUS.replace(Status::SUCCESS) } else { LAST_STATUS.get() }
}

/// Defines exported functions that return an `aclError`.
macro_rules! calls {
    ($($(#[$meta:meta])* $run:ident fn $name:ident($sim:ident $(, $arg:ident: $type:ty)* $(,)?) $body:block)*) => { $(
        $(#[$meta])*
        ///
        /// # Safety
        ///
        /// Pointers are null, or point to what the vendor's header says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> i32 {
            $crate::call::$run(stringify!($name), move |$sim| $body)
        }
    )* };
}
pub(crate) use calls;
