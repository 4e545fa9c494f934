//! The machine, the driver and the time of a measurement.

use std::time::{SystemTime, UNIX_EPOCH};

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
        let seconds = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .context("the system clock is set to a time before 1970")?;
        Ok(Self {
            date: utc(seconds.as_secs()),
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

/// Formats seconds since 1970 as date and time. (The algorithm is Howard Hinnant's `civil_from_days`.)
fn utc(seconds: u64) -> String {
    let (days, of_day) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn utc_formats_year_ends_and_leap_years() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_827_696), "2000-02-29T12:34:56Z");
        assert_eq!(utc(1_767_225_599), "2025-12-31T23:59:59Z");
        assert_eq!(utc(1_767_225_600), "2026-01-01T00:00:00Z");
    }
}
