//! Leases on exports, from the grant to the end, and their timelines.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use super::super::BorrowedMemory;
use super::super::shared::{Allocation, Shared};
use super::{Entry, ExportTable, State, metrics};
use crate::backend::Access;
use crate::model::error::Result;
use crate::model::lease::{Holder, LeaseId, LeaseState};
use crate::os::log::Throttle;
use crate::sharing::Runtime;
use crate::sharing::lease_page::LeaseWord;
use crate::sharing::timeline::{Place, Poison, Side, Termination, Timeline};
use crate::transport::{ConnectionId, PeerCredentials};
use crate::wire::descriptor::ExportId;
use crate::wire::{Refusal, Token};

/// A receiver of the timelines of an export's leases.
pub(crate) trait TimelineObserver: std::fmt::Debug + Send + Sync {
    /// Handles that an importer takes its timeline, before the importer receives it. Called once for each lease, under the table's
    /// lock: it calls neither the table nor a driver.
    fn taken(&self, lease: LeaseId, holder: &Holder, timeline: &Timeline);
}

/// The right of a process to have the export open.
#[derive(Debug)]
pub(super) struct Lease {
    pid: u32,
    program: Arc<str>,
    since: Instant,
    pub(super) connection: Option<ConnectionId>,
    timeline: Option<Timeline>,
    /// Whether the importer has taken the timeline, and not only its ready word.
    taken: bool,
    /// The importer's statement whether it uses the lease.
    word: Option<LeaseWord>,
}

/// An importer, by the kernel's and by its own account.
pub(crate) struct Importer {
    pub(crate) credentials: PeerCredentials,
    pub(crate) program: Arc<str>,
    pub(crate) connection: Option<ConnectionId>,
    /// The word in which it states whether it uses the lease.
    pub(crate) word: Option<LeaseWord>,
}

/// A request to open an export.
pub(crate) struct OpenRequest {
    pub(crate) export: ExportId,
    pub(crate) token: Token,
    /// Opens a dropped export as long as it has not ended. Without effect where it has.
    pub(crate) grant: Option<Token>,
    pub(crate) access: Access,
}

/// A lease that has begun, for another process.
pub(crate) struct Granted {
    pub(crate) lease: LeaseId,
    /// The slot of its word in the page of lease states.
    pub(crate) slot: Option<u32>,
    pub(crate) keep: bool,
    /// Borrowed memory, to be checked before the grant is sent.
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
    /// Returns whether the driver has to be called before the grant can be sent.
    pub(crate) fn needs_the_driver(&self, device: usize) -> bool {
        let unprepared =
            |allocation: &Arc<Allocation>| allocation.kind().whitelist || allocation.handle(device).is_none();
        self.borrowed.is_some() || self.shared.allocations.iter().any(unprepared)
    }

    /// Calls the driver: checks borrowed memory, authorizes the peer, makes the handle for the device. Drops its reference to the
    /// export here, as its owner may have to be dropped.
    pub(crate) fn prepare(self, device: usize, peer: &[u8]) -> Result<(), Refusal> {
        stale(self.borrowed.as_ref().map_or(Ok(()), BorrowedMemory::check))?;
        for allocation in self.shared.allocations.iter() {
            let prepared = allocation.prepare(device, peer);
            prepared.map_err(|error| Refusal::Failed { detail: error.to_string() })?;
        }
        Ok(())
    }
}

/// Returns the refusal for borrowed memory that is not the shared memory any longer.
pub(crate) fn stale(checked: Result<(), String>) -> Result<(), Refusal> {
    checked.map_err(|detail| Refusal::Stale { detail })
}

impl ExportTable {
    /// Begins a lease for another process, or refuses it.
    pub(crate) fn grant(&self, request: OpenRequest, importer: Importer) -> Result<Granted, Refusal> {
        let mut state = self.lock();
        let begun = state.begin_lease(&request, importer);
        let (lease, entry) = begun.inspect_err(|_| metrics(|metrics| metrics.refusals_total.add(1)))?;
        self.changed.notify_all();
        entry.granted(lease).ok_or(Refusal::Dropped)
    }

    /// Returns a lease that has begun, for a reply that had to wait.
    pub(crate) fn granted(&self, export: ExportId, lease: LeaseId) -> Option<Granted> {
        let state = self.lock();
        state.exports.get(&export)?.granted(lease)
    }

