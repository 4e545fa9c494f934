//! Who a process is: exactly enough that no other process, later, elsewhere or in another container, is taken for it.

use std::fs;
use std::hash::{Hash, Hasher};
use std::io::Read as _;
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::model::device::HostId;
use crate::model::error::{Error, Result};
use crate::os::generation;

/// A process, told apart from every other one on any host at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// The machine, over reboots.
    pub host: HostId,
    /// The machine since it was last started: `/proc/sys/kernel/random/boot_id`.
    pub boot: [u8; 16],
    /// Inode of the pid namespace that `pid` counts in.
    pub pid_namespace: u64,
    /// Inode of the network namespace, which abstract sockets belong to.
    pub net_namespace: u64,
    /// The process id in its own pid namespace.
    pub pid: u32,
    /// When the process started, in clock ticks after boot: field 22 of `/proc/PID/stat`, as the process itself sees it. A
    /// process that runs another program (execve(2)) keeps it, and its id; its exports end, as its sockets close.
    pub start_time: u64,
}

/// By what differs on one machine.
impl Hash for ProcessIdentity {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u32(self.pid);
        state.write_u64(self.start_time);
    }
}

impl ProcessIdentity {
    /// This process. Read once; a forked child reads its own.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] where `/proc` is not there.
    pub fn current() -> Result<Self> {
        static CURRENT: OnceLock<ProcessIdentity> = OnceLock::new();
        let pid = std::process::id();
        if let Some(known) = CURRENT.get() {
            if known.pid == pid {
                return Ok(*known);
            }
            return Self::read();
        }
        let read = Self::read()?;
        Ok(*CURRENT.get_or_init(|| read))
    }

    fn read() -> Result<Self> {
        let boot = read_text("/proc/sys/kernel/random/boot_id")?;
        let boot = crate::model::device::parse_hex(boot.trim())
            .ok_or_else(|| Error::Protocol("/proc/sys/kernel/random/boot_id is not a UUID".into()))?;
        Ok(Self {
            host: HostId::local(),
            boot,
            pid_namespace: inode("/proc/self/ns/pid")?,
            net_namespace: inode("/proc/self/ns/net")?,
            pid: std::process::id(),
            start_time: start_time(&read_text("/proc/self/stat")?)?,
        })
    }

    /// Returns whether the process is known to have exited. False where that cannot be told from here, and its socket has to
    /// tell: the process is of another pid namespace, `/proc` hides it (`hidepid`), or its start time, by which it is told from
    /// a later process of the same id, is shown differently in its time namespace (time_namespaces(7)).
    pub(crate) fn has_ended(&self, local: &Self) -> bool {
        if self.boot != local.boot || self.pid_namespace != local.pid_namespace {
            return false;
        }
        match read_short(&format!("/proc/{}/stat", self.pid)) {
            Ok(stat) => {
                start_time(&stat).is_ok_and(|started| started != self.start_time)
                    && shows_times_as_here(self.pid)
            }
            Err(error) => error.kind() == std::io::ErrorKind::NotFound && !exists(self.pid),
        }
    }
}

/// Returns whether there is a process with this id, also one that `/proc` does not show. A pidfd needs no permission.
fn exists(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| !matches!(pidfd_open(pid, PidfdFlags::empty()), Err(Errno::SRCH)))
}

/// Returns whether the process is known to be in this process's time namespace. One that is not shows its start time, which
/// its descriptors tell, with another offset.
fn shows_times_as_here(pid: u32) -> bool {
    let Ok(here) = fs::read_link("/proc/self/ns/time") else {
        // The kernel has no time namespaces.
        return true;
    };
    fs::read_link(format!("/proc/{pid}/ns/time")).is_ok_and(|there| there == here)
}

fn read_text(path: &str) -> Result<String> {
    fs::read_to_string(path).map_err(|error| Error::io(format!("reading {path}"), error))
}

/// A file of a few hundred bytes, by three system calls.
fn read_short(path: &str) -> std::io::Result<String> {
    let mut bytes = [0; 4096];
    let read = fs::File::open(path)?.read(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes[..read]).into_owned())
}

fn inode(path: &str) -> Result<u64> {
    Ok(fs::metadata(path).map_err(|error| Error::io(format!("reading {path}"), error))?.ino())
}

/// Field 22; the name in field 2 may hold blanks and parentheses, so counting begins behind its last parenthesis.
fn start_time(stat: &str) -> Result<u64> {
    stat.rsplit_once(')')
        .and_then(|(_, rest)| rest.split_whitespace().nth(19))
        .and_then(|field| field.parse().ok())
        .ok_or_else(|| Error::Protocol("/proc/PID/stat has no start time".into()))
}

/// Remembers the process that made a guard, so that the guard of a forked child does nothing. Costs no system call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner(u32);

impl Owner {
    pub(crate) fn current() -> Self {
        Self(generation())
    }

    /// Does this process own the guard, or is it a forked child of the one that does?
    pub(crate) fn is_here(&self) -> bool {
        self.0 == generation()
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.is_here() { Ok(()) } else { Err(Error::Forked) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_not_ended_and_one_with_another_start_time_has() {
        let current = ProcessIdentity::current().unwrap();
        assert_eq!(current.pid, std::process::id());
        assert!(!current.has_ended(&current));
        let reused = ProcessIdentity { start_time: current.start_time + 1, ..current };
        assert!(reused.has_ended(&current));
        let elsewhere = ProcessIdentity { pid_namespace: 0, ..reused };
        assert!(!elsewhere.has_ended(&current));
    }

    #[test]
    fn a_program_name_with_parentheses_does_not_shift_the_fields() {
        let fields: Vec<String> = (3..=30).map(|field| field.to_string()).collect();
        let stat = format!("7 (a) b (c)) {}", fields.join(" "));
        assert_eq!(start_time(&stat).unwrap(), 22);
    }
}
