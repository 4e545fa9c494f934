//! System calls of one thread, counted by ptrace(2).
//!
//! The traced process marks where an operation begins and ends by a system call that nobody else makes, so that nothing
//! is counted but the operation. Only the thread that asks to be traced is.

use std::mem::MaybeUninit;
use std::ptr;

/// Numbers of the system calls between two marks.
pub(crate) type Calls = Vec<u64>;

/// Has the process that started this one trace this thread from its next stop on. False where that is not permitted.
pub(crate) fn be_traced() -> bool {
    // SAFETY: takes no addresses.
    unsafe { libc::ptrace(libc::PTRACE_TRACEME, 0, ptr::null_mut::<u8>(), ptr::null_mut::<u8>()) == 0 }
}

/// Stops until the tracer resumes this process.
pub(crate) fn stop() {
    // SAFETY: a signal to this thread.
    unsafe { libc::raise(libc::SIGSTOP) };
}

/// Begins or ends a counted operation.
pub(crate) fn mark() {
    // SAFETY: takes no arguments. No library of ours asks for it.
    unsafe { libc::syscall(libc::SYS_getsid, -1) };
}

/// Runs the stopped child until it exits, and returns the calls between each pair of marks.
pub(crate) fn trace(pid: i32) -> Vec<Calls> {
    let (mut found, mut current) = (Vec::new(), None::<Calls>);
    loop {
        let mut status = 0;
        // SAFETY: a child of this process; the status is written.
        if unsafe { libc::waitpid(pid, &raw mut status, 0) } != pid || !libc::WIFSTOPPED(status) {
            return found;
        }
        let signal = libc::WSTOPSIG(status);
        let at_system_call = signal == libc::SIGTRAP | 0x80;
        if let Some(number) = at_system_call.then(|| entered(pid)).flatten() {
            if number == libc::SYS_getsid as u64 {
                match current.take() {
                    Some(calls) => found.push(calls),
                    None => current = Some(Vec::new()),
                }
            } else if let Some(calls) = &mut current {
                calls.push(number);
            }
        }
        let pass_on =
            if at_system_call || signal == libc::SIGSTOP || signal == libc::SIGTRAP { 0 } else { signal };
        // SAFETY: the child is stopped; neither call takes an address.
        unsafe {
            libc::ptrace(
                libc::PTRACE_SETOPTIONS,
                pid,
                0,
                libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_EXITKILL,
            );
            libc::ptrace(libc::PTRACE_SYSCALL, pid, 0, pass_on);
        }
    }
}

/// The number of the system call that a stopped child is about to make; `None` where it comes back from one.
fn entered(pid: i32) -> Option<u64> {
    let mut info = MaybeUninit::<libc::ptrace_syscall_info>::zeroed();
    let size = size_of::<libc::ptrace_syscall_info>();
    // SAFETY: writes at most the size of the struct; all of it may be zero.
    let (written, info) = unsafe {
        let written = libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, pid, size, info.as_mut_ptr());
        (written, info.assume_init())
    };
    assert!(written > 0, "the kernel does not say which system call it is (Linux 5.3 does)");
    if info.op != libc::PTRACE_SYSCALL_INFO_ENTRY {
        return None;
    }
    // SAFETY: for such a stop the kernel has written this member.
    Some(unsafe { info.u.entry.nr })
}
