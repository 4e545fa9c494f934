//! The exports of this process, their leases and holders: the table that the broker answers from.

mod ahead;
mod allocations;
mod deaths;
mod grants;
mod holders;
mod kept;
mod leases;
mod tokens;
mod waiting;
mod watcher;
mod watching;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::BorrowedMemory;
use super::shared::{Allocation, AllocationKey, Shared};
use crate::backend::{Access, Lifetime};
use crate::model::error::{Error, Result};
use crate::model::lease::LeaseId;
use crate::os::kill::kill_point;
use crate::os::{Condvar, Readiness, clock};
use crate::sharing::Home;
use crate::sharing::claims::ClaimTable;
use crate::transport::{AllowList, ConnectionId, Epoch};
use crate::wire::descriptor::ExportId;
use crate::wire::{Reply, Token};

pub(crate) use ahead::Readahead;
use allocations::Address;
use deaths::Deaths;
pub(crate) use grants::{Bearer, ChannelId};
use grants::{Grants, InFlight, TimedGrants};
use leases::Lease;
pub(crate) use leases::{Granted, Importer, LocalGrant, OpenRequest, TimelineObserver, stale};
use tokens::Tokens;
use waiting::Waiting;
use watcher::Watcher;

/// Time for importers to close the memory of a reclaimed lease before it is freed. A running importer takes about 1 ms, and up
/// to about 60 ms for a thousand allocations; a stopped one does not close it. Its mappings then refer to freed memory, which
/// it does not use: it opens the export again.
const CLOSING_TIME: Duration = Duration::from_millis(250);

/// All exports of the process.
#[derive(Debug, Default)]
pub(crate) struct ExportTable {
    pub(in crate::sharing) home: Home,
    state: Mutex<State>,
    changed: Condvar,
    /// `None` if the system could not create it: importers then ask at every open.
    epoch: OnceLock<Option<Epoch>>,
}

#[derive(Debug, Default)]
struct State {
    exports: BTreeMap<ExportId, Box<Entry>>,
    allocations: HashMap<AllocationKey, Weak<Allocation>>,
    /// The newest allocation at each address.
    by_address: BTreeMap<Address, Weak<Allocation>>,
    last_export: u64,
    last_lease: u64,
    last_allocation: u64,
    /// The users that any export has allowed so far. A user whose exports have all been dropped still receives that answer.
    allowed: AllowList,
    in_flight: HashMap<ChannelId, InFlight>,
    timed: TimedGrants,
    tokens: Tokens,
    /// The tables of claims, as few exports have one.
    claims: HashMap<ExportId, Arc<ClaimTable>>,
}

/// An export, from its creation to the drop of its owner.
#[derive(Debug)]
struct Entry {
    token: Token,
    backend: &'static str,
    since: Instant,
    /// The size of all regions in bytes.
    bytes: u64,
    access: Access,
    /// `None` for one that allows this process's own user alone. Boxed, as few exports allow others.
    allow: Option<Box<AllowList>>,
    /// Whether importers of other exports may have leases ahead on this one.
    ahead: bool,
    leases: HashMap<LeaseId, Lease>,
    /// Boxed, as few exports have leases reclaimed.
    reclaimed: Option<Box<Reclaimed>>,
    grants: Grants,
    opened: u64,
    dropped: bool,
    /// Set once idle leases have been recalled: importers keep no idle lease.
    recalled: bool,
    /// Present for borrowed memory. Boxed, because few exports have it.
    borrowed: Option<Box<BorrowedMemory>>,
    /// `None` once the worker has been asked to drop it.
    shared: Option<Arc<Shared>>,
    /// Boxed, as few exports have observers.
    observers: Option<Box<Observers>>,
    /// Boxed, as few importers die.
    deaths: Option<Box<Deaths>>,
    /// Present while threads wait for the release. Boxed, as few do.
    waiting: Option<Box<Waiting>>,
}

/// The idle leases of an export that were reclaimed and whose importers have not closed the memory yet.
#[derive(Debug)]
struct Reclaimed {
    leases: HashSet<LeaseId>,
    /// The time at which the last one was reclaimed.
    at: Instant,
    /// The time at which the poller retires the export, if one was set.
    retires_at: Option<Instant>,
}

/// The observers of an export's leases.
#[derive(Debug, Default)]
struct Observers {
    /// Receives the timelines that importers take.
    timelines: Option<Arc<dyn TimelineObserver>>,
    /// Receives every change of the holders.
    watcher: Option<Watcher>,
    /// Set at every change of the holders.
    readiness: Vec<Weak<Readiness>>,
}

