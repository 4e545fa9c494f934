//! Validation of memory files from other processes before they are mapped or read.

use std::os::fd::AsFd;

use rustix::fs::{SealFlags, fcntl_get_seals, fstat, fstatfs};

use crate::model::error::{Error, Result};

/// The file system of memory files (`TMPFS_MAGIC` of `linux/magic.h`). Huge-page files are excluded: accessing a hole of such a
/// file raises SIGBUS when no huge page is free.
const TMPFS: u64 = 0x0102_1994;

/// Checks that `file` is a memory file of at least `bytes` bytes that no process can shrink, and returns its size in bytes.
///
/// The file must also have the given seals. Accessing any byte of it then succeeds. The kernel allocates a missing page and
/// charges it to the process that accesses it first; the allocation cannot fail for lack of space, because files on a tmpfs
/// with a size limit cannot be sealed.
///
/// # Errors
///
/// [`Error::Protocol`], which names the file by `what`.
pub(crate) fn check(file: impl AsFd, seals: SealFlags, bytes: u64, what: &str) -> Result<u64> {
    let misfit = |why: &str| Err(Error::Protocol(format!("{what} is not a sealed memory file: {why}")));
    let file = file.as_fd();
    // Seals come first: a file of a FUSE server has none, and the server could delay fstatfs.
    let Ok(set) = fcntl_get_seals(file) else { return misfit("it is not on tmpfs") };
    if !fstatfs(file).is_ok_and(|system| system.f_type as u64 == TMPFS) {
        return misfit("it is not on tmpfs");
    }
    if !set.contains(seals | SealFlags::SHRINK) {
        return misfit("it is not sealed against shrinking");
    }
    let size = fstat(file).ok().and_then(|stat| u64::try_from(stat.st_size).ok()).unwrap_or_default();
    if size < bytes {
        return misfit(&format!("it has {size} B, but {bytes} B are needed"));
    }
    Ok(size)
}

#[cfg(test)]
mod tests;
