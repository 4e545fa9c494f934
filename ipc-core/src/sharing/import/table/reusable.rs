//! Reuse of a lease's mappings for the next export of an equal layout: a state dict that is handed over repeatedly is in the
//! same allocations each time, in a new export.
//!
//! The importer names such a lease in its request. If the export has the allocations of the lease, the exporter sends no
//! handles, and the new lease has the same mappings: no allocation is sent, looked up or opened again. The importer compares
//! layouts only; it relies on the exporter for the allocations, as it would for the handles.

use std::sync::Arc;

use super::ImportTable;
use super::keys::{LeaseKey, OnDevice};
use super::lease::{KnownLease, Lease, LeaseRef};
use super::open_target::OpenTarget;
use super::regions::UnclaimedRegions;
use crate::model::error::{Error, Result};
use crate::model::lease::LeaseId;
use crate::os::process::ProcessIdentity;
use crate::sharing::Runtime;
use crate::sharing::import::link::Link;
use crate::wire::OpenedExport;
use crate::wire::descriptor::DescribedRegions;

/// The layout of a recent lease. It does not keep the lease open.
#[derive(Debug)]
pub(super) struct LayoutKey {
    lease: KnownLease,
    exporter: Arc<ProcessIdentity>,
    on: OnDevice,
    /// The regions that the reply was checked against and the mappings were made of.
    regions: DescribedRegions,
}

/// A reference to a lease of an equal layout.
pub(super) struct ReusableLease {
    runtime: &'static Runtime,
    lease: Option<LeaseRef>,
    regions: UnclaimedRegions<'static>,
}

impl ImportTable {
    /// Returns a lease of an equal layout over this link, on the same device. Only for several regions: for one there is little
    /// to save.
    pub(super) fn reusable_lease(
        &self,
        wanted: &OpenTarget<'_>,
        link: &Arc<Link>,
        on: OnDevice,
    ) -> Option<ReusableLease> {
        let regions = wanted.descriptor.regions();
        if regions.len() < 2 || wanted.alone {
            return None;
        }
        let layout =
            self.layouts.find(|known| known.is_on(wanted, on) && known.regions.as_regions() == regions)?;
        let usable = |lease: &Lease| Arc::ptr_eq(&lease.link, link);
        let runtime = link.runtime().here()?;
        let lease = self.leases.hold_known(layout.lease.upgrade()?, usable)?;
        // `None` after they have been closed by force.
        let Some(regions) = UnclaimedRegions::of(&runtime.imports, &lease.regions) else {
            runtime.imports.return_lease(runtime, lease, true);
            return None;
        };
        Some(ReusableLease { runtime, lease: Some(lease), regions })
    }

    /// Remembers a lease for exports of an equal layout.
    pub(super) fn remember_layout(&self, wanted: &OpenTarget<'_>, lease: &LeaseRef) {
        let (LeaseKey { exporter, on, .. }, regions) = (lease.key(), wanted.descriptor.regions());
        if regions.len() < 2 || wanted.alone {
            return;
        }
        let (lease, exporter, on) = (KnownLease::of(lease), Arc::clone(exporter), *on);
        let layout = LayoutKey { lease, exporter, on, regions: regions.to_owned() };
        self.layouts.remember(Arc::new(layout), |known| {
            known.is_on(wanted, on) && known.regions.as_regions() == regions
        });
    }
}

impl LayoutKey {
    /// Returns whether the lease is of the same exporter and device.
    fn is_on(&self, wanted: &OpenTarget<'_>, on: OnDevice) -> bool {
        *self.exporter == wanted.descriptor.contents.exporter && self.on == on
    }
}

impl ReusableLease {
    /// Returns the number of the lease.
    pub(super) fn lease(&self) -> Option<LeaseId> {
        self.lease.as_ref().map(|lease| lease.id)
    }
}

/// Returns the mappings of the lease that has the same allocations, as the exporter states.
pub(super) fn regions_of(
    reusable: Option<&ReusableLease>,
    grant: &OpenedExport,
    fds: usize,
) -> Result<UnclaimedRegions<'static>> {
    match reusable {
        Some(reusable) if grant.handles.is_empty() && fds == 0 => {
            Ok(reusable.regions.share().expect("the reference keeps them"))
        }
        Some(_) => {
            Err(Error::Protocol("it sent handles of memory that is open already, as it states".into()))
        }
        None => {
            Err(Error::Protocol("it named a lease whose memory it shares, and the request named none".into()))
        }
    }
}

impl Drop for ReusableLease {
    fn drop(&mut self) {
        let imports = &self.runtime.imports;
        if let Some(lease) = self.lease.take() {
            // No device work was submitted under this reference.
            imports.return_lease(self.runtime, lease, true);
        }
    }
}