/// The data of a new export.
pub(crate) struct NewExport {
    pub(crate) borrowed: Option<BorrowedMemory>,
    pub(crate) backend: &'static str,
    /// The size of all regions in bytes.
    pub(crate) bytes: u64,
    pub(crate) access: Access,
    pub(crate) allow: AllowList,
    /// Whether importers of other exports may have leases ahead on this one.
    pub(crate) ahead: bool,
    pub(crate) claims: Option<Arc<ClaimTable>>,
    pub(crate) token: Token,
    pub(crate) shared: Shared,
}

impl ExportTable {
    pub(crate) fn insert(&self, mut new: NewExport) -> ExportId {
        if new.borrowed.is_none() {
            new.shared.keep();
        }
        let mut state = self.lock();
        state.last_export += 1;
        let id = ExportId(state.last_export);
        let entry = Entry {
            token: new.token,
            backend: new.backend,
            since: clock::now(),
            bytes: new.bytes,
            access: new.access,
            allow: (new.allow != AllowList::own_user()).then(|| Box::new(new.allow)),
            ahead: new.ahead,
            leases: HashMap::new(),
            reclaimed: None,
            grants: Grants::new(),
            opened: 0,
            dropped: false,
            recalled: false,
            borrowed: new.borrowed.map(Box::new),
            shared: Some(Arc::new(new.shared)),
            observers: None,
            deaths: None,
            waiting: None,
        };
        self.home.count(|metrics| {
            metrics.exports_total.add(1);
            metrics.exports.add(1);
            metrics.exported_bytes.add(entry.bytes);
        });
        state.allowed.extend(entry.allow());
        state.claims.extend(new.claims.map(|table| (id, table)));
        state.exports.insert(id, Box::new(entry));
        id
    }

    /// Returns the page that counts drops for importers.
    pub(crate) fn epoch(&self) -> Option<&Epoch> {
        let create = || {
            Epoch::create()
                .inspect_err(
                    |error| tracing::warn!(target: crate::os::log::EXPORT, %error, "no page for drops"),
                )
                .ok()
        };
        self.epoch.get_or_init(create).as_ref()
    }

    /// Counts a change that importers look for in memory: a drop, or another export of a keeper.
    pub(crate) fn count_change(&self) {
        if let Some(Some(epoch)) = self.epoch.get() {
            epoch.advance();
        }
    }

    /// Returns whether the export has a grant that has not ended.
    pub(crate) fn is_granted(&self, export: ExportId) -> bool {
        self.lock().exports.get(&export).is_some_and(|entry| !entry.grants.is_empty())
    }

    /// Returns the table of claims of an export that has one.
    pub(crate) fn claims(&self, export: ExportId) -> Option<Arc<ClaimTable>> {
        self.lock().claims.get(&export).cloned()
    }

    /// Returns whether the export exists and has not been dropped.
    pub(crate) fn may_be_opened(&self, export: ExportId) -> bool {
        self.lock().exports.get(&export).is_some_and(|entry| !entry.dropped)
    }

    /// Returns the memory of a borrowed export, as it was when it was shared.
    pub(crate) fn borrowed(&self, export: ExportId) -> Option<BorrowedMemory> {
        self.lock().exports.get(&export)?.borrowed.as_deref().cloned()
    }

    /// Drops an export: it refuses new leases from now on.
    pub(crate) fn drop_export(&self, export: ExportId) {
        let mut state = self.lock();
        let Some(entry) = state.exports.get_mut(&export) else { return };
        if std::mem::replace(&mut entry.dropped, true) {
            return;
        }
        self.count_change();
        kill_point!("exporter:dropped");
        tracing::debug!(target: crate::os::log::EXPORT, %export, leases = entry.leases.len(), "dropped");
        let connections = connections(entry.leases.values());
        entry.leases.values().for_each(Lease::note_drop);
        entry.reclaim_idle(export, &self.home);
        self.retire_if_free(&mut state, export);
        drop(state);
        if let Some(runtime) = self.home.here() {
            runtime.poller.notify(connections, Reply::Dropped { export });
        }
    }

