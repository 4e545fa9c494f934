//! The location of the library, and directories from which programs load it.

use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Returns the path of the shared library that Cargo built for the running test or program.
///
/// # Errors
///
/// `NotFound` with the searched paths.
pub fn library() -> io::Result<PathBuf> {
    device_ipc_sim_support::built_library("libdevice_ipc_sim_cuda.so")
}

/// Links `libcuda.so.1` and `libcuda.so` in an existing empty folder, for use in `LD_LIBRARY_PATH`. Returns the
/// path of the former.
///
/// # Errors
///
/// Errors of creating links.
pub fn install(folder: &Path) -> io::Result<PathBuf> {
    link(&library()?, folder)
}

/// Installs a copy of the library that lacks these functions, as [`install`] does.
///
/// # Errors
///
/// As `install`, and `NotFound` for an unknown function.
pub fn install_without(folder: &Path, functions: &[&str]) -> io::Result<PathBuf> {
    let older = folder.join("libcuda-older.so");
    device_ipc_sim_support::hide_symbols(&library()?, functions, &older)?;
    link(&older, folder)
}

fn link(library: &Path, folder: &Path) -> io::Result<PathBuf> {
    symlink(library, folder.join("libcuda.so"))?;
    let versioned = folder.join("libcuda.so.1");
    symlink(library, &versioned)?;
    Ok(versioned)
}
