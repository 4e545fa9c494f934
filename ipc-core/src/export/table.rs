//! The exports of this process: what the broker answers from, and who holds what.

mod grants;
mod kept;
mod watching;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Instant;

use super::BorrowedMemory;
use super::shared::{Allocation, AllocationKey, Shared, allocation_key};
use crate::address::{DevicePtr, Extent};
use crate::backend::{Access, DeviceIpc, Lifetime};
use crate::broker::{
    AllocationId, AllowList, ConnectionId, Epoch, LISTED_EXPORTS, LISTED_HOLDERS, ListedExport, ListedHolder,
    Notice, PeerCredentials, Refusal, Token,
};
use crate::descriptor::ExportId;
use crate::device::DeviceOrdinal;
use crate::error::{Error, Result};
use crate::kill::kill_point;
use crate::lease::{Holder, Holders, LeaseId};
use crate::runtime::{Condvar, Metrics, Runtime};
use crate::timeline::{End, Side, Timeline, WordPage};

pub(crate) use grants::{Bearer, ChannelId};
use grants::{Grants, InFlight, Tokens};
use watching::Watcher;

/// All exports of the process.
#[derive(Debug, Default)]
pub(crate) struct ExportTable {
    state: Mutex<State>,
    changed: Condvar,
    /// `None` inside where the system has none: importers then ask at every open.
    epoch: OnceLock<Option<Epoch>>,
}

#[derive(Debug, Default)]
struct State {
    exports: HashMap<ExportId, Entry>,
    allocations: HashMap<AllocationKey, Weak<Allocation>>,
    /// The newest that begins at each address.
    by_address: BTreeMap<Address, Weak<Allocation>>,
    last_export: u64,
    last_lease: u64,
    last_allocation: u64,
    in_flight: HashMap<ChannelId, InFlight>,
    grant_tokens: Tokens,
}

/// The backend's instance, the device and the address there.
type Address = (usize, DeviceOrdinal, DevicePtr);

fn address((backend, range, _): &AllocationKey) -> Address {
    (*backend, range.device, range.ptr)
}

/// An export, from its making to the drop of its owner.
#[derive(Debug)]
struct Entry {
    token: Token,
    backend: &'static str,
    since: Instant,
    /// Of all its regions.
    bytes: u64,
    access: Access,
    allow: AllowList,
    leases: HashMap<LeaseId, Lease>,
    grants: Grants,
    opened: u64,
    dropped: bool,
    /// Somebody waits until nobody holds it: importers keep no lease that they do not use.
    recalled: bool,
    /// For memory that is not owned here. Boxed, as few exports have it.
    borrowed: Option<Box<BorrowedMemory>>,
    /// `None` once the worker has been asked to drop it.
    shared: Option<Arc<Shared>>,
    /// Hears of timelines that are taken.
    observer: Option<Arc<dyn TimelineObserver>>,
    /// Hears of every change of who holds it.
    watcher: Option<Watcher>,
}

/// Hears of the timelines of an export's leases.
pub(crate) trait TimelineObserver: std::fmt::Debug + Send + Sync {
    /// An importer takes its timeline, and will be told of it next. Called once for each lease, under the table's lock: it
    /// neither asks the table nor calls a driver.
    fn taken(&self, lease: LeaseId, holder: &Holder, timeline: &Timeline);
}

#[derive(Debug)]
struct Lease {
    pid: u32,
    program: Arc<str>,
    since: Instant,
    connection: Option<ConnectionId>,
    timeline: Option<Timeline>,
    /// Has the importer taken the timeline, and not just its word for the bytes?
    taken: bool,
}

/// What a new export is made of.
pub(crate) struct NewExport {
    pub(crate) borrowed: Option<BorrowedMemory>,
    pub(crate) backend: &'static str,
    /// Of all its regions.
    pub(crate) bytes: u64,
    pub(crate) access: Access,
    pub(crate) allow: AllowList,
    pub(crate) token: Token,
    pub(crate) shared: Shared,
}

/// An importer, as the kernel and it itself tell.
pub(crate) struct Importer {
    pub(crate) credentials: PeerCredentials,
    pub(crate) program: Arc<str>,
    pub(crate) connection: Option<ConnectionId>,
}

/// What an importer asks for.
pub(crate) struct OpenRequest {
    pub(crate) export: ExportId,
    pub(crate) token: Token,
    pub(crate) access: Access,
}

