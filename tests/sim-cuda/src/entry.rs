//! The entry of every function: fault injection, and a stop for panics, which must not unwind into C.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

use crate::record;
use crate::simulator::{lock, simulator_if_any};
use crate::status::{Result, Status};

/// Defines exported functions of the driver with the arguments of `cuda.h` and a `CUresult`. The body returns a
/// [`Result`].
macro_rules! driver {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$meta])*
            ///
            /// # Safety
            /// As in `cuda.h`: pointers are null, or valid for the accesses of the function.
            #[allow(non_snake_case, reason = "the name is the driver's")]
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($arg: $type),*) -> i32 {
                $crate::entry::enter(stringify!($name), || $body)
            }
        )*
    };
}
pub(crate) use driver;

/// Runs the body of a function.
pub(crate) fn enter(function: &'static str, body: impl FnOnce() -> Result) -> i32 {
    let result = catch_unwind(AssertUnwindSafe(|| {
        record::note(function);
        check_fault(function)?;
        body()
    }));
    match result {
        Ok(Ok(())) => 0,
        Ok(Err(Status(status))) => status,
        // The panic hook has printed the message.
        Err(_) => Status::UNKNOWN.0,
    }
}

/// Counts the call, and fails if a fault is due.
fn check_fault(function: &'static str) -> Result {
    static CALLS: Mutex<Option<HashMap<&'static str, u64>>> = Mutex::new(None);
    let Some(simulator) = simulator_if_any() else { return Ok(()) };
    let faults = &simulator.config.faults;
    if faults.is_empty() {
        return Ok(());
    }
    let plain = plain_name(function);
    let mut calls = lock(&CALLS);
    let count = calls.get_or_insert_default().entry(plain).or_insert(0);
    *count += 1;
    let due = faults.iter().find(|fault| plain_name(&fault.function) == plain && fault.call == *count);
    due.map_or(Ok(()), |fault| Err(Status(fault.status)))
}

/// Returns the name of a function without the suffix of its version.
pub(crate) fn plain_name(name: &str) -> &str {
    match name.rsplit_once("_v") {
        Some((plain, version)) if version.bytes().all(|byte| byte.is_ascii_digit()) => plain,
        _ => name,
    }
}
