//! The imports of this process: links to brokers, leases, and driver mappings.
//!
//! There is one lease for each export, device and access, for any number of mappings; it is kept idle after the last of them,
//! so that the next open costs neither a message nor a driver call. There is one driver mapping for each set of allocations,
//! device and access: opening another export of an open allocation costs a message and no driver call.

mod ahead;
mod begin;
mod by_thread;
mod deferred;
mod exit;
mod keys;
mod lease;
mod links;
mod open_ranges;
mod open_target;
mod range;
mod regions;
mod reports;
mod reserved;
mod reusable;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

pub(super) use lease::{KnownLease, LeaseRef};
pub(super) use open_target::{OpenTarget, ReservedTarget};

use ahead::UnopenedLease;
use deferred::DeferredOpens;
use keys::{LeaseKey, OnDevice, RangeKey};
use lease::{Lease, notified};
use links::Links;
use range::OpenRange;
use reusable::LayoutKey;

use super::addresses::Addresses;
use super::cache::{Cache, CacheLimits, Cached};
use super::ended_grants::EndedGrants;
use super::grant::UnusedGrant;
use crate::backend::{Access, DeviceIpc};
use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::model::error::Result;
use crate::os::Recent;
use crate::os::kill::kill_point;
use crate::os::process::ProcessIdentity;
use crate::sharing::Runtime;
use crate::transport::AllowList;
use crate::wire::descriptor::NamedExport;

/// The imports of this process.
#[derive(Debug, Default)]
pub(crate) struct ImportTable {
    links: Mutex<Links>,
    leases: Cache<LeaseKey, Lease>,
    unopened: DeferredOpens<LeaseKey, UnopenedLease>,
    ranges: Cache<RangeKey, OpenRange>,
    /// Ended grants that have not been reported to their exporters.
    pub(crate) ended: EndedGrants,
    addresses: Addresses,
    layouts: Recent<LayoutKey>,
    /// The number of releases that wait for a stream.
    pub(super) releasing: AtomicUsize,
}

impl ImportTable {
    /// Returns a reference to the lease on the descriptor's export, which begins if there is none.
    pub(super) fn acquire(&'static self, wanted: &OpenTarget<'_>) -> Result<LeaseRef> {
        let (runtime, descriptor) = (wanted.runtime, wanted.descriptor);
        static LAST_ALONE: AtomicU64 = AtomicU64::new(0);
        let on = OnDevice::new(wanted.backend, wanted.device, wanted.access);
        let mut key = LeaseKey::shared(self.shared_identity(descriptor.exporter()), &descriptor, on);
        if wanted.alone {
            key.alone = LAST_ALONE.fetch_add(1, Ordering::Relaxed) + 1;
        }
        self.settle_unopened(&key, wanted.deadline);
        let open = |opening: &LeaseRef| {
            runtime.worker.wait_for_backlog(wanted.deadline.at);
            self.begin(wanted, opening)
        };
        let (lease, was_open) = self.leases.acquire(key, wanted.deadline, open, |lease| self.end(lease))?;
        runtime.metrics.opens_total.add(1);
        if was_open {
            runtime.metrics.cache_hits_total.add(1);
            let grant = wanted.grant.filter(|grant| grant.token().is_some());
            let checked = lease.link.check_permitted(wanted.allow).and_then(|()| match grant {
                Some(_) => lease.check_for_bearers(wanted),
                None => lease.check_for_newcomers(wanted),
            });
            if let Err(error) = checked {
                runtime.worker.submit(move || self.release(lease));
                return Err(error);
            }
            self.settle(grant, &lease);
        }
        let (pid, export, device) = (descriptor.exporter().pid, descriptor.part.export, wanted.device);
        tracing::debug!(target: crate::os::log::IMPORT, pid, %export, %device, bytes = lease.bytes(), was_open, "opened");
        Ok(lease)
    }

    /// Returns a reference to the shared lease on an export if it can be used without a message, a driver call or a system
    /// call. All other cases, errors included, are left to [`acquire`](Self::acquire).
    pub(super) fn acquire_open(
        &'static self,
        named: &NamedExport<'_>,
        backend: &Arc<dyn DeviceIpc>,
        (device, access): (DeviceOrdinal, Access),
        grant: Option<&UnusedGrant>,
        allow: &AllowList,
    ) -> Option<LeaseRef> {
        let grant = grant.filter(|grant| grant.token().is_some());
        let on = OnDevice::new(backend, device, access);
        let usable =
            |lease: &Lease| lease.is_usable_at_once(grant.is_some()) && lease.link.is_permitted(allow);
        let known = by_thread::find(named, on).and_then(|known| self.leases.acquire_known(known, usable));
        let lease = known.or_else(|| {
            let key = LeaseKey::shared(self.shared_identity(named.exporter()), named, on);
            let lease = self.leases.acquire_open(&key, usable)?;
            by_thread::remember(&lease);
            Some(lease)
        })?;
        self.settle(grant, &lease);
        tracing::debug!(target: crate::os::log::IMPORT, pid = named.exporter().pid, export = %named.part.export, %device, "opened again");
        Some(lease)
    }

