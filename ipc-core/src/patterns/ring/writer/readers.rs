//! A handle to the readers of a ring.

use std::sync::Arc;
use std::time::Duration;

#[cfg(doc)]
use super::Ring;
use crate::model::error::{Error, Result};
use crate::model::lease::LeaseId;
use crate::patterns::ring::members::{Members, ReaderPosition};
use crate::sharing::RuntimeRef;
use crate::transport::{Deadline, check_may_wait};

/// A handle to the readers of a ring, for any thread. It keeps neither the ring nor its memory alive.
///
/// # Examples
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let ipc = device_ipc_core::Ipc::with_backend(device_ipc_mock::MockBackend::from_spec("devices=1")?);
/// # let ring = ipc.ring(ipc.allocate(0, 512)?).start()?;
/// let readers = ring.watch();
/// let watchdog = std::thread::spawn(move || {
///     for reader in readers.readers_behind() {
///         eprintln!("{reader}"); // readers.dismiss(reader.lease) would continue without it
///     }
/// });
/// # watchdog.join().expect("no panic");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RingReaders {
    pub(super) members: Arc<Members>,
    pub(super) slots: u32,
    pub(super) runtime: RuntimeRef,
}

impl RingReaders {
    /// Returns the number of readers.
    pub fn count(&self) -> usize {
        if self.runtime.is_here() { self.members.count() } else { 0 }
    }

    /// Waits for readers; see [`Ring::wait_readers`].
    ///
    /// # Errors
    ///
    /// As for [`Ring::wait_readers`].
    pub fn wait_readers(&self, count: usize, timeout: Duration) -> Result<()> {
        self.runtime.check()?;
        check_may_wait("waiting for readers", timeout)?;
        self.members.wait(count, Deadline::after(timeout).at).map_err(|found| Error::Timeout {
            what: format!("a count of {count} readers of the ring"),
            after: timeout,
            detail: format!("; {found} have opened it"),
        })
    }

    /// Returns the readers that the next write waits for; see [`Ring::readers_behind`].
    pub fn readers_behind(&self) -> Vec<ReaderPosition> {
        if !self.runtime.is_here() {
            return Vec::new();
        }
        let previous = self.members.next_to_be_released(self.slots);
        previous.map(|previous| self.members.behind(previous)).unwrap_or_default()
    }

    /// Dismisses a reader; see [`Ring::dismiss`].
    pub fn dismiss(&self, reader: LeaseId) -> bool {
        self.runtime.is_here() && self.members.dismiss(reader)
    }
}
