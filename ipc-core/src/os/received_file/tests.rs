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
fn unsealed_small_or_foreign_file_is_rejected() {
    let good = file(MemfdFlags::empty(), SealFlags::SHRINK | SealFlags::GROW).unwrap();
    assert_eq!(check(&good, SealFlags::empty(), HUGE, "the page").unwrap(), HUGE);
    assert!(why(&good, SealFlags::empty(), HUGE + 1).contains("2097152 B, but 2097153 B"));
    assert!(why(&good, SealFlags::WRITE, HUGE).contains("not sealed"));
    let growing = file(MemfdFlags::empty(), SealFlags::GROW).unwrap();
    assert!(why(&growing, SealFlags::empty(), HUGE).contains("the page is not a sealed memory file"));
    // A file on another file system, and huge pages.
    assert!(why(std::fs::File::open("/proc/self/status").unwrap(), SealFlags::empty(), 0).contains("tmpfs"));
    match file(MemfdFlags::HUGETLB, SealFlags::SHRINK) {
        Ok(huge) => assert!(why(huge, SealFlags::empty(), HUGE).contains("not on tmpfs")),
        Err(error) => println!("skipped huge pages: this kernel has none: {error}"),
    }
}

#[test]
fn file_on_size_limited_tmpfs_is_rejected() {
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
