//! Leases ahead: those that an exporter has begun on further exports of an allocation that this process opens, or of the next
//! allocations. They are added to the cache as idle leases, so that an open of such an export finds a lease as if it had been
//! open before.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex};

use super::ImportTable;
use super::keys::LeaseKey;
use super::lease::{KnownLease, Lease, LeaseRef, Ready, notified};
use super::open_target::OpenTarget;
use super::range::RangeRef;
use super::regions::MappedRegions;
use crate::backend::{Access, DeviceIpc};
use crate::model::device::{DeviceIdentity, DeviceOrdinal};
use crate::model::lease::LeaseState;
use crate::os::process::ProcessIdentity;
use crate::sharing::Runtime;
use crate::sharing::import::cache::{CacheEntry, Cached as _};
use crate::sharing::import::link::Link;
use crate::sharing::import::notices::ExportNotices;
use crate::transport::Deadline;
use crate::wire::LeaseAhead;

/// Leases ahead that came with the lease of an open which has not succeeded yet.
pub(super) struct LeasesAhead<'a> {
    table: &'static ImportTable,
    link: &'a Arc<Link>,
    /// The exporter's drop counter before they began.
    epoch: u64,
    expected: Vec<ExpectedLease>,
}

/// A lease ahead that is not in the cache yet. Dropping it returns it to the exporter.
#[derive(Debug)]
struct ExpectedLease {
    link: Arc<Link>,
    epoch: u64,
    ahead: LeaseAhead,
    entry: LeaseRef,
    notices: Arc<ExportNotices>,
    is_kept: bool,
}

/// A lease ahead whose memory has yet to be opened.
#[derive(Debug)]
pub(super) struct UnopenedLease {
    lease: ExpectedLease,
    place: AheadPlace,
}

/// Where and how the memory of leases ahead is opened.
#[derive(Clone, Debug)]
pub(super) struct AheadPlace {
    pub(super) runtime: &'static Runtime,
    pub(super) backend: Arc<dyn DeviceIpc>,
    pub(super) device: DeviceOrdinal,
    pub(super) access: Access,
    pub(super) home: Option<DeviceOrdinal>,
    pub(super) home_identity: DeviceIdentity,
    pub(super) deadline: Deadline,
}

impl<'a> LeasesAhead<'a> {
    pub(super) const fn new(table: &'static ImportTable, link: &'a Arc<Link>, epoch: u64) -> Self {
        Self { table, link, epoch, expected: Vec::new() }
    }

    /// Records the notifications about these leases from now on. `opened` is the key of the lease that they came with.
    pub(super) fn expect(&mut self, leases: &[LeaseAhead], opened: &LeaseKey) {
        self.expected.extend(leases.iter().map(|ahead| {
            let key = LeaseKey { export: ahead.export, token: ahead.token, ..opened.clone() };
            let entry = Arc::new(CacheEntry::opening(key));
            let notices = self.link.expect_notices(ahead.export, &notified(&entry));
            let (link, ahead) = (Arc::clone(self.link), ahead.clone());
            ExpectedLease { link, epoch: self.epoch, ahead, entry, notices, is_kept: false }
        }));
    }

    /// Adds the leases in the same allocation to the cache, with the mapping of the lease that they came with, and lets the worker
    /// open the memory of the others. Those whose bytes are not ready, and those that the cache has no room for, are returned.
    pub(super) fn keep(self, wanted: &OpenTarget<'_>, opened: &Lease) {
        if wanted.alone {
            // No open would find them, and no other lease shares addresses that are reserved.
            return;
        }
        let (elsewhere, beside): (Vec<_>, Vec<_>) =
            self.expected.into_iter().partition(|one| one.ahead.handle.is_some());
        for one in beside {
            self.table.add_ahead(one, |_| match &opened.regions {
                MappedRegions::One(range) => self.table.ranges.hold_known(Arc::clone(range), |_| true),
                MappedRegions::Many(_) => None,
            });
        }
        let place = AheadPlace {
            runtime: wanted.runtime,
            backend: Arc::clone(wanted.backend),
            device: wanted.device,
            access: wanted.access,
            home: wanted.home,
            home_identity: wanted.descriptor.part.home,
            deadline: wanted.deadline,
        };
        self.table.open_later(wanted.runtime, elsewhere, &place);
    }
}

