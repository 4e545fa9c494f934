//! What concerns the agent as a process.

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::Duration;

use device_ipc_core::{AllowList, Result, list_exports};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

use super::{Agent, RUN_AGAIN, Words};
use crate::DEADLINE;
use crate::forged::Forged;
use crate::protocol::ToExporter;
use crate::raw::{Connection, Received, open_request};

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

/// `scribble BYTE VALUE`: stores a number at this byte of every counter page that this process shares with another one, as a
/// hostile peer may at any time. How many pages there are.
pub(super) fn scribble(words: &Words<'_>) -> String {
    use std::os::unix::fs::FileExt;

    let maps = std::fs::read_to_string("/proc/self/maps").expect("the process has memory");
    let memory = std::fs::File::options().write(true).open("/proc/self/mem").expect("its own memory");
    let pages = maps.lines().filter(|line| line.contains("memfd:device-ipc-words"));
    let written = pages.filter(|line| {
        let begin = line.split('-').next().and_then(|begin| u64::from_str_radix(begin, 16).ok());
        let value: u64 = words.name(1).parse().expect("a number");
        let at = begin.expect("an address") + words.number(0) as u64;
        // The page of something that has just ended may have been unmapped since.
        memory.write_all_at(&value.to_ne_bytes(), at).is_ok()
    });
    let written = written.count();
    assert!(written > 0, "there is no page to write to");
    written.to_string()
}

/// `limit-descriptors COUNT`
pub(super) fn limit_descriptors(words: &Words<'_>) -> String {
    let count = Some(words.number(0) as u64);
    setrlimit(Resource::Nofile, Rlimit { current: count, maximum: count }).expect("a lower limit");
    String::new()
}

/// `limit-threads MORE`: from now on so many more threads can be started; of a user that has no other process. `any`: as many
/// as before.
pub(super) fn limit_threads(words: &Words<'_>) -> String {
    let now = std::fs::read_dir("/proc/self/task").expect("this process has threads").count() as u64;
    let maximum = getrlimit(Resource::Nproc).maximum;
    // Only the lower of the two limits changes, so that it can be raised again.
    let current = words.name(0).parse().map_or(maximum, |more: u64| Some(now + more));
    let limit = Rlimit { current, maximum };
    setrlimit(Resource::Nproc, limit).expect("another limit");
    String::new()
}

/// What an ordinary user may do from now on; before there are other threads, which would keep what they have.
pub(super) fn drop_capabilities() -> String {
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    set_capabilities(None, sets).expect("fewer capabilities");
    String::new()
}

/// `exec`: runs this program once more in the same process, which answers.
pub(super) fn run_again() -> Result<String> {
    let program = std::env::current_exe().expect("/proc is there");
    let failed = Command::new(program).arg(RUN_AGAIN).exec();
    panic!("{failed}");
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

    /// `swarm SOCKET COUNT processes=COUNT [open=DESCRIPTOR]`: processes that connect so often each, open that or say nothing,
    /// and stay.
    pub(super) fn swarm(&mut self, words: &Words<'_>) -> Result<String> {
        let mut made = 0;
        for _ in 0..words.number_of("processes").unwrap_or(1) {
            let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
            // SAFETY: the agent has one thread as long as it was told nothing that uses the library.
            match unsafe { libc::fork() } {
                0 => {
                    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("a signal");
                    let connections = match words.setting("open") {
                        Some(text) => open_each(text, words.number(1)),
                        None => connect(words),
                    };
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

/// Connections that hold a lease each, as many as were let in.
fn open_each(text: &str, count: usize) -> Vec<Connection> {
    let target = Forged::of(&text.parse().expect("a descriptor"));
    let open = || {
        let connection = Connection::to(target.address()).ok()?;
        connection.send(&ToExporter::Hello { protocol: 1, program: "swarm".into() }).ok()?;
        let hello = connection.receive(DEADLINE);
        connection.send(&open_request(&target, 1)).ok()?;
        let granted = connection.receive(DEADLINE);
        matches!((hello, granted), (Received::Packet(..), Received::Packet(..))).then_some(connection)
    };
    (0..count).filter_map(|_| open()).collect()
}
