//! Who holds an export: for messages, for lists, and for those who wait until nobody does.

use std::ops::Bound;
use std::sync::PoisonError;
use std::time::Instant;

use super::{Entry, ExportTable, State};
use crate::model::lease::{Holder, Holders};
use crate::transport::PeerCredentials;
use crate::wire::descriptor::ExportId;
use crate::wire::{LISTED_EXPORTS, LISTED_HOLDERS, ListedExport, ListedHolder};

impl ExportTable {
    /// Who holds the export.
    pub(crate) fn holders(&self, export: ExportId) -> Holders {
        self.lock().holders(export)
    }

    /// Returns the length of the export's regions in bytes; 0 for an export that does not exist any longer.
    pub(crate) fn bytes(&self, export: ExportId) -> u64 {
        self.lock().exports.get(&export).map_or(0, |entry| entry.bytes)
    }

    /// Returns whether any export so far has allowed this peer: only then is it spoken to.
    pub(crate) fn permits(&self, peer: &PeerCredentials) -> bool {
        self.lock().allowed.permits(peer)
    }

    /// The exports behind `after` that this peer might open, and whether there are more.
    pub(crate) fn list(&self, after: ExportId, peer: &PeerCredentials) -> (Vec<ListedExport>, bool) {
        let state = self.lock();
        let behind = state.exports.range((Bound::Excluded(after), Bound::Unbounded));
        let mut visible = behind.filter(|(_, entry)| entry.allow.permits(peer));
        let listed = visible.by_ref().take(LISTED_EXPORTS).map(|(id, entry)| entry.list(*id)).collect();
        (listed, visible.next().is_some())
    }

    /// Waits until `done` says so, or the deadline has come; then the holders of that moment.
    pub(super) fn wait(
        &self,
        export: ExportId,
        until: Instant,
        done: impl Fn(Option<&Entry>) -> bool,
    ) -> Result<(), Holders> {
        let mut state = self.lock();
        loop {
            let entry = state.exports.get(&export).map(|entry| &**entry);
            if done(entry) {
                return Ok(());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(state.holders(export));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
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
            program: holder.program,
        };
        ListedExport {
            export,
            backend: self.backend.to_owned(),
            bytes: self.bytes,
            age_ms: self.since.elapsed().as_millis() as u64,
            opened: self.opened,
            dropped: self.dropped,
            held_by: self.leases.len() as u64,
            holders: holders.into_iter().map(holder).collect(),
        }
    }

    fn holders(&self) -> Holders {
        let mut now: Vec<Holder> = self.leases.values().map(|lease| lease.holder(self.bytes)).collect();
        now.sort_by_key(|holder| holder.since);
        Holders { now, ever: self.opened }
    }
}
