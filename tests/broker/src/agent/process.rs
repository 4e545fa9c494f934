//! The agent as a process: its user, namespaces, limits, and processes that it starts.

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::Duration;

use device_ipc_conformance::agent::Answer;
use device_ipc_core::front_end::list_exports;
use device_ipc_core::{AllowList, Descriptor, Result, TestClock};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

use super::{Agent, RUN_AGAIN};
use crate::DEADLINE;
use crate::forged::Forged;
use crate::protocol::ToExporter;
use crate::raw::{Connection, Received, open_request};

pub(super) fn list() -> Result<Answer> {
    let processes = list_exports(None, &AllowList::own_user(), Duration::from_secs(1))?;
    let mut text = String::new();
    for process in processes.into_iter().flatten() {
        for export in process.exports {
            text.push_str(&format!("{}:{}:{}:{} ", process.pid, export.export, export.bytes, export.held_by));
        }
    }
    Ok(Answer::Text(text))
}

pub(super) fn become_user(uid: u32, gid: u32) -> Answer {
    // SAFETY: plain system calls; glibc has all threads take part.
    let changed = unsafe {
        // A change of user hides `/proc/self` from the process itself, unless it says that it may be looked at.
        libc::setgroups(0, std::ptr::null()) == 0
            && libc::setgid(gid) == 0
            && libc::setuid(uid) == 0
            && libc::prctl(libc::PR_SET_DUMPABLE, 1) == 0
    };
    assert!(changed, "{}", std::io::Error::last_os_error());
    Answer::Done
}

pub(super) fn leave_network() -> Answer {
    // SAFETY: a plain system call; the process has one thread.
    let status = unsafe { libc::unshare(libc::CLONE_NEWNET) };
    assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
    Answer::Done
}

/// Writes to counter pages, as a hostile peer may at any time.
pub(super) fn scribble(page: &str, byte: u64, value: u64) -> Answer {
    use std::os::unix::fs::FileExt;

    let maps = std::fs::read_to_string("/proc/self/maps").expect("the process has memory");
    let memory = std::fs::File::options().write(true).open("/proc/self/mem").expect("its own memory");
    let pages = maps.lines().filter(|line| line.contains(&format!("memfd:device-ipc-{page}")));
    let written = pages.filter(|line| {
        let begin = line.split('-').next().and_then(|begin| u64::from_str_radix(begin, 16).ok());
        let at = begin.expect("an address") + byte;
        // The page of something that has just ended may have been unmapped since.
        memory.write_all_at(&value.to_ne_bytes(), at).is_ok()
    });
    let written = written.count();
    assert!(written > 0, "there is no page to write to");
    Answer::Number(written as u64)
}

/// Lets the clock run a hundred times as fast.
pub(super) fn hurry() -> Answer {
    const STEP: Duration = Duration::from_millis(1);
    let clock = TestClock::take();
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(STEP);
            clock.advance(100 * STEP);
        }
    });
    Answer::Done
}

pub(super) fn limit_descriptors(count: u64) -> Answer {
    let count = Some(count);
    setrlimit(Resource::Nofile, Rlimit { current: count, maximum: count }).expect("a lower limit");
    Answer::Done
}

pub(super) fn limit_threads(more: &str) -> Answer {
    let now = std::fs::read_dir("/proc/self/task").expect("this process has threads").count() as u64;
    let maximum = getrlimit(Resource::Nproc).maximum;
    // Only the lower of the two limits changes, so that it can be raised again.
    let current = more.parse().map_or(maximum, |more: u64| Some(now + more));
    let limit = Rlimit { current, maximum };
    setrlimit(Resource::Nproc, limit).expect("another limit");
    Answer::Done
}

pub(super) fn drop_capabilities() -> Answer {
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    set_capabilities(None, sets).expect("fewer capabilities");
    Answer::Done
}

pub(super) fn run_again() -> Answer {
    let program = std::env::current_exe().expect("/proc is there");
    let failed = Command::new(program).arg(RUN_AGAIN).exec();
    panic!("{failed}");
}

impl Agent {
    pub(super) fn connect_many(&mut self, socket: &str, count: usize) -> Answer {
        let made = connect(socket, count);
        let count = made.len();
        self.connections.extend(made);
        Answer::Number(count as u64)
    }

    pub(super) fn swarm(
        &mut self,
        socket: &str,
        count: usize,
        processes: usize,
        open: Option<&Descriptor>,
    ) -> Answer {
        let mut made = 0;
        for _ in 0..processes {
            let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
            // SAFETY: the agent has one thread until a command uses the library.
            match unsafe { libc::fork() } {
                0 => {
                    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("a signal");
                    let connections = match open {
                        Some(descriptor) => open_each(descriptor, count),
                        None => connect(socket, count),
                    };
                    let _ = rustix::io::write(&writer, &[connections.len() as u8]);
                    loop {
                        std::thread::park();
                    }
                }
                pid => {
                    self.swarm.push(Pid::from_raw(pid).expect("fork succeeds"));
                    let mut count = [0];
                    rustix::io::read(&reader, &mut count).expect("the child reports its connections");
                    made += u64::from(count[0]);
                }
            }
        }
        Answer::Number(made)
    }

    pub(super) fn end_swarm(&mut self) -> Answer {
        for pid in self.swarm.drain(..) {
            let _ = kill_process(pid, Signal::KILL);
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
        }
        Answer::Done
    }
}

fn connect(socket: &str, count: usize) -> Vec<Connection> {
    (0..count).filter_map(|_| Connection::to(socket.as_bytes()).ok()).collect()
}

/// Connects `count` times and opens an export each time; returns the connections that the broker accepted.
fn open_each(descriptor: &Descriptor, count: usize) -> Vec<Connection> {
    let target = Forged::of(descriptor);
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
