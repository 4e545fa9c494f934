//! Importers that died while they used an export: their leases end as by a release, but their device work may be incomplete.

use super::leases::Lease;
use super::{Entry, ExportTable};
use crate::model::lease::{Holder, Holders};
use crate::sharing::Home;
use crate::wire::descriptor::ExportId;

/// Number of dead importers that an export remembers, the last ones.
const REMEMBERED: usize = 64;

/// The dead importers of an export.
#[derive(Debug, Default)]
pub(super) struct Deaths {
    holders: Vec<Holder>,
    /// Whether a wait for the release has to report them.
    unreported: bool,
}

impl ExportTable {
    /// Returns whether importers have died since the last call.
    pub(crate) fn take_deaths(&self, export: ExportId) -> bool {
        let mut state = self.lock();
        let deaths = state.exports.get_mut(&export).and_then(|entry| entry.deaths.as_mut());
        deaths.is_some_and(|deaths| std::mem::take(&mut deaths.unreported))
    }
}

impl Entry {
    /// Notes that the importer of a lease has died. An idle lease was released by its importer.
    pub(super) fn note_death(&mut self, lease: &Lease, home: &Home) {
        if lease.is_idle() {
            return;
        }
        let holder = lease.holder(self.bytes);
        home.count(|metrics| metrics.leases_lost_total.add(1));
        let deaths = self.deaths.get_or_insert_default();
        if deaths.holders.len() == REMEMBERED {
            deaths.holders.remove(0);
        }
        deaths.holders.push(holder);
        deaths.unreported = true;
    }

    /// Adds the dead importers.
    pub(super) fn add_deaths(&self, holders: &mut Holders) {
        holders.died.extend(self.deaths.iter().flat_map(|deaths| &deaths.holders).cloned());
    }
}
