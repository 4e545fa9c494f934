//! Who a process is, and whether it still runs.
//!
//! Why: a pid alone is reused. Together with the start time it names one
//! process for as long as the host runs.

use std::fs::File;
use std::io::Read;

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;

use super::descriptors::with_more_descriptors;

/// A process of this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ProcessId {
    /// The pid as this process's pid namespace numbers it.
    pub(crate) pid: u32,
    /// Start time in clock ticks after boot, field 22 of [`/proc/pid/stat`].
    ///
    /// [`/proc/pid/stat`]: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
    pub(crate) start: u64,
}

impl ProcessId {
    /// This process. The start time is 0 where `/proc` is not mounted; opening then fails for others.
    pub(crate) fn current() -> Self {
        let pid = std::process::id();
        Self::of(pid).unwrap_or(Self { pid, start: 0 })
    }

    /// The process that has this pid now; `None` if there is none, or only its remains.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        let stat = read_stat(pid).ok()?;
        // The second field is the program's name in parentheses and may hold anything.
        let after_name = stat.iter().rposition(|&byte| byte == b')')? + 1;
        let mut fields = std::str::from_utf8(&stat[after_name..]).ok()?.split_ascii_whitespace();
        let state = fields.next()?;
        let start = fields.nth(18)?.parse().ok()?;
        (!matches!(state, "Z" | "X" | "x")).then_some(Self { pid, start })
    }

    /// Whether this very process still runs.
    pub(crate) fn is_alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }
}

fn read_stat(pid: u32) -> Result<Vec<u8>, Errno> {
    let path = format!("/proc/{pid}/stat");
    // A process that has met its own limit of descriptors must not take all others for dead.
    let file = with_more_descriptors(|| open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()))?;
    let mut stat = Vec::new();
    File::from(file).read_to_end(&mut stat).map_err(|_| Errno::SRCH)?;
    Ok(stat)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_ended_is_not_alive_even_before_it_is_reaped() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep starts");
        let id = ProcessId::of(child.id()).expect("it runs");
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
    fn the_current_process_is_alive() {
        assert!(ProcessId::current().is_alive());
    }
}
