//! Where the library is, and how a program comes to load it.

use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// The shared library, where Cargo put it for the running test or program.
///
/// # Errors
///
/// `NotFound`, naming the places.
pub fn library() -> io::Result<PathBuf> {
    device_ipc_sim_support::built_library("libdevice_ipc_sim_cuda.so")
}

/// Makes a folder, which is there and empty, one for `LD_LIBRARY_PATH`: with `libcuda.so.1` and `libcuda.so`. The path of
/// the former is returned.
///
/// # Errors
///
/// Those of making links.
pub fn install(folder: &Path) -> io::Result<PathBuf> {
    link(&library()?, folder)
}

/// As [`install`], with a library that lacks these functions.
///
/// # Errors
///
/// As `install`, and `NotFound` for a function that there is not.
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
