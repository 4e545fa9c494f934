//! The memory in use on a device, over all processes of a node.
//!
//! A driver reports the free memory of the *device*, and tests find leaks by it: memory that an importer has not
//! closed, or that a handle pins, is in use although its exporter has freed it. Processes with the same value of
//! [`NODE_VARIABLE`] are one node. Without the variable a process counts only its own allocations, so that concurrent
//! tests do not disturb each other.
//!
//! The name of each memory file has its node, device and size, and `/proc` lists the files in use. So a process that
//! is killed leaves nothing behind.

use std::collections::HashMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The environment variable with the node of a process: at most 64 letters, digits, `-` and `_`. Processes of one
/// node account for the memory of its devices together.
pub const NODE_VARIABLE: &str = "DEVICE_IPC_MOCK_NODE";

const LONGEST_NAME: usize = 64;

/// Returns whether the name of a node is valid.
pub(crate) fn is_valid(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=LONGEST_NAME).contains(&name.len()) && name.bytes().all(allowed)
}

/// Returns the suffix of the name of a memory file with `bytes` bytes of a device.
pub(crate) fn tag(node: &str, uuid: [u8; 16], bytes: u64) -> String {
    format!(":{node}:{:032x}:{bytes}", u128::from_be_bytes(uuid))
}

/// Returns the bytes of a device that processes of a node have open or mapped. Processes of other users are not
/// visible.
pub(crate) fn used(node: &str, uuid: [u8; 16]) -> u64 {
    let prefix = format!("/memfd:{}:{node}:{:032x}:", super::object::NAME, u128::from_be_bytes(uuid));
    let mut files = HashMap::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        if process.file_name().as_bytes().first().is_some_and(u8::is_ascii_digit) {
            // The process may exit meanwhile.
            let _ = add_open(&process.path(), &prefix, &mut files);
            let _ = add_mapped(&process.path(), &prefix, &mut files);
        }
    }
    files.values().sum()
}

/// Adds the files that a process has open, by inode.
fn add_open(process: &Path, prefix: &str, files: &mut HashMap<u64, u64>) -> std::io::Result<()> {
    for entry in fs::read_dir(process.join("fd"))?.flatten() {
        let path = entry.path();
        let bytes = fs::read_link(&path).ok().and_then(|target| bytes_of(target.to_str()?, prefix));
        if let Some(bytes) = bytes
            && let Ok(file) = fs::metadata(&path)
        {
            files.insert(file.ino(), bytes);
        }
    }
    Ok(())
}

/// Adds the files that a process has mapped. The fields of a line are address, access, offset, device, inode, name.
fn add_mapped(process: &Path, prefix: &str, files: &mut HashMap<u64, u64>) -> std::io::Result<()> {
    for line in fs::read_to_string(process.join("maps"))?.lines() {
        let found = line.find(prefix).and_then(|at| bytes_of(&line[at..], prefix));
        if let (Some(bytes), Some(Ok(inode))) = (found, line.split_whitespace().nth(4).map(str::parse)) {
            files.insert(inode, bytes);
        }
    }
    Ok(())
}

/// Returns the size in a file name, to which the kernel appends ` (deleted)`.
fn bytes_of(name: &str, prefix: &str) -> Option<u64> {
    name.strip_prefix(prefix)?.split(' ').next()?.parse().ok()
}
