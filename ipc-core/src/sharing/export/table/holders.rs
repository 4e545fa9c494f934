//! The holders of exports: for messages, for listings, and for threads that wait for the last release.

use std::ops::Bound;

use super::leases::Lease;
use super::{Entry, ExportTable, State};
use crate::model::lease::{Holder, Holders};
use crate::os::clock;
use crate::transport::PeerCredentials;
use crate::wire::descriptor::ExportId;
use crate::wire::{LISTED_EXPORTS, LISTED_HOLDERS, ListedExport, ListedHolder};

impl ExportTable {
    /// Returns the holders of the export.
    pub(crate) fn holders(&self, export: ExportId) -> Holders {
        self.lock().holders(export)
    }

    /// Returns the size of the export's regions in bytes; 0 for an export that no longer exists.
    pub(crate) fn bytes(&self, export: ExportId) -> u64 {
        self.lock().exports.get(&export).map_or(0, |entry| entry.bytes)
    }

    /// Returns the number of leases on exports of this process that are idle in their importers' caches.
    pub(crate) fn idle_leases(&self) -> usize {
        self.lock().exports.values().map(|entry| entry.idle()).sum()
    }

    /// Returns whether any export so far has allowed this peer: the broker answers no others.
    pub(crate) fn permits(&self, peer: &PeerCredentials) -> bool {
        self.lock().allowed.permits(peer)
    }

    /// Returns the exports after `after` that this peer may open, and whether there are more.
    pub(crate) fn list(&self, after: ExportId, peer: &PeerCredentials) -> (Vec<ListedExport>, bool) {
        let state = self.lock();
        let behind = state.exports.range((Bound::Excluded(after), Bound::Unbounded));
        let mut visible = behind.filter(|(_, entry)| entry.allow().permits(peer));
        let listed = visible.by_ref().take(LISTED_EXPORTS).map(|(id, entry)| entry.list(*id)).collect();
        (listed, visible.next().is_some())
    }
}

impl State {
    pub(super) fn holders(&self, export: ExportId) -> Holders {
        let Some(entry) = self.exports.get(&export) else { return Holders::default() };
        let mut holders = entry.holders();
        holders.now.extend(self.bearers(entry));
        holders
    }
}

impl Entry {
    fn list(&self, export: ExportId) -> ListedExport {
        let mut holders: Vec<_> = self.holders().now;
        holders.truncate(LISTED_HOLDERS);
        let holder = |holder: Holder| ListedHolder {
            pid: holder.pid,
            held_ms: holder.held_for().as_millis() as u64,
            state: holder.state,
            program: holder.program,
        };
        ListedExport {
            export,
            backend: self.backend.to_owned(),
            bytes: self.bytes,
            age_ms: clock::elapsed(self.since).as_millis() as u64,
            opened: self.opened,
            dropped: self.dropped,
            held_by: self.used_leases().count() as u64,
            idle: self.idle() as u64,
            holders: holders.into_iter().map(holder).collect(),
        }
    }

    /// Returns the leases except those ahead of their opens, whose importers do not hold the memory.
    fn used_leases(&self) -> impl Iterator<Item = &Lease> {
        self.leases.values().filter(|lease| !lease.is_ahead())
    }

    /// Returns the number of leases that are idle in their importers' caches.
    fn idle(&self) -> usize {
        self.used_leases().filter(|lease| lease.is_idle()).count()
    }

    fn holders(&self) -> Holders {
        let mut now: Vec<Holder> = self.used_leases().map(|lease| lease.holder(self.bytes)).collect();
        now.sort_by_key(|holder| holder.since);
        let mut holders = Holders { now, ever: self.opened, died: Vec::new() };
        self.add_deaths(&mut holders);
        holders
    }
}
