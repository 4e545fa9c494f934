//! The sender's guard of a bundle.

use std::time::Duration;

use crate::model::error::{Error, Result};
use crate::model::lease::Holders;
use crate::sharing::export::{Hanging, Published, close_all};
use crate::transport::Deadline;
use crate::transport::check_may_wait;
use crate::wire::bundle::BundleDescriptor;

/// A bundle: while it lives, importers may open it. It owns what keeps the memory allocated, until the last importer has let
/// go.
///
/// Dropping it does not wait, as with an [`Export`](crate::Export); use [`close`](Self::close) to wait, or
/// [`wait_released`](Self::wait_released) to keep it open until the readers are done.
#[derive(Debug)]
#[must_use = "dropping the bundle ends it"]
pub struct BundleExport {
    descriptor: BundleDescriptor,
    parts: Vec<Published>,
}

impl BundleExport {
    pub(super) fn new(descriptor: BundleDescriptor, parts: Vec<Published>) -> Self {
        Self { descriptor, parts }
    }

    /// What an importer needs; send it by any road.
    pub const fn descriptor(&self) -> &BundleDescriptor {
        &self.descriptor
    }

    /// Returns the processes that hold a lease on memory of the bundle now: an importer once for each device that the memory
    /// lives on. Idle leases count, as for [`Export::holders`](crate::Export::holders).
    pub fn holders(&self) -> Holders {
        let mut holders = Holders::default();
        self.parts.iter().for_each(|part| holders.add(part.holders()));
        holders
    }

    /// Waits until somebody has opened the bundle and nobody holds any of it any longer. It stays open.
    ///
    /// # Errors
    ///
    /// As [`Export::wait_released`](crate::Export::wait_released).
    pub fn wait_released(&self, timeout: Duration) -> Result<()> {
        check_may_wait("BundleExport::wait_released", timeout)?;
        let deadline = Deadline::after(timeout);
        let mut held = None;
        for part in &self.parts {
            if let Err(holders) = part.wait_released(deadline)? {
                held.get_or_insert_with(Holders::default).add(holders);
            }
        }
        held.map_or(Ok(()), |holders| Err(Error::StillHeld { after: timeout, holders }))
    }

    /// Ends the bundle and waits until nobody holds any of it and its owners have been dropped.
    ///
    /// # Errors
    ///
    /// As [`Export::close`](crate::Export::close).
    pub fn close(self, timeout: Duration) -> Result<()> {
        self.close_with(timeout, Hanging::Keep)
    }

    /// As [`close`](Self::close), with a choice of what becomes of the memory when somebody still holds it.
    ///
    /// # Errors
    ///
    /// As [`Export::close_with`](crate::Export::close_with).
    pub fn close_with(self, timeout: Duration, hanging: Hanging) -> Result<()> {
        close_all(self.parts, timeout, hanging)
    }
}
