//! Leases on memory that its exporter can revoke, and the file lock between importer and exporter.
//!
//! Work of an importer holds a shared lock on the memory file while it accesses the memory. The exporter first
//! marks the memory as freed or revoked and then waits for the exclusive lock.

use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};

use crate::model::Revocation;
use crate::shared::{ExportEpoch, Page};
use crate::system::lock;

/// How long a revoking exporter waits for running work of importers. An importer that takes longer is suspended.
const REVOCATION_TIMEOUT: Duration = Duration::from_secs(1);

/// A lease of an importer on memory that its exporter can revoke.
#[derive(Debug)]
pub(crate) struct Lease {
    /// A file description that no other process uses, for the shared lock. The kernel releases the lock when
    /// this process dies.
    file: OwnedFd,
    /// A pidfd: readable once the exporter has exited.
    exporter: OwnedFd,
    /// The epoch in which the export was made.
    epoch: ExportEpoch,
    /// Number of streams that access the memory. The first takes the lock, the last releases it.
    holders: Mutex<usize>,
}

impl Lease {
    /// Creates a lease from a private file description of the memory file and the exporter's pidfd.
    pub(crate) fn new(file: OwnedFd, exporter: OwnedFd, epoch: ExportEpoch) -> Self {
        Self { file, exporter, epoch, holders: Mutex::new(0) }
    }

    /// Acquires the lease for one access.
    pub(super) fn acquire(&self, page: &Page) -> Result<AccessGuard<'_>, Revocation> {
        let mut holders = lock(&self.holders);
        if *holders == 0 {
            // The exporter sets its flag before it requests the lock, so a check after ours was granted sees it.
            // If locking fails there is no exporter to lock against.
            let _ = flock(&self.file, FlockOperation::LockShared);
        }
        if let Some(why) = self.revocation(page) {
            if *holders == 0 {
                let _ = flock(&self.file, FlockOperation::Unlock);
            }
            return Err(why);
        }
        *holders += 1;
        Ok(AccessGuard(Some(self)))
    }

    fn release(&self) {
        let mut holders = lock(&self.holders);
        *holders -= 1;
        if *holders == 0 {
            let _ = flock(&self.file, FlockOperation::Unlock);
        }
    }

    fn revocation(&self, page: &Page) -> Option<Revocation> {
        let mut exporter = [PollFd::new(&self.exporter, PollFlags::IN)];
        let exited = poll(&mut exporter, Some(&Timespec::default())).is_ok_and(|ready| ready > 0);
        page.revocation(self.epoch).or(exited.then_some(Revocation::ExporterExited))
    }
}

/// The right to access one mapping until the guard is dropped.
#[derive(Debug)]
pub(super) struct AccessGuard<'a>(Option<&'a Lease>);

impl AccessGuard<'_> {
    /// Creates the guard of a mapping that no exporter can revoke.
    pub(super) fn unleased() -> Self {
        Self(None)
    }
}

impl Drop for AccessGuard<'_> {
    fn drop(&mut self) {
        if let Some(lease) = self.0 {
            lease.release();
        }
    }
}

/// Waits until no work of an importer accesses memory that was just marked as freed or revoked.
pub(crate) fn wait_for_importers(file: &OwnedFd) {
    let deadline = Instant::now() + REVOCATION_TIMEOUT;
    // Not a blocking lock: an importer that is suspended by a signal must not suspend the exporter.
    while flock(file, FlockOperation::NonBlockingLockExclusive).is_err() {
        if Instant::now() >= deadline {
            return;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    // Cannot fail for a lock that this process holds.
    let _ = flock(file, FlockOperation::Unlock);
}

/// Revokes all exports of memory that its owner keeps.
pub(crate) fn revoke_exports(page: &Page, file: &OwnedFd) {
    page.revoke_exports();
    wait_for_importers(file);
}
