//! Installation of the library in a directory.

use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use device_ipc_sim_support::{built_library, hide_symbols, unfinished_name};

use crate::cann::Cann;

/// Returns the path of the shared library that Cargo built of this package.
///
/// # Errors
///
/// `NotFound` where the running test or program does not depend on this package.
pub fn library() -> io::Result<PathBuf> {
    built_library("libdevice_ipc_sim_ascendcl.so")
}

/// Copies the library to a directory as `libascendcl.so`, without the symbols that a version of CANN lacks, and
/// also as `libacl_rt.so` if the version has that name. Returns the path of the former.
///
/// # Errors
///
/// As [`library`], and errors of writing.
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
