//! Leases on exports, from the grant to the end, and their timelines.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use super::super::BorrowedMemory;
use super::super::shared::{Allocation, Shared};
use super::watcher::in_callback;
use super::{Entry, ExportTable, Reclaimed, State};
use crate::backend::Access;
use crate::model::error::{Error, Result};
use crate::model::lease::{Holder, LeaseId, LeaseState};
use crate::os::clock;
use crate::os::log::Throttle;
use crate::sharing::Home;
use crate::sharing::lease_page::LeaseWord;
use crate::sharing::timeline::{
    Poison, Side, Termination, Timeline, TimelineSlot, note_own_slot, take_own_slot,
};
use crate::transport::{ConnectionId, PeerCredentials, ServerId};
use crate::wire::descriptor::ExportId;
use crate::wire::{Refusal, Reply, Token};

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
    /// Whether it began ahead of its open, and the importer has not reported its use.
    ahead: bool,
    /// Whether the importer is on another host, where nothing revokes its access.
    is_remote: bool,
    /// Whether a callback for changes has begun it, in this process.
    by_callback: bool,
}

/// An importer, by the kernel's and by its own account.
#[derive(Clone)]
pub(crate) struct Importer {
    pub(crate) credentials: PeerCredentials,
    pub(crate) program: Arc<str>,
    pub(crate) connection: Option<ConnectionId>,
    /// The word in which it states whether it uses the lease.
    pub(crate) word: Option<LeaseWord>,
    pub(crate) is_remote: bool,
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
            allocation.prepare(device, peer)?;
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
        let begun = state.begin_lease(&request, importer, &self.home);
        let (lease, entry) =
            begun.inspect_err(|_| self.home.count(|metrics| metrics.refusals_total.add(1)))?;
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
        self.grant_within(request, std::process::id(), "this process".into(), false)
    }

    /// Returns the token of an export that importers of other hosts open at this server.
    pub(crate) fn remote_token(&self, export: ExportId, server: ServerId) -> Option<Token> {
        let state = self.lock();
        let entry = state.exports.get(&export)?;
        let is_served = entry.shared.as_ref()?.remote.as_ref()?.server() == server;
        is_served.then_some(entry.token)
    }

    /// Begins a lease for an importer of another host, whose users this host does not know: the token alone permits it.
    pub(crate) fn grant_remotely(
        &self,
        request: OpenRequest,
        pid: u32,
        program: Arc<str>,
    ) -> Result<LocalGrant, Refusal> {
        self.grant_within(request, pid, program, true)
    }

    /// Begins a lease for a thread of this process.
    fn grant_within(
        &self,
        request: OpenRequest,
        pid: u32,
        program: Arc<str>,
        is_remote: bool,
    ) -> Result<LocalGrant, Refusal> {
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let credentials = PeerCredentials { pid, uid, gid };
        let importer = Importer { credentials, program, connection: None, word: None, is_remote };
        let mut state = self.lock();
        let (lease, entry) = state.begin_lease(&request, importer, &self.home)?;
        self.changed.notify_all();
        let shared = entry.shared.as_ref().ok_or(Refusal::Dropped)?;
        Ok(LocalGrant { lease, borrowed: entry.borrowed.as_deref().cloned(), shared: Arc::clone(shared) })
    }

    /// Notes that the state of a lease has changed, and requests a notification of the next change. Returns whether the export was
    /// recalled before the importer used the lease, which began ahead of its open: the importer receives the notification now.
    pub(crate) fn lease_changed(&self, export: ExportId, lease: LeaseId) -> bool {
        let mut state = self.lock();
        let Some(entry) = state.exports.get_mut(&export) else { return false };
        let (is_watched, is_recalled) = (entry.watcher().is_some(), entry.recalled);
        let Some(lease) = entry.leases.get_mut(&lease) else { return false };
        let is_first = std::mem::take(&mut lease.ahead);
        if is_watched {
            lease.watch();
            entry.notify_watchers();
        }
        is_first && is_recalled
    }

    /// Ends a lease, reclaimed or not. The end of the last lease of a dropped export drops its owner. Returns whether the importer
    /// had no use for the lease, which began ahead of its open.
    pub(crate) fn release(&self, export: ExportId, lease: LeaseId, how: Termination) -> bool {
        let mut state = self.lock();
        let Some(entry) = state.exports.get_mut(&export) else { return false };
        let mut is_ahead = false;
        if let Some(ended) = entry.leases.remove(&lease) {
            self.home.count(|metrics| metrics.leases.subtract(1));
            is_ahead = ended.is_ahead();
            if how == Termination::Died {
                entry.note_death(&ended, &self.home);
            }
            let by_callback = ended.by_callback;
            ended.end(how, &self.home);
            entry.notify_watchers_unless(by_callback);
        }
        if let Some(reclaimed) = &mut entry.reclaimed {
            reclaimed.leases.remove(&lease);
        }
        self.retire_if_free(&mut state, export);
        self.changed.notify_all();
        is_ahead
    }

    /// Returns the exporter's side of a lease's timeline: the existing one, or a new one in the slot that `place` gives.
    /// `None` where there is no such lease.
    pub(crate) fn timeline(
        &self,
        export: ExportId,
        lease: LeaseId,
        taken: bool,
        place: impl FnOnce() -> Result<TimelineSlot>,
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

    /// Takes the timeline of a lease within this process, and returns the importer's side of it.
    pub(crate) fn timeline_within(&self, export: ExportId, lease: LeaseId) -> Result<Timeline> {
        let pid = std::process::id();
        let (far, shared) =
            self.timeline(export, lease, true, take_own_slot)?.ok_or(Error::ExportDropped { pid })?;
        note_own_slot(&far);
        let (place, backend) = (far.endpoint().place().clone(), shared.allocations[0].backend());
        Ok(Timeline::new(place, Side::Importer, Arc::clone(backend), pid))
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
            let left = clock::left(until);
            if left.is_zero() {
                return Err(found.len());
            }
            state = self.changed.wait_timeout(&self.state, state, left);
        }
    }

    /// Ends all leases by force, except those of importers on other hosts: their engines may be reading the memory.
    pub(crate) fn end_leases(&self, export: ExportId) {
        let mut state = self.lock();
        let Some(entry) = state.exports.get_mut(&export) else { return };
        let revoked = entry.leases.extract_if(|_, lease| !lease.is_remote);
        let ended = revoked.map(|(_, lease)| lease.end(Termination::Released, &self.home)).count();
        entry.reclaimed = None;
        entry.notify_watchers();
        state.take_grants(export, &self.home);
        tracing::warn!(target: crate::os::log::EXPORT, %export, leases = ended, "memory is freed although others still hold it");
        self.home.count(|metrics| metrics.leases.subtract(ended as u64));
        self.retire_if_free(&mut state, export);
        self.changed.notify_all();
    }
}

