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
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;

    const HUGE: u64 = 2 << 20;

    fn file(flags: MemfdFlags, seals: SealFlags) -> rustix::io::Result<OwnedFd> {
        let file = memfd_create("device-ipc-test", flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, HUGE)?;
        fcntl_add_seals(&file, seals)?;
        Ok(file)
    }

    fn why(file: impl AsFd, seals: SealFlags, bytes: u64) -> String {
        check(file, seals, bytes, "the page").unwrap_err().to_string()
    }

    #[test]
    fn file_that_could_fail_while_it_is_used_is_refused() {
        let good = file(MemfdFlags::empty(), SealFlags::SHRINK | SealFlags::GROW).unwrap();
        assert_eq!(check(&good, SealFlags::empty(), HUGE, "the page").unwrap(), HUGE);
        assert!(why(&good, SealFlags::empty(), HUGE + 1).contains("2097152 bytes, and 2097153"));
        assert!(why(&good, SealFlags::WRITE, HUGE).contains("not sealed"));
        let growing = file(MemfdFlags::empty(), SealFlags::GROW).unwrap();
        assert!(why(&growing, SealFlags::empty(), HUGE).contains("the page is no sealed memory file"));
        // A file on a tmpfs that may be full, and one on no tmpfs.
        assert!(why(std::fs::File::open("/proc/self/exe").unwrap(), SealFlags::empty(), 0).contains("tmpfs"));
        match file(MemfdFlags::HUGETLB, SealFlags::SHRINK) {
            Ok(huge) => assert!(why(huge, SealFlags::empty(), HUGE).contains("not on tmpfs")),
            Err(error) => println!("huge pages are left out: this kernel has none: {error}"),
        }
    }

    #[test]
    fn file_on_a_tmpfs_with_a_limit_cannot_pass() {
        let path = format!("/dev/shm/device-ipc-test-{}", std::process::id());
        let Ok(made) = std::fs::File::create_new(&path) else {
            println!("skipped: /dev/shm cannot be written");
            return;
        };
        std::fs::remove_file(&path).unwrap();
        made.set_len(HUGE).unwrap();
        assert!(fcntl_add_seals(&made, SealFlags::SHRINK).is_err());
        check(&made, SealFlags::empty(), HUGE, "the page").unwrap_err();
    }
}
