//! Directories of a test.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// A directory that every user may look into, removed with its contents.
#[derive(Debug)]
pub struct Directory(PathBuf);

impl Directory {
    /// Creates a directory with `name`, which is unique in the program, as a part of its path.
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("device-ipc-test-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).expect("a directory");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("it is ours");
        Self(path)
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Counts its entries.
    pub fn entries(&self) -> usize {
        fs::read_dir(&self.0).expect("it is there").count()
    }

    /// Returns the command by which an agent keeps its sockets here.
    pub fn ipc(&self) -> String {
        format!("ipc directory={}", self.0.display())
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