impl Lease {
    pub(super) fn new(importer: Importer, since: Instant, ahead: bool) -> Self {
        let Importer { credentials, program, connection, word, is_remote } = importer;
        let (pid, timeline, taken) = (credentials.pid, None, false);
        let by_callback = connection.is_none() && in_callback();
        Self { pid, program, since, connection, timeline, taken, word, ahead, is_remote, by_callback }
    }

    /// Returns whether the importer has not used the lease yet, which began ahead of its open.
    pub(super) fn is_ahead(&self) -> bool {
        self.ahead && self.word.as_ref().is_some_and(LeaseWord::is_ahead)
    }

    /// Returns the holder, of an export of `bytes` bytes.
    pub(super) fn holder(&self, bytes: u64) -> Holder {
        let state = self.word.as_ref().map_or(LeaseState::InUse, LeaseWord::state);
        Holder {
            pid: self.pid,
            program: self.program.to_string(),
            bytes,
            since: clock::to_system(self.since),
            state,
        }
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
    fn end(self, how: Termination, home: &Home) {
        let Some(timeline) = self.timeline else { return };
        timeline.endpoint().end(how);
        // The words of a closed connection are poisoned by the page.
        if how == Termination::Released
            && timeline.endpoint().needs_poison()
            && let Some(runtime) = home.here()
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
        home: &Home,
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
        // A grant of a channel keeps a dropped export for an importer of another host, which opens it by its token alone.
        let is_granted = grant.is_some() || importer.is_remote && !entry.grants.is_empty();
        if entry.dropped && !is_granted {
            return Err(Refusal::Dropped);
        }
        if request.access.is_writable() && !entry.access.is_writable() {
            return Err(Refusal::Access { granted: entry.access });
        }
        if let Some(grant) = grant {
            self.take_grant(request.export, &grant, home);
        }
        let entry = self.exports.get_mut(&request.export).ok_or(Refusal::Dropped)?;
        self.last_lease += 1;
        let lease = LeaseId(self.last_lease);
        let begun = Lease::new(importer, clock::now(), false);
        let by_callback = begun.by_callback;
        if entry.watcher().is_some() {
            begun.watch();
        }
        entry.leases.insert(lease, begun);
        entry.opened += 1;
        entry.notify_watchers_unless(by_callback);
        home.count(|metrics| {
            metrics.leases_total.add(1);
            metrics.leases.add(1);
        });
        Ok((lease, entry))
    }
}

impl Entry {
    /// Ends the leases that are idle in their importers' caches, whether the importers answer or not. Returns whether there were any.
    /// Leases ahead stay as long as a grant keeps the memory in any case, and report their use. The importers of others are notified
    /// here, as they are not at a recall.
    pub(super) fn reclaim_idle(&mut self, export: ExportId, home: &Home) -> bool {
        let is_dropped = self.dropped;
        let is_kept = !is_dropped && !self.grants.is_empty();
        let is_reclaimed = |lease: &mut Lease| {
            let is_ahead = lease.is_ahead();
            if is_kept && is_ahead {
                lease.watch();
                return false;
            }
            let is_reclaimed = lease.word.as_ref().is_some_and(LeaseWord::reclaim);
            lease.ahead &= is_ahead || !is_reclaimed;
            is_reclaimed
        };
        let now = clock::now();
        let (mut count, mut ahead) = (0, Vec::new());
        for (id, lease) in self.leases.extract_if(|_, lease| is_reclaimed(lease)) {
            ahead.extend(lease.connection.filter(|_| lease.ahead && !is_dropped));
            lease.end(Termination::Released, home);
            let reclaimed = self.reclaimed.get_or_insert_with(|| {
                Box::new(Reclaimed { leases: HashSet::new(), at: now, retires_at: None })
            });
            reclaimed.leases.insert(id);
            reclaimed.at = now;
            count += 1;
        }
        if !ahead.is_empty()
            && let Some(runtime) = home.here()
        {
            runtime.poller.notify(ahead, Reply::Recall { export });
        }
        if count > 0 {
            home.count(|metrics| {
                metrics.leases.subtract(count);
                metrics.leases_reclaimed_total.add(count);
            });
            self.notify_watchers();
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
