//! File descriptors: duplication, and the limit on their number.

use std::os::fd::{AsFd, OwnedFd};

use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::model::EngineError;

/// Duplicates a descriptor.
pub(crate) fn duplicate(file: impl AsFd) -> Result<OwnedFd, EngineError> {
    duplicate_from(file, 0)
}

/// Runs `attempt`, and once more with the soft limit of descriptors raised if the limit is reached.
///
/// Each allocation keeps a descriptor open. The usual soft limit of 1024 exists for `select`, which is not used here.
pub(crate) fn with_more_descriptors(attempt: impl Fn() -> Result<OwnedFd, Errno>) -> Result<OwnedFd, Errno> {
    let first = attempt();
    if !matches!(first, Err(Errno::MFILE)) {
        return first;
    }
    let maximum = getrlimit(Resource::Nofile).maximum;
    let raise_to = |current| setrlimit(Resource::Nofile, Rlimit { current, maximum }).is_ok();
    // A hard limit may be infinite, or above the kernel's maximum; a soft limit may not.
    if raise_to(maximum) || raise_to(kernel_limit()) { attempt() } else { first }
}

/// Returns the hard limit on the number of descriptors, or `None` if there is none.
pub(crate) fn maximum_descriptors() -> Option<u64> {
    getrlimit(Resource::Nofile).maximum
}

/// Returns the maximum number of descriptors of a process (`fs.nr_open`, proc(5)).
fn kernel_limit() -> Option<u64> {
    std::fs::read_to_string("/proc/sys/fs/nr_open").ok()?.trim().parse().ok()
}

/// Duplicates a descriptor to the lowest free number from `lowest` on.
pub(crate) fn duplicate_from(file: impl AsFd, lowest: i32) -> Result<OwnedFd, EngineError> {
    // The limit itself as the lower bound is invalid, which means here that the limit is reached.
    let attempt = || {
        fcntl_dupfd_cloexec(&file, lowest)
            .map_err(|errno| if errno == Errno::INVAL { Errno::MFILE } else { errno })
    };
    with_more_descriptors(attempt).map_err(EngineError::system("fcntl(F_DUPFD)"))
}
