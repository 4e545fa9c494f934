//! Leases ahead of their opens: an importer that opens many exports of one allocation, as PyTorch's storages are, receives the
//! leases on the next ones in the same reply.
//!
//! Such a lease is idle in the importer's cache, so it keeps nothing: the exporter reclaims it as any other idle lease. The
//! importer reaches no byte by one in the same allocation that it does not reach already, because a handle is of the whole allocation.
//!
//! An importer that opens one export after the other receives leases in other allocations too, with their handles, which its worker
//! opens: twice as many each time ([`Readahead`]), so that it opens no more than it needs by half.

use std::ops::Bound;
use std::sync::Arc;

use super::leases::{Importer, Lease};
use super::{Allocation, Entry, ExportTable, State};
use crate::backend::Access;
use crate::model::lease::LeaseId;
use crate::os::clock;
use crate::sharing::lease_page::LeaseWord;
use crate::wire::descriptor::ExportId;
use crate::wire::{LeaseAhead, MAX_LEASES_AHEAD, WireHandle};

impl ExportTable {
    /// Begins leases ahead for an importer that opens an export by a grant: on those of the next exports that permit it, and lie
    /// in the same allocation, and on as many `others` for the importer's nth `device`. `word` returns the word of a lease.
    pub(crate) fn lease_ahead(
        &self,
        opened: ExportId,
        access: Access,
        importer: &Importer,
        (mut others, device): (usize, usize),
        mut word: impl FnMut() -> Option<LeaseWord>,
    ) -> Vec<LeaseAhead> {
        let mut state = self.lock();
        let State { exports, last_lease, .. } = &mut *state;
        let mut begun = Vec::new();
        // Not dropped under the lock: the export, which the reply to the importer keeps, has another reference.
        let opened_in = exports.get(&opened).and_then(|entry| entry.allocation_ahead());
        let Some(allocation) = opened_in.map(Arc::clone) else { return begun };
        let now = clock::now();
        let next = exports.range_mut((Bound::Excluded(opened), Bound::Unbounded)).take(MAX_LEASES_AHEAD);
        for (export, entry) in next {
            let Some(own) = entry.leased_ahead(access, importer) else { continue };
            let handle = if Arc::ptr_eq(own, &allocation) {
                None
            } else if others > 0
                && let Some(handle) = handle_ahead(own, &allocation, device)
            {
                others -= 1;
                Some(handle)
            } else {
                continue;
            };
            let Some(word) = word() else { break };
            word.begin_ahead();
            *last_lease += 1;
            let (lease, slot) = (LeaseId(*last_lease), word.slot());
            let ahead = Lease::new(Importer { word: Some(word), ..importer.clone() }, now, true);
            if entry.recalled || entry.watcher().is_some() {
                ahead.watch();
            }
            entry.leases.insert(lease, ahead);
            let ready = entry.shared.as_ref().and_then(|shared| shared.ready.as_ref());
            let ready = ready.map(|ready| ready.handle.clone());
            begun.push(LeaseAhead { export: *export, token: entry.token, lease, slot, ready, handle });
        }
        drop(state);
        self.home.count(|metrics| {
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

    /// Returns the allocation if the importer may have a lease ahead.
    fn leased_ahead(&self, access: Access, importer: &Importer) -> Option<&Arc<Allocation>> {
        // Memory that the exporter wants back is leased only as long as a grant keeps it in any case.
        let is_wanted = self.recalled && self.grants.is_empty();
        let permits = !is_wanted
            && (self.access.is_writable() || !access.is_writable())
            && self.allow().permits(&importer.credentials)
            && !self.leases.values().any(|lease| lease.connection == importer.connection);
        self.allocation_ahead().filter(|_| permits)
    }
}

/// Returns the handle of an allocation on the same device as that of the opened export, if it is plain bytes for any process.
fn handle_ahead(allocation: &Allocation, opened: &Allocation, device: usize) -> Option<WireHandle> {
    let (kind, at) = (allocation.kind(), |one: &Allocation| one.extent().allocation.device);
    let is_plain = !kind.whitelist && !kind.one_open_per_process && kind.kind == opened.kind().kind;
    if !is_plain || at(allocation) != at(opened) || !opened.is_of(allocation.backend()) {
        return None;
    }
    let exported = allocation.handle(device).filter(|exported| exported.fds.is_empty())?;
    Some(WireHandle {
        allocation: allocation.id(),
        kind: exported.kind,
        bytes: exported.bytes.clone(),
        fds: 0,
        size: exported.extent.allocation.len,
        generation: exported.extent.generation,
    })
}

/// The number of leases ahead in other allocations for one importer.
#[derive(Debug, Default)]
pub(crate) struct Readahead {
    /// The last export that the importer has opened or received a lease ahead on.
    last: Option<ExportId>,
    /// The number of leases for the next open if it continues the sequence.
    next: usize,
}

impl Readahead {
    /// Returns the number for an open.
    pub(crate) fn of_open(&mut self, export: ExportId) -> usize {
        let continues = self.last.replace(export).is_some_and(|last| last.0.checked_add(1) == Some(export.0));
        let number = if continues { self.next.max(1) } else { 0 };
        self.next = (2 * number).min(MAX_LEASES_AHEAD / 2);
        number
    }

    /// Records the leases that the importer receives.
    pub(crate) fn note(&mut self, begun: &[LeaseAhead]) {
        self.last = self.last.max(begun.iter().map(|ahead| ahead.export).max());
    }
}
