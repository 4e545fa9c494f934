//! The library where a program looks for it.

use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use device_ipc_sim_support::{built_library, hide_symbols, unfinished_name};

use crate::cann::Cann;

/// The shared library that Cargo built of this package.
///
/// # Errors
///
/// `NotFound`: the running test or program does not depend on this package.
pub fn library() -> io::Result<PathBuf> {
    built_library("libdevice_ipc_sim_ascendcl.so")
}

/// Puts the library into a directory as `libascendcl.so`, without the symbols that a version of CANN lacks, and where
/// that has it also as `libacl_rt.so`. Returns the path of the first.
///
/// # Errors
///
/// As [`library`], and what writing gives.
pub fn install(directory: &Path, cann: Cann) -> io::Result<PathBuf> {
    let path = directory.join("libascendcl.so");
    let lacking: Vec<&str> = cann.lacks().collect();
    hide_symbols(&library()?, &lacking, &path)?;
    let second = directory.join("libacl_rt.so");
    if cann.has_second_name() {
        let unfinished = unfinished_name(&second);
        symlink("libascendcl.so", &unfinished)?;
        std::fs::rename(&unfinished, &second)?;
    } else {
        match std::fs::remove_file(&second) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(path)
}
