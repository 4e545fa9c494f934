//! File descriptors: duplication, and the limit on their number.

use std::os::fd::{AsFd, OwnedFd};

use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::model::EngineError;

/// A second descriptor of the same file.
pub(crate) fn duplicate(file: impl AsFd) -> Result<OwnedFd, EngineError> {
    duplicate_from(file, 0)
}

/// Each allocation keeps a descriptor, and the usual soft limit of 1024 is there for `select`, not for us:
/// raises it to the hard limit when it is met.
pub(crate) fn with_more_descriptors(attempt: impl Fn() -> Result<OwnedFd, Errno>) -> Result<OwnedFd, Errno> {
    let first = attempt();
    if !matches!(first, Err(Errno::MFILE)) {
        return first;
    }
    let maximum = getrlimit(Resource::Nofile).maximum;
    let raise_to = |current| setrlimit(Resource::Nofile, Rlimit { current, maximum }).is_ok();
    // A hard limit may be above what the kernel gives any process, or none at all; a soft one may not.
    if raise_to(maximum) || raise_to(kernel_limit()) { attempt() } else { first }
}

/// The most descriptors that the kernel gives a process (`fs.nr_open`, proc(5)).
fn kernel_limit() -> Option<u64> {
    std::fs::read_to_string("/proc/sys/fs/nr_open").ok()?.trim().parse().ok()
}

/// A duplicate with the lowest free number from `lowest` on.
pub(crate) fn duplicate_from(file: impl AsFd, lowest: i32) -> Result<OwnedFd, EngineError> {
    // The limit itself as the lower bound is invalid, which here means the same as having met it.
    let attempt = || {
        fcntl_dupfd_cloexec(&file, lowest)
            .map_err(|errno| if errno == Errno::INVAL { Errno::MFILE } else { errno })
    };
    with_more_descriptors(attempt).map_err(EngineError::system("fcntl(F_DUPFD)"))
}