/// A lease that has begun, for a process of its own.
pub(crate) struct Granted {
    pub(crate) lease: LeaseId,
    pub(crate) keep: bool,
    /// To be looked at before the grant is sent.
    pub(crate) borrowed: Option<BorrowedMemory>,
    pub(crate) shared: Arc<Shared>,
}

/// A lease that has begun, in the exporting process itself.
pub(crate) struct LocalGrant {
    pub(crate) lease: LeaseId,
    pub(crate) borrowed: Option<BorrowedMemory>,
    pub(crate) shared: Arc<Shared>,
}

impl Granted {
    /// Must the driver be asked before this can be handed out?
    pub(crate) fn needs_the_driver(&self, device: usize) -> bool {
        let unprepared =
            |allocation: &Arc<Allocation>| allocation.kind().whitelist || allocation.handle(device).is_none();
        self.borrowed.is_some() || self.shared.allocations.iter().any(unprepared)
    }

    /// Asks the driver: is borrowed memory still what it was, may the peer open it, is there a handle for the device?
    /// Ends its part in the export here, as its owner may have to be dropped.
    pub(crate) fn prepare(self, device: usize, peer: &[u8]) -> Result<(), Refusal> {
        stale(self.borrowed.as_ref().map_or(Ok(()), BorrowedMemory::check))?;
        for allocation in self.shared.allocations.iter() {
            let prepared = allocation.prepare(device, peer);
            prepared.map_err(|error| Refusal::Failed { detail: error.to_string() })?;
        }
        Ok(())
    }
}

/// What an importer is told when borrowed memory is no longer what it was.
pub(crate) fn stale(checked: Result<(), String>) -> Result<(), Refusal> {
    checked.map_err(|detail| Refusal::Stale { detail })
}

impl ExportTable {
    /// The allocation with its handle: the one that another export made, or a new one. While a handle of it is being
    /// made or taken back, others wait: a vendor whose handles revoke takes the memory from whoever opened it meanwhile.
    pub(crate) fn allocation(
        &self,
        backend: &Arc<dyn DeviceIpc>,
        extent: &Extent,
    ) -> Result<Arc<Allocation>> {
        let key = allocation_key(backend, extent);
        let mut state = self.lock();
        while let Some(known) = state.allocations.get(&key) {
            if let Some(known) = known.upgrade() {
                return Ok(known);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.allocations.insert(key, Weak::new());
        state.last_allocation += 1;
        let id = AllocationId(state.last_allocation);
        drop(state);
        let unfinished = Unfinished { table: self, key };
        let made = Arc::new(Allocation::export(id, backend, extent)?);
        std::mem::forget(unfinished);
        let mut state = self.lock();
        state.allocations.insert(key, Arc::downgrade(&made));
        state.by_address.insert(address(&key), Arc::downgrade(&made));
        drop(state);
        self.changed.notify_all();
        Ok(made)
    }

    pub(super) fn forget_allocation(&self, key: &AllocationKey) {
        let mut state = self.lock();
        state.allocations.remove(key);
        // Not another one, which has taken its place.
        if state.by_address.get(&address(key)).is_some_and(|known| known.strong_count() == 0) {
            state.by_address.remove(&address(key));
        }
        drop(state);
        self.changed.notify_all();
    }

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
            since: Instant::now(),
            bytes: new.bytes,
            access: new.access,
            allow: new.allow,
            leases: HashMap::new(),
            grants: Grants::new(),
            opened: 0,
            dropped: false,
            recalled: false,
            borrowed: new.borrowed.map(Box::new),
            shared: Some(Arc::new(new.shared)),
            observer: None,
            watcher: None,
        };
        metrics(|metrics| {
            metrics.exports_total.add(1);
            metrics.exports.add(1);
            metrics.exported_bytes.add(entry.bytes);
        });
        state.exports.insert(id, entry);
        id
    }

    /// Begins a lease for another process, or says why not.
    pub(crate) fn grant(&self, request: OpenRequest, importer: Importer) -> Result<Granted, Refusal> {
        let mut state = self.lock();
        let begun = state.begin_lease(&request, importer);
        let (lease, entry) = begun.inspect_err(|_| metrics(|metrics| metrics.refusals_total.add(1)))?;
        self.changed.notify_all();
        entry.granted(lease).ok_or(Refusal::Dropped)
    }

    /// A lease that was begun before, for an answer that had to wait.
    pub(crate) fn granted(&self, export: ExportId, lease: LeaseId) -> Option<Granted> {
        let state = self.lock();
        state.exports.get(&export).filter(|entry| entry.leases.contains_key(&lease))?.granted(lease)
    }