impl ImportTable {
    /// Lets the worker open the memory of these leases, in this order.
    fn open_later(&'static self, runtime: &Runtime, leases: Vec<ExpectedLease>, place: &AheadPlace) {
        let add = |lease: ExpectedLease| {
            let (key, place) = (lease.key().clone(), place.clone());
            self.unopened.add(key.clone(), UnopenedLease { lease, place }).is_ok().then_some(key)
        };
        let keys = leases.into_iter().filter_map(add).collect();
        self.submit_opens(runtime, keys);
    }

    /// Submits a job for the first of them, which submits that for the next: other jobs come between.
    fn submit_opens(&'static self, runtime: &Runtime, mut keys: VecDeque<LeaseKey>) {
        let Some(key) = keys.pop_front() else { return };
        runtime.worker.submit(move || {
            self.unopened.open(&key, |unopened| self.open_unopened(unopened));
            if let Some(runtime) = Runtime::existing() {
                self.submit_opens(runtime, keys);
            }
        });
    }

    /// Opens the memory of a lease ahead that an open needs. It does not wait for the worker's turn: only for its call of the driver,
    /// if that has begun.
    pub(super) fn settle_unopened(&self, key: &LeaseKey, deadline: Deadline) {
        self.unopened.open_or_wait(key, deadline, |unopened| self.open_unopened(unopened));
    }

    fn open_unopened(&self, UnopenedLease { lease, place }: UnopenedLease) {
        self.add_ahead(lease, |lease| {
            self.open_ahead(&place, lease.key(), lease.ahead.handle.as_ref()?).ok()
        });
    }

    /// Returns the leases ahead whose memory no thread has begun to open: those on the exporter's memory, or all.
    pub(super) fn return_unopened(&self, of: Option<&ProcessIdentity>) {
        let is_meant = |key: &LeaseKey| of.is_none_or(|exporter| *key.exporter == *exporter);
        drop(self.unopened.take_queued(is_meant));
    }

    /// Adds a lease ahead to the cache, with the mapping that `open` returns. Otherwise returns it to the exporter.
    fn add_ahead(&self, mut expected: ExpectedLease, open: impl FnOnce(&ExpectedLease) -> Option<RangeRef>) {
        let word = expected.link.lease_word(expected.ahead.slot);
        // The exporter may have taken it back, and freed the memory.
        let Some(word) = word.filter(|word| word.state() == LeaseState::Idle) else { return };
        let Some(range) = open(&expected) else { return };
        let Some(ready) = expected.ready((&range.backend, range.range.device)) else {
            return self.release_ranges(&[range]);
        };
        let lease = Lease {
            id: expected.ahead.lease,
            alone: false,
            seen_ready: AtomicBool::new(false),
            link: Arc::clone(&expected.link),
            notices: Arc::clone(&expected.notices),
            word: Some(word),
            epoch: AtomicU64::new(expected.epoch),
            borrowed: false,
            regions: MappedRegions::One(range),
            ready: ready.map(Box::new),
            timeline: Mutex::default(),
            unmapped: AtomicBool::new(false),
            revoked: AtomicBool::new(false),
            unfinished: AtomicBool::new(false),
            releasing: AtomicUsize::new(0),
        };
        // The event of a process that has just died may open, and report that it was reached.
        let is_alive = lease.ready.is_none() || expected.link.check_alive().is_ok();
        let refused = if is_alive { self.leases.add_idle(&expected.entry, lease).err() } else { Some(lease) };
        if let Some(lease) = refused {
            return self.release_ranges(lease.unmap().unwrap_or_default());
        }
        expected.is_kept = true;
        if !expected.entry.may_be_kept()
            && let Some(runtime) = expected.link.runtime().here()
        {
            // The notification that ends it may have come before the entry was in the cache.
            let lease = KnownLease::of(&expected.entry);
            runtime.worker.submit(move || runtime.imports.close_known_idle(&lease));
        }
    }
}

impl ExpectedLease {
    fn key(&self) -> &LeaseKey {
        self.entry.key()
    }

    /// Returns the event for the readiness of the bytes, if there is one. `None` if they are not ready.
    fn ready(&self, (backend, device): (&Arc<dyn DeviceIpc>, DeviceOrdinal)) -> Option<Option<Ready>> {
        let Some(handle) = &self.ahead.ready else { return Some(None) };
        let event = backend.open_event(handle.as_slice(), device).ok()?;
        event.query().unwrap_or(false).then_some(Some(Ready::Event(event, true.into())))
    }
}

impl Drop for ExpectedLease {
    fn drop(&mut self) {
        if !self.is_kept {
            self.link.release(self.ahead.lease);
            self.link.forget_notices(self.ahead.export, &notified(&self.entry));
        }
    }
}
