//! The identity of a process, and whether it is alive.
//!
//! Pids are reused. A pid with the start time identifies one process until the host restarts.

use std::fs::File;
use std::io::Read;

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;

use super::descriptors::with_more_descriptors;

/// The identity of a process of this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ProcessId {
    /// The pid in this process's pid namespace.
    pub(crate) pid: u32,
    /// Start time in clock ticks after boot, field 22 of [`/proc/pid/stat`].
    ///
    /// [`/proc/pid/stat`]: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
    pub(crate) start: u64,
}

impl ProcessId {
    /// Returns the identity of this process. Where `/proc` is not mounted, the start time is 0, and other processes
    /// cannot open its handles.
    pub(crate) fn current() -> Self {
        let pid = std::process::id();
        Self::of(pid).unwrap_or(Self { pid, start: 0 })
    }

    /// Returns the process that has this pid now; `None` if there is none, or only a zombie.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        let stat = read_stat(pid).ok()?;
        // The second field is the program's name in parentheses and may hold anything.
        let after_name = stat.iter().rposition(|&byte| byte == b')')? + 1;
        let mut fields = std::str::from_utf8(&stat[after_name..]).ok()?.split_ascii_whitespace();
        let state = fields.next()?;
        let start = fields.nth(18)?.parse().ok()?;
        (!matches!(state, "Z" | "X" | "x")).then_some(Self { pid, start })
    }

    /// Returns whether exactly this process is alive.
    pub(crate) fn is_alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }
}

fn read_stat(pid: u32) -> Result<Vec<u8>, Errno> {
    let path = format!("/proc/{pid}/stat");
    // A process at its limit of descriptors must not take all others for dead.
    let file = with_more_descriptors(|| open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()))?;
    let mut stat = Vec::new();
    File::from(file).read_to_end(&mut stat).map_err(|_| Errno::SRCH)?;
    Ok(stat)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zombie_process_is_not_alive() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep starts");
        let id = ProcessId::of(child.id()).expect("the child is alive");
        assert!(id.is_alive());
        assert!(!ProcessId { start: id.start + 1, ..id }.is_alive());
        child.kill().expect("it can be killed");
        while ProcessId::of(id.pid).is_some() {
            std::thread::yield_now();
        }
        assert!(!id.is_alive());
        child.wait().expect("it is reaped");
    }

    #[test]
    fn current_process_is_alive() {
        assert!(ProcessId::current().is_alive());
    }
}