    /// Begins a lease in this process.
    pub(crate) fn grant_locally(&self, request: OpenRequest) -> Result<LocalGrant, Refusal> {
        let importer = Importer {
            credentials: PeerCredentials {
                pid: std::process::id(),
                uid: rustix::process::geteuid().as_raw(),
                gid: rustix::process::getegid().as_raw(),
            },
            program: "this process".into(),
            connection: None,
            word: None,
        };
        let mut state = self.lock();
        let (lease, entry) = state.begin_lease(&request, importer)?;
        self.changed.notify_all();
        let shared = entry.shared.as_ref().ok_or(Refusal::Dropped)?;
        Ok(LocalGrant { lease, borrowed: entry.borrowed.as_deref().cloned(), shared: Arc::clone(shared) })
    }

    /// Notes that the state of a lease has changed, and requests a notification of the next change.
    pub(crate) fn lease_changed(&self, export: ExportId, lease: LeaseId) {
        let state = self.lock();
        let Some(entry) = state.exports.get(&export).filter(|entry| entry.watcher().is_some()) else {
            return;
        };
        if let Some(lease) = entry.leases.get(&lease) {
            lease.watch();
            entry.tell_change();
        }
    }

    /// Ends a lease, reclaimed or not. The end of the last lease of a dropped export drops its owner.
    pub(crate) fn release(&self, export: ExportId, lease: LeaseId, how: Termination) {
        let mut state = self.lock();
        let Some(entry) = state.exports.get_mut(&export) else { return };
        if let Some(ended) = entry.leases.remove(&lease) {
            metrics(|metrics| metrics.leases.subtract(1));
            ended.end(how);
            entry.tell_change();
        }
        entry.reclaimed.retain(|(reclaimed, _)| *reclaimed != lease);
        self.retire_if_free(&mut state, export);
        self.changed.notify_all();
    }

    /// Returns the exporter's side of a lease's timeline: the existing one, or a new one in the slot that `place` gives.
    /// `None` where there is no such lease.
    pub(crate) fn timeline(
        &self,
        export: ExportId,
        lease: LeaseId,
        taken: bool,
        place: impl FnOnce() -> Result<Place>,
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
        if taken && !std::mem::replace(&mut lease.taken, true) {
            let observer = entry.observers.as_ref().and_then(|observers| observers.timelines.as_ref());
            if let Some(observer) = observer {
                observer.taken(id, &lease.holder(entry.bytes), &timeline);
            }
            entry.set_readiness();
        }
        self.changed.notify_all();
        Ok(Some((timeline, shared)))
    }

    /// Passes the timelines that importers take to the observer, from now on.
    pub(crate) fn observe(&self, export: ExportId, observer: Arc<dyn TimelineObserver>) {
        if let Some(entry) = self.lock().exports.get_mut(&export) {
            entry.observers().timelines = Some(observer);
        }
    }

    /// Returns the exporter's side of a lease's timeline, where it has one.
    pub(crate) fn known_timeline(&self, export: ExportId, lease: LeaseId) -> Option<Timeline> {
        self.lock().exports.get(&export)?.leases.get(&lease)?.timeline.clone()
    }

    /// Waits for `count` timelines of an export's leases. Returns them in the order in which the leases began; the error is their
    /// number after the timeout.
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

    /// Ends all leases by force.
    pub(crate) fn end_leases(&self, export: ExportId) {
        let mut state = self.lock();
        let Some(entry) = state.exports.get_mut(&export) else { return };
        let ended = entry.leases.len();
        entry.leases.drain().for_each(|(_, lease)| lease.end(Termination::Released));
        entry.reclaimed.clear();
        entry.tell_change();
        state.take_grants(export);
        tracing::warn!(target: crate::os::log::EXPORT, %export, leases = ended, "memory is freed although others still hold it");
        metrics(|metrics| metrics.leases.subtract(ended as u64));
        self.retire_if_free(&mut state, export);
        self.changed.notify_all();
    }
}

impl Lease {
    /// Returns the holder, of an export of `bytes` bytes.
    pub(super) fn holder(&self, bytes: u64) -> Holder {
        let state = self.word.as_ref().map_or(LeaseState::InUse, LeaseWord::state);
        Holder { pid: self.pid, program: self.program.to_string(), bytes, since: self.since, state }
    }

