//! What concerns the agent as a process.

use std::time::Duration;

use device_ipc_core::{AllowList, Result, list_exports};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

use super::{Agent, Words};
use crate::raw::Connection;

/// `list`: of each exporting process its pid and what it shares, as `PID:EXPORT:BYTES:HELD_BY`.
pub(super) fn list(_: &Words<'_>) -> Result<String> {
    let processes = list_exports(None, &AllowList::own_user(), Duration::from_secs(1))?;
    let mut text = String::new();
    for process in processes.into_iter().flatten() {
        for export in process.exports {
            text.push_str(&format!("{}:{}:{}:{} ", process.pid, export.export, export.bytes, export.held_by));
        }
    }
    Ok(text)
}

/// What the library counts.
pub(super) fn counters() -> String {
    let text = device_ipc_core::counters().to_prometheus();
    let counts = text.lines().filter_map(|line| line.strip_prefix("device_ipc_"));
    counts.map(|line| line.replacen(' ', "=", 1) + " ").collect()
}

/// `become UID GID`: another user, for good.
pub(super) fn become_user(words: &Words<'_>) -> String {
    let (uid, gid) = (words.number(0) as libc::uid_t, words.number(1) as libc::gid_t);
    // SAFETY: plain system calls; glibc has all threads take part.
    let changed = unsafe {
        // A change of user hides `/proc/self` from the process itself, unless it says that it may be looked at.
        libc::setgroups(0, std::ptr::null()) == 0
            && libc::setgid(gid) == 0
            && libc::setuid(uid) == 0
            && libc::prctl(libc::PR_SET_DUMPABLE, 1) == 0
    };
    assert!(changed, "{}", std::io::Error::last_os_error());
    String::new()
}

/// A network namespace of its own, for good.
pub(super) fn leave_network() -> String {
    // SAFETY: a plain system call; the process has one thread.
    let status = unsafe { libc::unshare(libc::CLONE_NEWNET) };
    assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
    String::new()
}

/// `limit-descriptors COUNT`
pub(super) fn limit_descriptors(words: &Words<'_>) -> String {
    let count = Some(words.number(0) as u64);
    setrlimit(Resource::Nofile, Rlimit { current: count, maximum: count }).expect("a lower limit");
    String::new()
}

/// What an ordinary user may do from now on; before there are other threads, which would keep what they have.
pub(super) fn drop_capabilities() -> String {
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    set_capabilities(None, sets).expect("fewer capabilities");
    String::new()
}

impl Agent {
    /// `connect-many SOCKET COUNT`: connects and says nothing; how many connections were made.
    pub(super) fn connect_many(&mut self, words: &Words<'_>) -> Result<String> {
        let made = connect(words);
        let count = made.len();
        self.connections.extend(made);
        Ok(count.to_string())
    }

    /// Closes the connections of `connect-many`.
    pub(super) fn disconnect(&mut self) -> Result<String> {
        self.connections.clear();
        Ok(String::new())
    }

    /// `swarm SOCKET COUNT processes=COUNT`: processes that connect so often each, say nothing, and stay.
    pub(super) fn swarm(&mut self, words: &Words<'_>) -> Result<String> {
        let mut made = 0;
        for _ in 0..words.number_of("processes").unwrap_or(1) {
            let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
            // SAFETY: the agent has one thread as long as it was told nothing that uses the library.
            match unsafe { libc::fork() } {
                0 => {
                    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("a signal");
                    let connections = connect(words);
                    let _ = rustix::io::write(&writer, &[connections.len() as u8]);
                    loop {
                        std::thread::park();
                    }
                }
                pid => {
                    self.swarm.push(Pid::from_raw(pid).expect("fork succeeds"));
                    let mut count = [0];
                    rustix::io::read(&reader, &mut count).expect("the child says how many");
                    made += usize::from(count[0]);
                }
            }
        }
        Ok(made.to_string())
    }

    /// Kills the swarm.
    pub(super) fn end_swarm(&mut self) -> Result<String> {
        for pid in self.swarm.drain(..) {
            let _ = kill_process(pid, Signal::KILL);
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
        }
        Ok(String::new())
    }
}

fn connect(words: &Words<'_>) -> Vec<Connection> {
    let name = words.name(0).as_bytes();
    (0..words.number(1)).filter_map(|_| Connection::to(name).ok()).collect()
}
