//! Memory files that other processes sent, checked before they are mapped or read.

use std::os::fd::AsFd;

use rustix::fs::{SealFlags, fcntl_get_seals, fstat, fstatfs};

use crate::model::error::{Error, Result};

/// The file system of memory files (`TMPFS_MAGIC` of `linux/magic.h`). Not that of huge pages: touching a hole of such a file
/// raises SIGBUS when no huge page is free.
const TMPFS: u64 = 0x0102_1994;

/// Checks that a file stays what it is while this process uses it: a memory file of at least `bytes` bytes that no process
/// can make shorter, with these seals besides. Returns its size in bytes.
///
/// Touching any byte of it then gives a value. A page that the sender left out is allocated, and charged to the process that
/// touches it first; it cannot be missing for want of space, since a file on a tmpfs with a limit on its size cannot be sealed.
///
/// # Errors
///
/// [`Error::Protocol`], which names the file by `what`.
pub(crate) fn check(file: impl AsFd, seals: SealFlags, bytes: u64, what: &str) -> Result<u64> {
    let misfit = |why: &str| Err(Error::Protocol(format!("{what} is no sealed memory file: {why}")));
    let file = file.as_fd();
    // The seals first: a file of a FUSE server has none, and its server would decide how long fstatfs takes.
    let Ok(set) = fcntl_get_seals(file) else { return misfit("it is not on tmpfs") };
    if !fstatfs(file).is_ok_and(|system| system.f_type as u64 == TMPFS) {
        return misfit("it is not on tmpfs");
    }
    if !set.contains(seals | SealFlags::SHRINK) {
        return misfit("it is not sealed against changes of its size");
    }
    let size = fstat(file).ok().and_then(|stat| u64::try_from(stat.st_size).ok()).unwrap_or_default();
    if size < bytes {
        return misfit(&format!("it has {size} bytes, and {bytes} are needed"));
    }
    Ok(size)
}

#[cfg(test)]
mod tests;
