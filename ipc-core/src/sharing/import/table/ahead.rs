//! Leases ahead: those that an exporter has begun on further exports of an allocation that this process opens. They are added to
//! the cache as idle leases, so that an open of such an export finds a lease as if it had been open before.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex};

use super::ImportTable;
use super::keys::LeaseKey;
use super::lease::{KnownLease, Lease, LeaseRef, Ready, notified};
use super::open_target::OpenTarget;
use super::regions::MappedRegions;
use crate::sharing::import::cache::{CacheEntry, Cached as _};
use crate::sharing::import::link::Link;
use crate::sharing::import::notices::ExportNotices;
use crate::wire::LeaseAhead;

/// Leases ahead that are not in the cache yet. Dropping them returns them.
pub(super) struct LeasesAhead<'a> {
    table: &'a ImportTable,
    link: &'a Arc<Link>,
    expected: Vec<Expected>,
}

struct Expected {
    ahead: LeaseAhead,
    entry: LeaseRef,
    notices: Arc<ExportNotices>,
}

impl<'a> LeasesAhead<'a> {
    pub(super) const fn new(table: &'a ImportTable, link: &'a Arc<Link>) -> Self {
        Self { table, link, expected: Vec::new() }
    }

    /// Records the notifications about these leases from now on. `opened` is the key of the lease that they came with.
    pub(super) fn expect(&mut self, leases: &[LeaseAhead], opened: &LeaseKey) {
        self.expected.extend(leases.iter().map(|ahead| {
            let key = LeaseKey { export: ahead.export, token: ahead.token, ..opened.clone() };
            let entry = Arc::new(CacheEntry::opening(key));
            let notices = self.link.expect_notices(ahead.export, &notified(&entry));
            Expected { ahead: ahead.clone(), entry, notices }
        }));
    }

    /// Adds the leases to the cache, with the mapping of the lease that they came with. Those whose bytes are not ready, and those
    /// that the cache has no room for, are returned.
    pub(super) fn keep(mut self, wanted: &OpenTarget<'_>, opened: &Lease, epoch: u64) {
        let expected = std::mem::take(&mut self.expected);
        if expected.is_empty() {
            return;
        }
        if wanted.alone {
            // No open would find them, and no other lease shares addresses that are reserved.
            self.expected = expected;
            return;
        }
        let key = |one: &Expected| one.entry.key().clone();
        let ready = expected.into_iter().filter_map(|one| {
            match self.lease(wanted, &one, &key(&one), opened, epoch) {
                Some(lease) => Some((one, lease)),
                None => {
                    self.expected.push(one);
                    None
                }
            }
        });
        let ready: Vec<_> = ready.collect();
        // After all events are open: those of a process that has just died may open, and report that they were reached.
        let is_alive = self.link.check_alive().is_ok();
        for (one, lease) in ready {
            let refused =
                if is_alive { self.table.leases.add_idle(&one.entry, lease).err() } else { Some(lease) };
            if let Some(lease) = refused {
                self.table.release_ranges(lease.unmap().unwrap_or_default());
                self.expected.push(one);
            } else if !one.entry.may_be_kept() {
                // The notification that ends it may have come before the entry was in the cache.
                self.close_soon(KnownLease::of(&one.entry));
            }
        }
    }

    fn lease(
        &self,
        wanted: &OpenTarget<'_>,
        one: &Expected,
        key: &LeaseKey,
        opened: &Lease,
        epoch: u64,
    ) -> Option<Lease> {
        let word = self.link.lease_word(one.ahead.slot)?;
        let ready = match &one.ahead.ready {
            None => None,
            Some(handle) => {
                let event = wanted.backend.open_event(handle.as_slice(), wanted.device).ok()?;
                Some(Box::new(Ready::Event(event.query().unwrap_or(false).then_some(event)?, true.into())))
            }
        };
        let range = match (&one.ahead.handle, &opened.regions) {
            (Some(handle), _) => self.table.open_ahead(wanted, key, self.link, handle).ok()?,
            (None, MappedRegions::One(range)) => self.table.ranges.hold_known(Arc::clone(range), |_| true)?,
            (None, _) => return None,
        };
        Some(Lease {
            id: one.ahead.lease,
            alone: false,
            seen_ready: AtomicBool::new(false),
            link: Arc::clone(self.link),
            notices: Arc::clone(&one.notices),
            word: Some(word),
            epoch: AtomicU64::new(epoch),
            borrowed: false,
            regions: MappedRegions::One(range),
            ready,
            timeline: Mutex::default(),
            unmapped: AtomicBool::new(false),
            revoked: AtomicBool::new(false),
            unfinished: AtomicBool::new(false),
            releasing: AtomicUsize::new(0),
        })
    }

    fn close_soon(&self, lease: KnownLease) {
        if let Some(runtime) = self.link.runtime().here() {
            runtime.worker.submit(move || runtime.imports.close_known_idle(&lease));
        }
    }
}

impl Drop for LeasesAhead<'_> {
    fn drop(&mut self) {
        for Expected { ahead, entry, .. } in &self.expected {
            self.link.release(ahead.lease);
            self.link.forget_notices(ahead.export, &notified(entry));
        }
    }
}