    /// Begins a lease in this very process.
    pub(crate) fn grant_locally(&self, request: OpenRequest) -> Result<LocalGrant, Refusal> {
        let importer = Importer {
            credentials: PeerCredentials {
                pid: std::process::id(),
                uid: rustix::process::geteuid().as_raw(),
                gid: rustix::process::getegid().as_raw(),
            },
            program: "this process".into(),
            connection: None,
        };
        let mut state = self.lock();
        let (lease, entry) = state.begin_lease(&request, importer)?;
        self.changed.notify_all();
        let shared = entry.shared.as_ref().ok_or(Refusal::Dropped)?;
        Ok(LocalGrant { lease, borrowed: entry.borrowed.as_deref().cloned(), shared: Arc::clone(shared) })
    }

    /// The page that tells importers of drops.
    pub(crate) fn epoch(&self) -> Option<&Epoch> {
        let create = || Epoch::create().inspect_err(|error| tracing::warn!(%error, "no page for drops")).ok();
        self.epoch.get_or_init(create).as_ref()
    }

    /// Is there such an export, and has it not been dropped?
    pub(crate) fn may_be_opened(&self, export: ExportId) -> bool {
        self.lock().exports.get(&export).is_some_and(|entry| !entry.dropped)
    }

    /// What a borrowed export's memory was.
    pub(crate) fn borrowed(&self, export: ExportId) -> Option<BorrowedMemory> {
        self.lock().exports.get(&export)?.borrowed.as_deref().cloned()
    }

    /// Ends a lease. The last lease of a dropped export takes its owner along.
    pub(crate) fn release(&self, export: ExportId, lease: LeaseId, how: End) {
        let mut state = self.lock();
        let Some(entry) = state.exports.get_mut(&export) else { return };
        if let Some(ended) = entry.leases.remove(&lease) {
            metrics(|metrics| metrics.leases.subtract(1));
            ended.end(how);
            entry.tell_change();
        }
        self.retire_if_free(&mut state, export);
        self.changed.notify_all();
    }

    /// The exporter's side of a lease's timeline: the one that there is, or a new one in the slot that `place` gives.
    /// `None` where there is no such lease.
    pub(crate) fn timeline(
        &self,
        export: ExportId,
        lease: LeaseId,
        taken: bool,
        place: impl FnOnce() -> Result<(Arc<WordPage>, u32)>,
    ) -> Result<Option<(Timeline, Arc<Shared>)>> {
        let mut state = self.lock();
        let Some(entry) = state.exports.get_mut(&export) else { return Ok(None) };
        let (Some(shared), Some((id, lease))) =
            (entry.shared.clone(), entry.leases.get_mut(&lease).map(|found| (lease, found)))
        else {
            return Ok(None);
        };
        let Some(backend) = shared.allocations.first().map(|allocation| Arc::clone(allocation.backend()))
        else {
            return Ok(None);
        };
        let timeline = match &lease.timeline {
            Some(known) => known.clone(),
            None => {
                let begun = Timeline::new(place()?, Side::Exporter, backend, lease.pid);
                lease.timeline.insert(begun).clone()
            }
        };
        if taken
            && !std::mem::replace(&mut lease.taken, true)
            && let Some(observer) = &entry.observer
        {
            observer.taken(id, &lease.holder(entry.bytes), &timeline);
        }
        self.changed.notify_all();
        Ok(Some((timeline, shared)))
    }

    /// From now on the observer hears of timelines that are taken.
    pub(crate) fn observe(&self, export: ExportId, observer: Arc<dyn TimelineObserver>) {
        if let Some(entry) = self.lock().exports.get_mut(&export) {
            entry.observer = Some(observer);
        }
    }

    /// The exporter's side of a lease's timeline, where it has one.
    pub(crate) fn known_timeline(&self, export: ExportId, lease: LeaseId) -> Option<Timeline> {
        self.lock().exports.get(&export)?.leases.get(&lease)?.timeline.clone()
    }

