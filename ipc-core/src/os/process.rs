//! The identity of a process, unique across hosts, containers and time.

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
use crate::os::process_epoch;

/// The identity of a process, different from that of any other process on any host at any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProcessIdentity {
    /// The machine; persists across reboots.
    pub host: HostId,
    /// The current boot of the machine: `/proc/sys/kernel/random/boot_id`.
    pub boot: [u8; 16],
    /// Inode of the pid namespace of `pid`.
    pub pid_namespace: u64,
    /// Inode of the network namespace, which scopes abstract sockets.
    pub net_namespace: u64,
    /// The process id in the process's own pid namespace.
    pub pid: u32,
    /// The start time of the process in clock ticks after boot: field 22 of `/proc/PID/stat` as the process itself reads it.
    /// execve(2) changes neither the start time nor the process id, but closes the sockets and so ends the exports.
    pub start_time: u64,
}

/// Hashes the fields that differ between processes of one machine.
impl Hash for ProcessIdentity {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u32(self.pid);
        state.write_u64(self.start_time);
    }
}

impl ProcessIdentity {
    /// Returns the identity of this process. It is read once; a forked child reads its own.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if `/proc` is not available.
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

    /// Returns whether the process is known to have exited.
    ///
    /// False if this process cannot determine it and must rely on the socket: the process belongs to another pid namespace,
    /// `/proc` hides it (`hidepid`), or its time namespace shows another start time, which distinguishes it from a later
    /// process with the same id (time_namespaces(7)).
    pub(crate) fn has_exited(&self, local: &Self) -> bool {
        if self.boot != local.boot || self.pid_namespace != local.pid_namespace {
            return false;
        }
        match read_short(&format!("/proc/{}/stat", self.pid)) {
            Ok(stat) => {
                start_time(&stat).is_ok_and(|started| started != self.start_time)
                    && is_in_own_time_namespace(self.pid)
            }
            Err(error) => error.kind() == std::io::ErrorKind::NotFound && !exists(self.pid),
        }
    }
}

/// Returns whether a process with this id exists, even if `/proc` hides it. A pidfd needs no permission.
fn exists(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| !matches!(pidfd_open(pid, PidfdFlags::empty()), Err(Errno::SRCH)))
}

/// Returns whether the process is known to be in this process's time namespace. In another one, the start time in its
/// descriptors has another offset.
fn is_in_own_time_namespace(pid: u32) -> bool {
    let Ok(here) = fs::read_link("/proc/self/ns/time") else {
        // The kernel has no time namespaces.
        return true;
    };
    fs::read_link(format!("/proc/{pid}/ns/time")).is_ok_and(|there| there == here)
}

fn read_text(path: &str) -> Result<String> {
    fs::read_to_string(path).map_err(|error| Error::io(format!("reading {path}"), error))
}

/// Reads a file of at most 4 KiB with three system calls.
fn read_short(path: &str) -> std::io::Result<String> {
    let mut bytes = [0; 4096];
    let read = fs::File::open(path)?.read(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes[..read]).into_owned())
}

fn inode(path: &str) -> Result<u64> {
    Ok(fs::metadata(path).map_err(|error| Error::io(format!("reading {path}"), error))?.ino())
}

/// Parses field 22. The program name in field 2 may contain blanks and parentheses, so counting starts after the last
/// parenthesis.
fn start_time(stat: &str) -> Result<u64> {
    stat.rsplit_once(')')
        .and_then(|(_, rest)| rest.split_whitespace().nth(19))
        .and_then(|field| field.parse().ok())
        .ok_or_else(|| Error::Protocol("/proc/PID/stat has no start time".into()))
}

/// The process that owns a guard, so that inherited guards do nothing in a forked child. Makes no system call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner(u32);

impl Owner {
    pub(crate) fn current() -> Self {
        Self(process_epoch())
    }

    /// Returns whether this process owns the guard; false in a forked child of the owner.
    pub(crate) fn is_here(&self) -> bool {
        self.0 == process_epoch()
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.is_here() { Ok(()) } else { Err(Error::Forked) }
    }
}

#[cfg(test)]
mod tests;