    /// Returns the number of idle leases, and the bytes of their allocations.
    pub(crate) fn idle(&self) -> (u64, u64) {
        self.leases.idle_amount()
    }

    /// Returns the number of opens that used an existing lease.
    pub(crate) fn opens_again(&self) -> u64 {
        self.leases.taken_again()
    }

    /// Records that an existing lease has replaced a grant.
    fn settle(&'static self, grant: Option<&UnusedGrant>, lease: &LeaseRef) {
        // Checked after the grant, so that no notification is missed.
        let is_due = grant.is_some_and(|grant| grant.replaced(&self.ended))
            || grant.is_some() && !lease.notices.may_keep();
        if is_due && let Some(runtime) = lease.link.runtime().here() {
            self.give_back_soon(runtime, &lease.key().exporter);
        }
    }

    /// Releases a mapping's reference without waiting. Device work may still use the memory unless it is `finished`: the thread
    /// that ends the lease waits for it. If the lease ends now, that thread is the worker.
    pub(super) fn return_lease(&'static self, runtime: &Runtime, lease: LeaseRef, finished: bool) {
        if !finished {
            // Before the release, after which another thread may end the lease.
            lease.leave_unfinished();
        }
        if let Err(last) = self.leases.leave_idle(lease) {
            runtime.worker.submit(move || self.release(last));
        }
    }

    /// Releases a reference. The last one may close the driver mapping and release the lease; it may block.
    pub(super) fn release(&self, lease: LeaseRef) {
        self.leases.release(lease, |lease| self.end(lease));
    }

    /// Closes a lease if it exists and is idle.
    pub(super) fn close_known_idle(&self, lease: &KnownLease) {
        if let Some(lease) = lease.upgrade() {
            self.close_idle(&lease);
        }
    }

    /// Closes a lease if it is idle.
    fn close_idle(&self, lease: &LeaseRef) {
        self.leases.close_idle(lease, |lease| self.end(lease));
    }

    /// Closes all idle leases.
    pub(crate) fn close_all_idle(&self) {
        self.return_unopened(None);
        for lease in self.leases.idle() {
            self.close_idle(&lease);
        }
    }

    pub(crate) fn set_limits(&self, limits: CacheLimits) {
        self.leases.set_limits(limits, |lease| self.end(lease));
    }

    /// Closes the driver mappings of an exporter's memory, also those in use. Returns the number of those in use.
    pub(crate) fn close_all_of(&self, exporter: &ProcessIdentity) -> usize {
        self.return_unopened(Some(exporter));
        let mut closed = 0;
        for lease in self.leases.open() {
            if *lease.key().exporter != *exporter || lease.revoked.swap(true, Ordering::AcqRel) {
                continue;
            }
            // Its last reference closes it; an idle one is closed here.
            self.close_idle(&lease);
            let Some(ranges) = lease.unmap() else { continue };
            lease.wait_for_device();
            self.release_ranges(ranges);
            closed += 1;
        }
        closed
    }

    fn close_idle_of(&self, exporter: &ProcessIdentity) {
        for lease in self.leases.idle() {
            if *lease.key().exporter == *exporter {
                self.close_idle(&lease);
            }
        }
    }

    /// Returns whether the range lies in imported memory.
    pub(crate) fn holds(&self, range: DeviceRange) -> bool {
        self.addresses.overlap(range)
    }

    fn end(&self, lease: &LeaseRef) {
        let LeaseKey { exporter, export, .. } = lease.key();
        lease.finish_work();
        lease.end_timelines();
        self.release_ranges(lease.unmap().unwrap_or_default());
        kill_point!("importer:closed");
        tracing::debug!(target: crate::os::log::IMPORT, pid = exporter.pid, %export, "closed");
        // No notification about the export arrives after this.
        self.give_back(exporter, Some(&lease.link));
        lease.link.release(lease.id);
        kill_point!("importer:released");
        lease.link.forget_notices(*export, &notified(lease));
    }
}
