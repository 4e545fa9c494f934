//! Leases whose memory looks like what is opened next: a state dict that is handed over again and again lies in the same
//! allocations each time, in an export of its own.
//!
//! The exporter is told of such a lease. Where the export's allocations are those of the lease, it sends no handles, and
//! the new lease has the same mappings: nothing is sent, looked up or opened for each of them. What the importer knows of
//! the lease is only that it looks the same; that it is the same is the exporter's word, as the handles would be.

use std::sync::Arc;

use super::ImportTable;
use super::begin::Wanted;
use super::keys::{LeaseKey, OnDevice};
use super::lease::{HeldLease, KnownLease, Lease};
use super::regions::Untaken;
use crate::model::error::{Error, Result};
use crate::model::lease::LeaseId;
use crate::os::process::ProcessIdentity;
use crate::sharing::Runtime;
use crate::sharing::import::link::Link;
use crate::wire::Grant;
use crate::wire::descriptor::DescribedRegions;

/// What is remembered of the leases that began last. It keeps none of them open.
#[derive(Debug)]
pub(super) struct Looks {
    lease: KnownLease,
    exporter: Arc<ProcessIdentity>,
    on: OnDevice,
    /// What the grant was checked against, and the mappings were made of.
    regions: DescribedRegions,
}

/// A hold on a lease that looks like what is opened.
pub(super) struct Alike {
    runtime: &'static Runtime,
    lease: Option<HeldLease>,
    regions: Untaken<'static>,
}

impl ImportTable {
    /// A lease over this link, on the same device, that looks like what is wanted: of several regions, as there is little
    /// to be spared for one.
    pub(super) fn alike(&self, wanted: &Wanted<'_>, link: &Arc<Link>, on: OnDevice) -> Option<Alike> {
        let regions = wanted.descriptor.regions;
        if regions.len() < 2 || wanted.alone {
            return None;
        }
        let looks =
            self.looks.find(|known| known.is_on(wanted, on) && known.regions.as_regions() == regions)?;
        let usable = |lease: &Lease| Arc::ptr_eq(&lease.link, link);
        let runtime = Runtime::get().ok()?;
        let lease = self.leases.hold_known(looks.lease.upgrade()?, usable)?;
        // Not where they have been closed by force.
        let Some(regions) = Untaken::of(&runtime.imports, &lease.regions) else {
            runtime.imports.let_go(runtime, lease, true);
            return None;
        };
        Some(Alike { runtime, lease: Some(lease), regions })
    }

    /// From now on this lease is the one that looks so.
    pub(super) fn remember_looks(&self, wanted: &Wanted<'_>, lease: &HeldLease) {
        let (LeaseKey { exporter, on, .. }, regions) = (lease.key(), wanted.descriptor.regions);
        if regions.len() < 2 || wanted.alone {
            return;
        }
        let (lease, exporter, on) = (KnownLease::of(lease), Arc::clone(exporter), *on);
        let looks = Looks { lease, exporter, on, regions: regions.to_owned() };
        self.looks.remember(Arc::new(looks), |known| {
            known.is_on(wanted, on) && known.regions.as_regions() == regions
        });
    }
}

impl Looks {
    fn is_on(&self, wanted: &Wanted<'_>, on: OnDevice) -> bool {
        *self.exporter == *wanted.descriptor.exporter && self.on == on
    }
}

impl Alike {
    pub(super) fn lease(&self) -> Option<LeaseId> {
        self.lease.as_ref().map(|lease| lease.id)
    }
}

/// The mappings of the lease that the exporter says to have the same allocations.
pub(super) fn regions_of(alike: Option<&Alike>, grant: &Grant, fds: usize) -> Result<Untaken<'static>> {
    match alike {
        Some(alike) if grant.handles.is_empty() && fds == 0 => {
            Ok(alike.regions.share().expect("they have not been given up, but are held here"))
        }
        Some(_) => Err(Error::Protocol("it sent handles of memory that it says to be open already".into())),
        None => Err(Error::Protocol("it named a lease whose memory it shares, and was told of none".into())),
    }
}

impl Drop for Alike {
    fn drop(&mut self) {
        let imports = &self.runtime.imports;
        if let Some(lease) = self.lease.take() {
            // No device work was submitted under this hold.
            imports.let_go(self.runtime, lease, true);
        }
    }
}
