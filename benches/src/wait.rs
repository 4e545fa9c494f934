//! Waits with a timeout, for both processes of a row.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// Timeout of each step of a row.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(300);

/// Waits until the work that dropped mappings left to the worker is done, so that none of it runs during the next
/// measurement.
pub(crate) fn settle() -> Result<()> {
    Ok(device_ipc::close_unused(TIMEOUT)?)
}

/// Polls the condition until it holds.
pub(crate) fn until(condition: &str, mut holds: impl FnMut() -> bool) -> Result<()> {
    let begin = Instant::now();
    while !holds() {
        if begin.elapsed() > TIMEOUT {
            bail!("waiting until {condition}: timed out after {} s", TIMEOUT.as_secs());
        }
        std::thread::yield_now();
    }
    Ok(())
}
