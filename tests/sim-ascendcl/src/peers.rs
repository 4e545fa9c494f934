//! Peer access that other processes of the machine have enabled.
//!
//! The driver counts the enables of all processes together (hicann/driver, `devdrv_enable_p2p_inner`), and the
//! vendor's samples rely on it: each of two processes enables one direction. Processes share their counts if their
//! machines have the same name (`shared-peers`). The counts of a process disappear with it, as in the driver.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, memfd_create};

use crate::status::{Outcome, Status, refuse};

const PREFIX: &str = "device-ipc-sim-ascendcl-peers-";

/// The directions that this process has enabled, readable for other processes.
#[derive(Debug)]
pub(crate) struct PublishedPeers(File);

impl PublishedPeers {
    /// # Errors
    /// 507899 if the memory file cannot be created.
    pub(crate) fn new(machine: &str) -> Outcome<Self> {
        match memfd_create(format!("{PREFIX}{machine}"), MemfdFlags::CLOEXEC) {
            Ok(file) => Ok(Self(File::from(file))),
            Err(error) => refuse(Status::RT_DRV_INTERNAL_ERROR, error.to_string()),
        }
    }

    pub(crate) fn set(&self, directions: impl Iterator<Item = (usize, usize)>) -> Outcome {
        let text: String = directions.map(|(from, to)| format!("{from}>{to}\n")).collect();
        let written = self.0.set_len(0).and_then(|()| self.0.write_all_at(text.as_bytes(), 0));
        written.or_else(|error| refuse(Status::RT_DRV_INTERNAL_ERROR, error.to_string()))
    }
}

/// Returns whether any process of a machine has enabled a direction.
pub(crate) fn is_enabled_by_any(machine: &str, (from, to): (usize, usize)) -> bool {
    let (name, line) = (format!("/memfd:{PREFIX}{machine}"), format!("{from}>{to}"));
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let files = processes.filter_map(|process| fs::read_dir(process.path().join("fd")).ok());
    let mut texts = files.flatten().flatten().filter_map(|file| {
        let target = fs::read_link(file.path()).ok()?;
        let is_one = target.to_string_lossy().split_once(" (").is_some_and(|(target, _)| target == name);
        if is_one { fs::read_to_string(file.path()).ok() } else { None }
    });
    texts.any(|text| text.lines().any(|enabled| enabled == line))
}