    /// The timelines of an export's leases, once there are so many, in the order in which the leases began; or how many
    /// there were when the time was over.
    pub(crate) fn timelines(
        &self,
        export: ExportId,
        count: usize,
        until: Instant,
    ) -> Result<Vec<Timeline>, usize> {
        let mut state = self.lock();
        loop {
            let leases = state.exports.get(&export).into_iter().flat_map(|entry| &entry.leases);
            let mut found: Vec<_> = leases
                .filter(|(_, lease)| lease.taken)
                .filter_map(|(id, lease)| Some((*id, lease.timeline.clone()?)))
                .collect();
            if found.len() >= count {
                found.sort_unstable_by_key(|(id, _)| *id);
                return Ok(found.into_iter().map(|(_, timeline)| timeline).collect());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(found.len());
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// From now on there are no new leases.
    pub(crate) fn drop_export(&self, export: ExportId) {
        let mut state = self.lock();
        let Some(entry) = state.exports.get_mut(&export) else { return };
        if std::mem::replace(&mut entry.dropped, true) {
            return;
        }
        if let Some(Some(epoch)) = self.epoch.get() {
            epoch.advance();
        }
        kill_point!("exporter:dropped");
        tracing::debug!(%export, leases = entry.leases.len(), "dropped");
        let connections = entry.connections();
        self.retire_if_free(&mut state, export);
        drop(state);
        if let Ok(runtime) = Runtime::get() {
            runtime.poller.notify(Notice::Dropped, export, connections);
        }
    }

    /// The owner's drop and the vendor's calls may block, so the worker does them.
    fn retire_if_free(&self, state: &mut State, export: ExportId) {
        let Some(entry) = state.exports.get_mut(&export) else { return };
        if !entry.dropped || !entry.leases.is_empty() || !entry.grants.is_empty() {
            return;
        }
        let (Some(shared), Ok(runtime)) = (entry.shared.take(), Runtime::get()) else { return };
        runtime.worker.submit(move || {
            kill_point!("exporter:retiring");
            drop(shared);
            kill_point!("exporter:retired");
            let mut state = runtime.exports.lock();
            let retired = state.exports.remove(&export);
            if let Some(entry) = &retired {
                runtime.metrics.exports.subtract(1);
                runtime.metrics.exported_bytes.subtract(entry.bytes);
            }
            runtime.exports.changed.notify_all();
            // Its watcher may ask the table when it is dropped.
            drop(state);
            drop(retired);
        });
    }

    /// Who holds the export.
    pub(crate) fn holders(&self, export: ExportId) -> Holders {
        self.lock().holders(export)
    }

    /// The exports behind `after` that this peer might open, and whether there are more.
    pub(crate) fn list(&self, after: ExportId, peer: &PeerCredentials) -> (Vec<ListedExport>, bool) {
        let state = self.lock();
        let visible = |(id, entry): &(&ExportId, &Entry)| **id > after && entry.allow.permits(peer);
        let mut all: Vec<_> = state.exports.iter().filter(visible).collect();
        all.sort_unstable_by_key(|(id, _)| **id);
        let more = all.len() > LISTED_EXPORTS;
        all.truncate(LISTED_EXPORTS);
        (all.into_iter().map(|(id, entry)| entry.list(*id)).collect(), more)
    }

    /// Waits until `done` says so, or the deadline has come; then the holders of that moment.
    fn wait(
        &self,
        export: ExportId,
        until: Instant,
        done: impl Fn(Option<&Entry>) -> bool,
    ) -> Result<(), Holders> {
        let mut state = self.lock();
        loop {
            let entry = state.exports.get(&export);
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

    /// Has importers give back the leases that they do not use, now and from now on.
    fn recall(&self, export: ExportId) {
        let mut state = self.lock();
        let Some(entry) = state.exports.get_mut(&export) else { return };
        if std::mem::replace(&mut entry.recalled, true) {
            return;
        }
        let connections = entry.connections();
        drop(state);
        if let Ok(runtime) = Runtime::get() {
            runtime.poller.notify(Notice::Recall, export, connections);
        }
    }

    /// Waits until the export has been opened at least once and nobody holds it any longer.
    pub(crate) fn wait_released(&self, export: ExportId, until: Instant) -> Result<(), Holders> {
        self.recall(export);
        self.wait(export, until, |entry| {
            entry.is_none_or(|entry| entry.opened > 0 && entry.leases.is_empty() && entry.grants.is_empty())
        })
    }

    /// As for a drop of every export.
    pub(crate) fn drop_all(&self) {
        let exports: Vec<ExportId> = self.lock().exports.keys().copied().collect();
        for export in exports {
            self.drop_export(export);
        }
    }

    /// Waits until the owners of all exports have been dropped.
    pub(crate) fn wait_all_retired(&self, until: Instant) -> Result<(), Holders> {
        let mut state = self.lock();
        while !state.exports.is_empty() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let mut all = Holders::default();
                for holders in state.exports.keys().map(|export| state.holders(*export)) {
                    all.now.extend(holders.now);
                    all.ever += holders.ever;
                }
                return Err(all);
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Would the importers lose their mappings if the memory were freed?
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

    /// Takes the leases away from those who still hold them.
    pub(crate) fn end_leases(&self, export: ExportId) {
        let mut state = self.lock();
        let Some(entry) = state.exports.get_mut(&export) else { return };
        let ended = entry.leases.len();
        entry.leases.drain().for_each(|(_, lease)| lease.end(End::Released));
        entry.tell_change();
        state.take_grants(export);
        tracing::warn!(%export, leases = ended, "memory is freed although others still hold it");
        metrics(|metrics| metrics.leases.subtract(ended as u64));
        self.retire_if_free(&mut state, export);
        self.changed.notify_all();
    }

    /// Waits until a dropped export's owner has been dropped.
    pub(crate) fn wait_retired(&self, export: ExportId, until: Instant) -> Result<(), Holders> {
        self.wait(export, until, |entry| entry.is_none())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lease {
    /// Who has it, of an export of so many bytes.
    fn holder(&self, bytes: u64) -> Holder {
        Holder { pid: self.pid, program: self.program.to_string(), bytes, since: self.since }
    }

    /// Streams of this process that wait for the importer wait no longer.
    fn end(self, how: End) {
        let Some(timeline) = self.timeline else { return };
        timeline.ends().end(how);
        if let Some(runtime) = Runtime::existing() {
            runtime.poller.poison_again(Arc::clone(timeline.ends()));
        }
    }
}

impl State {
    fn holders(&self, export: ExportId) -> Holders {
        let Some(entry) = self.exports.get(&export) else { return Holders::default() };
        let mut holders = entry.holders();
        holders.now.extend(self.bearers(entry));
        holders
    }

    fn begin_lease(
        &mut self,
        request: &OpenRequest,
        importer: Importer,
    ) -> Result<(LeaseId, &mut Entry), Refusal> {
        let entry = self.exports.get_mut(&request.export).ok_or(Refusal::Dropped)?;
        let token = request.token.to_bytes();
        let by_grant = entry.grants.contains_key(&token);
        if !by_grant && entry.token != request.token {
            return Err(Refusal::WrongToken);
        }
        if !entry.allow.permits(&importer.credentials) {
            return Err(Refusal::UserNotAllowed { uid: importer.credentials.uid });
        }
        if entry.dropped && !by_grant {
            return Err(Refusal::Dropped);
        }
        if request.access.is_writable() && !entry.access.is_writable() {
            return Err(Refusal::Access { granted: entry.access });
        }
        if by_grant {
            self.take_grant(request.export, &token);
        }
        let entry = self.exports.get_mut(&request.export).ok_or(Refusal::Dropped)?;
        self.last_lease += 1;
        let lease = LeaseId(self.last_lease);
        let Importer { credentials, program, connection } = importer;
        let (pid, since) = (credentials.pid, Instant::now());
        entry.leases.insert(lease, Lease { pid, program, since, connection, timeline: None, taken: false });
        entry.opened += 1;
        entry.tell_change();
        metrics(|metrics| {
            metrics.leases_total.add(1);
            metrics.leases.add(1);
        });
        Ok((lease, entry))
    }
}

fn metrics(count: impl FnOnce(&Metrics)) {
    if let Some(runtime) = Runtime::existing() {
        count(&runtime.metrics);
    }
}

impl Entry {
    fn granted(&self, lease: LeaseId) -> Option<Granted> {
        let shared = Arc::clone(self.shared.as_ref()?);
        // Whoever opens what has been dropped, by a grant, hears of no drop later.
        let keep = !self.recalled && !self.dropped;
        Some(Granted { lease, keep, borrowed: self.borrowed.as_deref().cloned(), shared })
    }

    fn connections(&self) -> Vec<ConnectionId> {
        let mut connections: Vec<_> = self.leases.values().filter_map(|lease| lease.connection).collect();
        connections.sort_unstable();
        connections.dedup();
        connections
    }

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

/// Lets others try where no handle could be made.
struct Unfinished<'a> {
    table: &'a ExportTable,
    key: AllocationKey,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.table.forget_allocation(&self.key);
    }
}
