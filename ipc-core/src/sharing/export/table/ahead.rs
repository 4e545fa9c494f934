//! Leases ahead of their opens: an importer that opens many exports of one allocation, as PyTorch's storages are, receives the
//! leases on the next ones in the same reply.
//!
//! Such a lease is idle in the importer's cache, so it keeps nothing: the exporter reclaims it as any other idle lease. The
//! importer reaches no byte by it that it does not reach already, because a handle is of the whole allocation.

use std::ops::Bound;
use std::sync::Arc;

use super::leases::{Importer, Lease};
use super::{Allocation, Entry, ExportTable, State, metrics};
use crate::backend::Access;
use crate::model::lease::LeaseId;
use crate::os::clock;
use crate::sharing::lease_page::LeaseWord;
use crate::wire::descriptor::ExportId;
use crate::wire::{LeaseAhead, MAX_LEASES_AHEAD};

impl ExportTable {
    /// Begins leases ahead for an importer that opens an export by a grant: on those of the next exports that permit it, and lie
    /// in the same allocation. `word` returns the word of a lease.
    pub(crate) fn lease_ahead(
        &self,
        opened: ExportId,
        access: Access,
        importer: &Importer,
        mut word: impl FnMut() -> Option<LeaseWord>,
    ) -> Vec<LeaseAhead> {
        let mut state = self.lock();
        let State { exports, last_lease, .. } = &mut *state;
        let mut begun = Vec::new();
        // Not dropped under the lock: the export, which the reply to the importer keeps, has another reference.
        let opened_in = exports.get(&opened).and_then(|entry| entry.allocation_ahead());
        let Some(allocation) = opened_in.map(Arc::clone) else { return begun };
        let next = exports.range_mut((Bound::Excluded(opened), Bound::Unbounded)).take(MAX_LEASES_AHEAD);
        for (export, entry) in next {
            if !entry.may_be_leased_ahead(&allocation, access, importer) {
                continue;
            }
            let Some(word) = word() else { break };
            word.begin_ahead();
            *last_lease += 1;
            let (lease, slot) = (LeaseId(*last_lease), word.slot());
            let ahead = Lease::new(Importer { word: Some(word), ..importer.clone() }, clock::now(), true);
            if entry.recalled || entry.watcher().is_some() {
                ahead.watch();
            }
            entry.leases.insert(lease, ahead);
            let ready = entry.shared.as_ref().and_then(|shared| shared.ready.as_ref());
            let ready = ready.map(|ready| ready.handle.clone());
            begun.push(LeaseAhead { export: *export, token: entry.token, lease, slot, ready });
        }
        drop(state);
        metrics(|metrics| {
            metrics.leases_total.add(begun.len() as u64);
            metrics.leases.add(begun.len() as u64);
        });
        begun
    }
}

impl Entry {
    /// Returns the only allocation of an export that permits leases ahead.
    fn allocation_ahead(&self) -> Option<&Arc<Allocation>> {
        let shared =
            self.shared.as_ref().filter(|_| self.ahead && !self.dropped && self.borrowed.is_none())?;
        if let [only] = &*shared.allocations { Some(only) } else { None }
    }

    fn may_be_leased_ahead(&self, allocation: &Arc<Allocation>, access: Access, importer: &Importer) -> bool {
        // Memory that the exporter wants back is leased only as long as a grant keeps it in any case.
        let is_wanted = self.recalled && self.grants.is_empty();
        !is_wanted
            && self.allocation_ahead().is_some_and(|own| Arc::ptr_eq(own, allocation))
            && (self.access.is_writable() || !access.is_writable())
            && self.allow().permits(&importer.credentials)
            && !self.leases.values().any(|lease| lease.connection == importer.connection)
    }
}