    /// Returns whether the importer states that the lease is idle.
    pub(super) fn is_idle(&self) -> bool {
        self.word.as_ref().is_some_and(|word| word.state() == LeaseState::Idle)
    }

    /// Requests a notification when the importer begins or ceases to use the lease.
    pub(super) fn watch(&self) {
        if let Some(word) = &self.word {
            word.watch();
        }
    }

    /// States to the importer that the export has been dropped.
    pub(super) fn note_drop(&self) {
        if let Some(word) = &self.word {
            word.note_drop();
        }
    }

    /// Ends the lease: waits of this process's streams for the importer are satisfied.
    fn end(self, how: Termination) {
        let Some(timeline) = self.timeline else { return };
        timeline.endpoint().end(how);
        // The words of a closed connection are poisoned by the page.
        if how == Termination::Released
            && timeline.endpoint().needs_poison()
            && let Some(runtime) = Runtime::existing()
        {
            runtime.poller.poison_again(Poison::Timeline(Arc::clone(timeline.endpoint())));
        }
    }
}

impl State {
    fn begin_lease(
        &mut self,
        request: &OpenRequest,
        importer: Importer,
    ) -> Result<(LeaseId, &mut Entry), Refusal> {
        let entry = self.exports.get_mut(&request.export).ok_or(Refusal::Dropped)?;
        // Before the token, and as where there is no such export: a user who may not open it learns neither whether it is there
        // nor whether it knows the token.
        if !entry.allow().permits(&importer.credentials) {
            let PeerCredentials { pid, uid, .. } = importer.credentials;
            static WARNINGS: Throttle = Throttle::new();
            if let Some(count) = WARNINGS.count() {
                tracing::warn!(target: crate::os::log::EXPORT, export = %request.export, pid, uid, count, "this export does not allow the user");
            }
            return Err(Refusal::Dropped);
        }
        if entry.token != request.token {
            return Err(Refusal::WrongToken);
        }
        let grant = request.grant.map(Token::to_bytes).filter(|grant| entry.grants.contains_key(grant));
        if entry.dropped && grant.is_none() {
            return Err(Refusal::Dropped);
        }
        if request.access.is_writable() && !entry.access.is_writable() {
            return Err(Refusal::Access { granted: entry.access });
        }
        if let Some(grant) = grant {
            self.take_grant(request.export, &grant);
        }
        let entry = self.exports.get_mut(&request.export).ok_or(Refusal::Dropped)?;
        self.last_lease += 1;
        let lease = LeaseId(self.last_lease);
        let Importer { credentials, program, connection, word } = importer;
        let (pid, since) = (credentials.pid, Instant::now());
        let begun = Lease { pid, program, since, connection, timeline: None, taken: false, word };
        if entry.watcher().is_some() {
            begun.watch();
        }
        entry.leases.insert(lease, begun);
        entry.opened += 1;
        entry.tell_change();
        metrics(|metrics| {
            metrics.leases_total.add(1);
            metrics.leases.add(1);
        });
        Ok((lease, entry))
    }
}

impl Entry {
    /// Ends the leases that are idle in their importers' caches, whether the importers answer or not. Returns whether there were any.
    pub(super) fn reclaim_idle(&mut self) -> bool {
        let is_reclaimed = |lease: &Lease| lease.word.as_ref().is_some_and(LeaseWord::reclaim);
        let now = Instant::now();
        let mut count = 0;
        for (id, lease) in self.leases.extract_if(|_, lease| is_reclaimed(lease)) {
            lease.end(Termination::Released);
            self.reclaimed.push((id, now));
            count += 1;
        }
        if count > 0 {
            metrics(|metrics| {
                metrics.leases.subtract(count);
                metrics.leases_reclaimed_total.add(count);
            });
            self.tell_change();
        }
        count > 0
    }

    fn granted(&self, lease: LeaseId) -> Option<Granted> {
        let slot = self.leases.get(&lease)?.word.as_ref().map(LeaseWord::slot);
        let shared = Arc::clone(self.shared.as_ref()?);
        // The bearer of a grant for a dropped export receives no notification of the drop later.
        let keep = !self.recalled && !self.dropped;
        Some(Granted { lease, slot, keep, borrowed: self.borrowed.as_deref().cloned(), shared })
    }
}