    /// Drops the owner of an export without leases on the worker, because the drop and the vendor's calls may block; after the
    /// last other reference, as the poller may be using it.
    fn retire_if_free(&self, state: &mut State, export: ExportId) {
        let Some(entry) = state.exports.get_mut(&export) else { return };
        if !entry.dropped || !entry.leases.is_empty() || !entry.grants.is_empty() {
            return;
        }
        let Some(runtime) = self.home.here() else { return };
        // Vendors define the free of memory after all importers have closed it, so those that answer are waited for.
        if let Some(reclaimed) = &mut entry.reclaimed
            && !reclaimed.leases.is_empty()
        {
            let until = reclaimed.at + CLOSING_TIME;
            if until > clock::now() {
                if reclaimed.retires_at.replace(until) != Some(until) {
                    runtime.poller.retire_at(until, export);
                }
                return;
            }
        }
        let Some(shared) = entry.shared.take() else { return };
        runtime.worker.submit_last(shared, move |shared| {
            kill_point!("exporter:retiring");
            // The rest of this job runs after a panic too: `close` waits for it.
            if catch_unwind(AssertUnwindSafe(|| drop(shared))).is_err() {
                tracing::error!(target: crate::os::log::EXPORT, %export, "the drop of an export's owner panicked");
            }
            kill_point!("exporter:retired");
            let mut state = runtime.exports.lock();
            let retired = state.exports.remove(&export);
            let claims = state.claims.remove(&export);
            if let Some(entry) = &retired {
                entry.set_readiness();
                runtime.metrics.exports.subtract(1);
                runtime.metrics.exported_bytes.subtract(entry.bytes);
            }
            runtime.exports.changed.notify_all();
            // Its watcher may call the table when it is dropped.
            drop(state);
            drop((retired, claims));
        });
    }

    /// Retires a dropped export although importers have not closed the memory of leases that were reclaimed.
    pub(crate) fn retire_overdue(&self, export: ExportId) {
        self.retire_if_free(&mut self.lock(), export);
    }

    /// Ends idle leases, and asks importers to keep none from now on.
    pub(crate) fn recall(&self, export: ExportId) {
        let mut state = self.lock();
        let Some(entry) = state.exports.get_mut(&export) else { return };
        // An importer that has not used its lease ahead yet receives the notification when it does.
        let connections = connections(entry.leases.values().filter(|lease| !lease.is_ahead()));
        let is_repeated = std::mem::replace(&mut entry.recalled, true);
        self.reclaim_idle(&mut state, export);
        drop(state);
        if is_repeated {
            return;
        }
        if let Some(runtime) = self.home.here() {
            runtime.poller.notify(connections, Reply::Recall { export });
        }
    }

    /// Ends the idle leases of an export that is to be returned, also a lease that has become idle after the recall and whose
    /// importer does not answer.
    fn reclaim_idle(&self, state: &mut State, export: ExportId) {
        let Some(entry) = state.exports.get_mut(&export) else { return };
        if (entry.recalled || entry.dropped) && entry.reclaim_idle(export, &self.home) {
            self.retire_if_free(state, export);
            self.changed.notify_all();
        }
    }

    /// Drops every export.
    pub(crate) fn drop_all(&self) {
        let exports: Vec<ExportId> = self.lock().exports.keys().copied().collect();
        for export in exports {
            self.drop_export(export);
        }
    }

    /// Checks that importers lose their mappings when the memory is freed.
    pub(crate) fn check_revokes(&self, export: ExportId) -> Result<()> {
        let shared = self.lock().exports.get(&export).and_then(|entry| entry.shared.clone());
        let Some(shared) = shared else { return Ok(()) };
        for allocation in shared.allocations.iter() {
            let kind = allocation.kind();
            if kind.lifetime != Lifetime::Revokes {
                return Err(Error::Unsupported {
                    backend: allocation.backend().info().name,
                    what: "free memory that others have open".into(),
                    why: format!(
                        "importers of a handle of kind {} pin the memory; end the processes that hold it, or wait",
                        kind.name
                    ),
                });
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn allow(&self) -> &AllowList {
        static OWN_USER: AllowList = AllowList::own_user();
        self.allow.as_deref().unwrap_or(&OWN_USER)
    }

    fn watcher(&self) -> Option<&Watcher> {
        self.observers.as_ref()?.watcher.as_ref()
    }

    fn observers(&mut self) -> &mut Observers {
        self.observers.get_or_insert_default()
    }
}

/// Returns the connections of the importers that hold these leases.
fn connections<'a>(leases: impl Iterator<Item = &'a Lease>) -> Vec<ConnectionId> {
    let mut connections: Vec<_> = leases.filter_map(|lease| lease.connection).collect();
    connections.sort_unstable();
    connections.dedup();
    connections
}
