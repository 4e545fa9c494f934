//! The mappings and file descriptors of a process, as the kernel counts them.

use std::fs;
use std::io;

use serde::{Deserialize, Serialize};

/// The mappings and the file descriptors of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// The lines of `/proc/self/maps`.
    pub mappings: usize,
    /// The entries of `/proc/self/fd`.
    pub descriptors: usize,
}

impl Usage {
    /// Counts those of this process.
    pub fn of_this_process() -> io::Result<Self> {
        let mappings = fs::read_to_string("/proc/self/maps")?.lines().count();
        Ok(Self { mappings, descriptors: fs::read_dir("/proc/self/fd")?.count() })
    }
}
