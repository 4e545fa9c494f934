//! The machine, the driver and the time of a measurement.

use std::process::Command;

use anyhow::{Context, Result};
use device_ipc::Ipc;
use serde::Serialize;

/// The machine, the driver and the commit.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    /// UTC, as in RFC 3339.
    pub(super) date: String,
    pub(super) host: String,
    pub(super) kernel: String,
    pub(super) processor: String,
    pub(super) processors: usize,
    pub(super) backend: &'static str,
    pub(super) driver: String,
    pub(super) devices: Vec<String>,
    /// Whether the backend runs on hardware, not on a simulator.
    pub(super) hardware: bool,
    pub(super) version: &'static str,
    /// Commit of the source; ends in `+` if the working tree had changes.
    pub(super) commit: &'static str,
    /// Whether the program was compiled with optimisations.
    pub(super) optimised: bool,
}

impl Machine {
    pub(super) fn of(ipc: &Ipc, hardware: bool) -> Result<Self> {
        let name = rustix::system::uname();
        let info = ipc.backend().info();
        let date = Command::new("date").args(["-u", "+%FT%TZ"]).output().context("cannot start `date`")?;
        Ok(Self {
            date: String::from_utf8_lossy(&date.stdout).trim().to_owned(),
            host: name.nodename().to_string_lossy().into_owned(),
            kernel: name.release().to_string_lossy().into_owned(),
            processor: processor().unwrap_or_else(|| name.machine().to_string_lossy().into_owned()),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            backend: info.name,
            driver: info.version.clone(),
            devices: ipc.devices()?.iter().map(|device| device.name.clone()).collect(),
            hardware,
            version: env!("CARGO_PKG_VERSION"),
            commit: option_env!("DEVICE_IPC_COMMIT").unwrap_or("unknown"),
            optimised: !cfg!(debug_assertions),
        })
    }
}

fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}
