//! Functions of this library that the C library calls later: at the exit of the process, and in forked children.
//!
//! A process that is killed, crashes or calls `_exit` does not run the functions for its exit.

#![allow(unsafe_code, reason = "the standard library has no calls for atexit(3) and dlopen(3)")]

use std::mem::MaybeUninit;
use std::sync::Once;

/// Registers a function that the process runs when it exits in order: by `exit`, or by a return from `main`. It must not panic, and
/// must not wait without a limit for another thread: one that existed before may have ended. Forked children inherit the registration.
pub(crate) fn at_exit(run: extern "C" fn()) {
    stay_loaded();
    // SAFETY: the function is part of this library, which stays loaded. Without memory for the registration it does not run, as in
    // a process that is killed.
    unsafe { libc::atexit(run) };
}

/// Keeps the shared library that contains this code loaded: `dlclose` does not unload it from now on. A registered function and a
/// running thread would otherwise continue in memory that is not mapped. Without effect in a program that links the library
/// statically.
pub(crate) fn stay_loaded() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let mut found = MaybeUninit::<libc::Dl_info>::zeroed();
        let code = stay_loaded as fn() as *const libc::c_void;
        // SAFETY: the structure is large enough, and zeros are valid in it.
        let info = unsafe {
            if libc::dladdr(code, found.as_mut_ptr()) == 0 {
                return;
            }
            found.assume_init()
        };
        if !info.dli_fname.is_null() {
            // SAFETY: the name is a string of the loader, which remains as long as this library. The library is loaded already, so no
            // code runs; the handle is not closed.
            unsafe { libc::dlopen(info.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) };
        }
    });
}
