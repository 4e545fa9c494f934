//! Common code of all calls.
//!
//! The stub, fault injection, the check of `aclInit`, the thread's last error and its text apply to all calls in
//! one place.

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
    /// The text that `aclGetRecentErrMsg` returned last: valid until its next call on this thread.
    static HANDED_OUT: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// The counts of calls by name, and the armed faults.
#[derive(Debug, Default)]
pub(crate) struct CallCounts {
    calls: HashMap<String, u64>,
    armed: HashMap<String, Vec<(u64, i32)>>,
}

fn counts() -> &'static Mutex<CallCounts> {
    static COUNTS: OnceLock<Mutex<CallCounts>> = OnceLock::new();
    COUNTS.get_or_init(Mutex::default)
}

/// Returns the number of calls.
pub(crate) fn calls_of(name: &str) -> u64 {
    lock(counts()).calls.get(name).copied().unwrap_or(0)
}

/// Arms a fault: the `after`th call from now on fails once.
pub(crate) fn arm(name: &str, after: u64, status: i32) {
    let mut counts = lock(counts());
    let made = counts.calls.get(name).copied().unwrap_or(0);
    counts.armed.entry(name.to_owned()).or_default().push((made + after.max(1), status));
}

/// Runs a call that requires `aclInit`.
pub(crate) fn run(name: &'static str, body: impl FnOnce(&'static Simulator) -> Outcome) -> i32 {
    run_always(name, |simulator| {
        if !simulator.is_initialised() {
            return refuse(Status::UNINITIALIZE, "aclInit has not been called");
        }
        body(simulator)
    })
}

/// Runs a call that does not require `aclInit`.
pub(crate) fn run_always(name: &'static str, body: impl FnOnce(&'static Simulator) -> Outcome) -> i32 {
    let outcome = Simulator::get().and_then(|simulator| {
        if simulator.config.stub {
            return refuse(Status::COMPILING_STUB_MODE, stub_line(name));
        }
        check_fault(simulator, name)?;
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

/// Runs a call that returns no status; `None` in the stub, and where the call fails.
pub(crate) fn value_of<T>(name: &'static str, body: impl FnOnce(&'static Simulator) -> T) -> Option<T> {
    let simulator = Simulator::get().ok()?;
    if simulator.config.stub {
        stub_line(name);
        return None;
    }
    check_fault(simulator, name).ok()?;
    Some(body(simulator))
}

/// Prints the line of the vendor's stub to the standard output (hicann/runtime, `stub/gen_stubapi.py`).
fn stub_line(name: &str) -> String {
    let line = "stub library cannot be used for execution, please check your environment variables and \
                compilation options to make sure you use the correct library.";
    // A closed standard output is ignored.
    let _ = writeln!(std::io::stdout(), "[ERROR]: {line}");
    format!("{name}: {line}")
}

fn check_fault(simulator: &Simulator, name: &str) -> Outcome {
    let mut counts = lock(counts());
    let made = counts.calls.entry(name.to_owned()).or_default();
    *made += 1;
    let made = *made;
    let injected = |&(at, status): &(u64, i32)| (at == made).then_some(status);
    let armed = counts.armed.get(name).and_then(|faults| faults.iter().find_map(injected));
    let configured = simulator.config.faults.get(name).and_then(|faults| faults.iter().find_map(injected));
    match armed.or(configured) {
        Some(status) => refuse(Status(status), "injected fault"),
        None => Ok(()),
    }
}

/// Stores an error for `aclGetRecentErrMsg` and `aclrtGetLastError` on this thread.
pub(crate) fn note(status: Status, message: &str) {
    if status != Status::REPEAT_INITIALIZE {
        LAST_STATUS.set(status);
    }
    let clean: Vec<u8> = message.bytes().filter(|&byte| byte != 0).collect();
    LAST_MESSAGE.set(CString::new(clean).ok());
}

/// Takes the thread's last message.
pub(crate) fn take_message() -> *const std::ffi::c_char {
    let Some(message) = LAST_MESSAGE.take() else { return std::ptr::null() };
    HANDED_OUT.with_borrow_mut(|slot| slot.insert(message).as_ptr())
}

/// Returns the thread's last error.
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
        /// Pointers are null, or valid as the vendor's header requires.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> i32 {
            $crate::call::$run(stringify!($name), move |$sim| $body)
        }
    )* };
}
pub(crate) use calls;
