//! What this process has open of others: the links to their brokers, the leases, the driver's mappings.
//!
//! A lease is held once for an export, device and access, however many mappings there are of it, and for a while after
//! the last of them: the next open costs neither a message nor a driver call. The driver's mapping is held once for the
//! allocations, device and access: another export of an allocation that is open costs a message and no driver call.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use super::addresses::Addresses;
use super::cache::{Cache, CacheLimits, Cached};
use super::grant::{AllEnded, HeldGrant};
use crate::address::DeviceRange;
use crate::backend::{Access, DeviceEvent, DeviceIpc, HandleBytes, Opened, ReceivedHandle};
use crate::broker::{
    AllocationId, AllowList, BrokerAddress, Deadline, ExportNotices, Gate, Grant, Link, Token, WireHandle,
};
use crate::descriptor::{DescribedExtent, Descriptor, ExportId, NamedExport};
use crate::device::DeviceOrdinal;
use crate::error::{Error, Result};
use crate::kill::kill_point;
use crate::lease::LeaseId;
use crate::process::ProcessIdentity;
use crate::runtime::Runtime;
use crate::stream::BorrowedStream;
use crate::timeline::{End, Timeline};

/// Everything of others that this process has open.
#[derive(Debug, Default)]
pub(crate) struct ImportTable {
    links: Mutex<HashMap<ProcessIdentity, Arc<LinkSlot>>>,
    leases: Cache<LeaseKey, Lease>,
    ranges: Cache<RangeKey, OpenRange>,
    /// Grants that are over, which their exporters have not been told yet.
    pub(super) ended: Mutex<AllEnded>,
    addresses: Addresses,
}

/// Held while the link is being made, so that an exporter that does not answer delays no other one's opens.
type LinkSlot = Gate<Option<Arc<Link>>>;

/// What a lease is found by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeaseKey {
    exporter: ProcessIdentity,
    export: ExportId,
    on: OnDevice,
    /// 0 for the lease that mappings share; else a number that no other lease has.
    alone: u64,
}

/// By what differs between the keys of one process: every open hashes one.
impl Hash for LeaseKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.export.0);
        state.write_u64(u64::from(self.exporter.pid) << 32 | u64::from(self.on.device.get()));
        state.write_u64(self.alone);
    }
}

impl LeaseKey {
    /// Of the lease that mappings share.
    fn shared(named: &NamedExport<'_>, on: OnDevice) -> Self {
        Self { exporter: named.exporter, export: named.export, on, alone: 0 }
    }

    pub(crate) fn export(&self) -> ExportId {
        self.export
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct RangeKey {
    exporter: ProcessIdentity,
    allocations: Vec<AllocationId>,
    on: OnDevice,
}

/// By what mostly differs: a bundle hashes one for each of its allocations.
impl Hash for RangeKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.allocations.hash(state);
        state.write_u64(u64::from(self.exporter.pid) << 32 | u64::from(self.on.device.get()));
    }
}

/// Where and how something is open. Two instances of a backend share nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct OnDevice {
    backend: usize,
    device: DeviceOrdinal,
    access: Access,
}

impl OnDevice {
    fn new(backend: &Arc<dyn DeviceIpc>, device: DeviceOrdinal, access: Access) -> Self {
        Self { backend: Arc::as_ptr(backend).cast::<()>() as usize, device, access }
    }
}

/// A lease and what it opened.
#[derive(Debug)]
pub(super) struct Lease {
    id: LeaseId,
    pub(super) key: LeaseKey,
    token: Token,
    /// What the first mapping was opened by; others share it.
    descriptor: OnceLock<Arc<Descriptor>>,
    pub(super) link: Arc<Link>,
    notices: Arc<ExportNotices>,
    /// The exporter's count of drops when this export was last known not to be among them; `u64::MAX` where it tells
    /// none.
    epoch: AtomicU64,
    /// The memory is not the exporter's own, which is asked whenever it is opened.
    borrowed: bool,
    /// The allocations of each region as the driver mapped them.
    pub(super) mapped: Box<[DeviceRange]>,
    pub(super) ready: Option<Ready>,
    /// Has the host seen that they are, so that no later mapping has to ask?
    pub(super) seen_ready: AtomicBool,
    /// Made when it is first asked for.
    timeline: Mutex<Option<Timeline>>,
    /// The driver's mappings of the regions. Empty once they have been closed: at the lease's end, or by force after the
    /// exporter's.
    ranges: Mutex<Vec<HeldRange>>,
    /// The driver's mapping was closed while mappings were still alive.
    revoked: AtomicBool,
    /// Device work of mappings that have ended may still be running: whoever ends the lease waits for the device first.
    unfinished: AtomicBool,
}

/// What tells that the bytes have been written.
#[derive(Debug)]
pub(super) enum Ready {
    Event(Box<dyn DeviceEvent>),
    /// A word that the exporter's stream writes, where the event cannot be opened here.
    Word(Timeline),
}

impl Ready {
    pub(super) fn wait_on(&self, stream: BorrowedStream<'_>) -> Result<()> {
        match self {
            Self::Event(event) => event.wait_on(stream),
            Self::Word(timeline) => timeline.wait_ready_on(stream),
        }
    }

    pub(super) fn synchronize(&self, timeout: Duration) -> Result<()> {
        match self {
            Self::Event(event) => event.synchronize(timeout),
            Self::Word(timeline) => timeline.wait_ready(timeout),
        }
    }
}

/// A hold on a driver's mapping.
type HeldRange = (RangeKey, Arc<OpenRange>);

/// The driver's mapping.
#[derive(Debug)]
struct OpenRange {
    backend: Arc<dyn DeviceIpc>,
    opened: Mutex<Option<Opened>>,
    range: DeviceRange,
}

/// What an open needs to know.
pub(super) struct Wanted<'a> {
    pub(super) backend: &'a Arc<dyn DeviceIpc>,
    pub(super) descriptor: NamedExport<'a>,
    pub(super) device: DeviceOrdinal,
    pub(super) home: Option<DeviceOrdinal>,
    pub(super) access: Access,
    pub(super) allow: &'a AllowList,
    pub(super) deadline: Deadline,
    /// Is the lease, and with it the timeline, to be nobody else's?
    pub(super) alone: bool,
    /// The right to open the export once more, whatever has become of it.
    pub(super) grant: Option<&'a HeldGrant>,
    /// Says of an error which region it concerns.
    pub(super) blame: &'a dyn Fn(usize, Error) -> Error,
}

impl Wanted<'_> {
    /// What opens the export.
    fn token(&self) -> Token {
        self.grant.and_then(HeldGrant::token).unwrap_or(self.descriptor.token)
    }
}

impl Lease {
    /// May the mappings of this lease still be used?
    pub(super) fn check(&self) -> Result<()> {
        if self.revoked.load(Ordering::Acquire) { Err(self.link.exporter_gone()) } else { Ok(()) }
    }

    /// The timeline of this lease.
    pub(super) fn timeline(&self, backend: &Arc<dyn DeviceIpc>, deadline: Deadline) -> Result<Timeline> {
        self.check()?;
        let mut timeline = self.timeline.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*timeline {
            return Ok(known.clone());
        }
        let begun = self.link.timeline(self.id, backend, false, deadline)?;
        Ok(timeline.insert(begun).clone())
    }

    /// The descriptor, the first mapping's own where they are the same.
    pub(super) fn share_descriptor(&self, descriptor: &Descriptor) -> Arc<Descriptor> {
        let first = self.descriptor.get_or_init(|| Arc::new(descriptor.clone()));
        if **first == *descriptor { Arc::clone(first) } else { Arc::new(descriptor.clone()) }
    }

    /// May it be used by newcomers with this token, or by who has a grant, as far as can be told without a message and without
    /// asking the kernel?
    fn is_usable_at_once(&self, token: Token, by_grant: bool) -> bool {
        let may_be_opened = || {
            by_grant
                || !self.notices.is_dropped()
                    && self.link.epoch().is_some_and(|epoch| epoch == self.epoch.load(Ordering::Acquire))
        };
        !self.borrowed
            && self.token == token
            && may_be_opened()
            // Behind the others: what the exporter said before it died is not taken for what it says now.
            && self.link.is_known_to_live()
    }

    /// May it be used by who has a grant? The lease keeps the memory, and the grant says that the export may be opened.
    fn check_for_bearers(&self, wanted: &Wanted<'_>) -> Result<()> {
        if self.link.is_gone() {
            return Err(self.link.exporter_gone());
        }
        if self.token != wanted.descriptor.token {
            return Err(Error::wrong_token(self.key.exporter.pid));
        }
        // One whose memory is looked at at every open cannot be asked about once it has been dropped.
        if self.borrowed && !self.notices.is_dropped() {
            return self.link.confirm(self.id, wanted.deadline);
        }
        Ok(())
    }

    /// May it be used by newcomers?
    fn check_for_newcomers(&self, token: Token, deadline: Deadline) -> Result<()> {
        let pid = self.key.exporter.pid;
        if self.link.is_gone() {
            return Err(self.link.exporter_gone());
        }
        if self.notices.is_dropped() {
            return Err(Error::ExportDropped { pid });
        }
        if self.token != token {
            return Err(Error::wrong_token(pid));
        }
        if self.borrowed {
            return self.link.confirm(self.id, deadline);
        }
        // Read before the question, so that a drop behind the answer is not taken for one before it.
        let epoch = self.link.epoch();
        if epoch.is_none_or(|epoch| epoch != self.epoch.load(Ordering::Acquire)) {
            self.link.confirm(self.id, deadline)?;
            self.epoch.store(epoch.unwrap_or(NO_EPOCH), Ordering::Release);
        }
        Ok(())
    }
}

/// How long an open waits for drops that are in progress where they may stand in its way.
const DROPS_IN_PROGRESS: Duration = Duration::from_secs(1);

/// An exporter that does not count its drops is asked at every open.
const NO_EPOCH: u64 = u64::MAX;

impl Cached for Lease {
    /// Not one with a timeline: the exporter's side waits for the end of the lease, not for another mapping.
    fn may_be_kept(&self) -> bool {
        // Nor one that no other mapping will ask for.
        let shared = self.key.alone == 0;
        let unused = self.timeline.lock().unwrap_or_else(PoisonError::into_inner).is_none();
        shared && unused && self.notices.may_keep() && !self.link.is_gone()
    }

    fn bytes(&self) -> u64 {
        self.mapped.iter().map(|range| range.len).fold(0, u64::saturating_add)
    }

    /// Not one whose exporter has gone: another mapping of it would be of no use.
    fn is_busy(&self) -> bool {
        self.unfinished.load(Ordering::Acquire) && !self.link.is_gone()
    }
}

impl Cached for OpenRange {
    /// The leases are what is kept; a mapping without any is of no use.
    fn may_be_kept(&self) -> bool {
        false
    }

    fn bytes(&self) -> u64 {
        self.range.len
    }
}

impl ImportTable {
    /// A hold on the lease of the descriptor's export, begun unless there is one already.
    pub(super) fn acquire(&'static self, wanted: &Wanted<'_>) -> Result<Arc<Lease>> {
        let runtime = Runtime::get()?;
        let descriptor = wanted.descriptor;
        static LAST_ALONE: AtomicU64 = AtomicU64::new(0);
        let mut key =
            LeaseKey::shared(&descriptor, OnDevice::new(wanted.backend, wanted.device, wanted.access));
        if wanted.alone {
            key.alone = LAST_ALONE.fetch_add(1, Ordering::Relaxed) + 1;
        }
        let open = || self.begin(wanted, &key);
        let (lease, was_open) = self.leases.acquire(&key, wanted.deadline, open, |lease| self.end(lease))?;
        runtime.metrics.opens_total.add(1);
        if was_open {
            runtime.metrics.cache_hits_total.add(1);
            let grant = wanted.grant.filter(|grant| grant.token().is_some());
            let checked = match grant {
                Some(_) => lease.check_for_bearers(wanted),
                None => lease.check_for_newcomers(descriptor.token, wanted.deadline),
            };
            if let Err(error) = checked {
                runtime.worker.submit(move || self.release(lease));
                return Err(error);
            }
            self.settle(grant, &lease);
        }
        let (pid, export, device) = (descriptor.exporter.pid, descriptor.export, wanted.device);
        tracing::debug!(pid, %export, %device, bytes = lease.bytes(), was_open, "opened");
        Ok(lease)
    }

    /// A hold on the lease that mappings of an export share, where there is one that can be used at once: without a message, a
    /// call of the driver or of the kernel. Anything else, errors included, is left to [`acquire`](Self::acquire).
    pub(super) fn acquire_open(
        &'static self,
        runtime: &Runtime,
        named: &NamedExport<'_>,
        backend: &Arc<dyn DeviceIpc>,
        (device, access): (DeviceOrdinal, Access),
        grant: Option<&HeldGrant>,
    ) -> Option<Arc<Lease>> {
        let grant = grant.filter(|grant| grant.token().is_some());
        let key = LeaseKey::shared(named, OnDevice::new(backend, device, access));
        let usable = |lease: &Lease| lease.is_usable_at_once(named.token, grant.is_some());
        let lease = self.leases.acquire_open(&key, usable)?;
        runtime.metrics.opens_total.add(1);
        runtime.metrics.cache_hits_total.add(1);
        self.settle(grant, &lease);
        tracing::debug!(pid = named.exporter.pid, export = %named.export, %device, "opened again");
        Some(lease)
    }

    /// A lease that there was already has taken the place of a grant.
    fn settle(&'static self, grant: Option<&HeldGrant>, lease: &Lease) {
        // Looked at behind the grant, so that no notice falls in between.
        if grant.is_some_and(|grant| grant.replaced(self)) || grant.is_some() && !lease.notices.may_keep() {
            self.give_back_soon(&lease.key.exporter);
        }
    }

    /// Lets go of a mapping's hold, without waiting. Device work may still use the memory unless it is said to be
    /// `finished`: whoever ends the lease waits for it. Where that is now, the worker does.
    pub(super) fn let_go(&'static self, runtime: &Runtime, lease: Arc<Lease>, finished: bool) {
        if !finished {
            // Before the hold, behind which another thread may end the lease.
            lease.unfinished.store(true, Ordering::Release);
        }
        let key = lease.key.clone();
        if let Err(last) = self.leases.let_go(&key, lease) {
            runtime.worker.submit(move || self.release(last));
        }
    }

    /// Lets go of a hold. The last one may close the driver's mapping and give the lease back; it may block.
    pub(super) fn release(&self, lease: Arc<Lease>) {
        let key = lease.key.clone();
        self.leases.release(&key, lease, |lease| self.end(lease));
    }

    /// Closes a lease that nobody uses.
    pub(crate) fn close_idle(&self, key: &LeaseKey) {
        self.leases.close_idle(key, |lease| self.end(lease));
    }

    /// Closes everything that nobody uses.
    pub(crate) fn close_all_idle(&self) {
        for key in self.leases.idle_keys() {
            self.close_idle(&key);
        }
    }

    pub(crate) fn set_limits(&self, limits: CacheLimits) {
        self.leases.set_limits(limits, |lease| self.end(lease));
    }

    /// Closes the driver's mappings of an exporter's memory, those in use too. How many there were in use.
    pub(crate) fn close_all_of(&self, exporter: &ProcessIdentity) -> usize {
        self.close_idle_of(exporter);
        let mut closed = 0;
        for lease in self.leases.live() {
            if lease.key.exporter != *exporter || lease.revoked.swap(true, Ordering::AcqRel) {
                continue;
            }
            let ranges = std::mem::take(&mut *lease.lock_ranges());
            let Some((_, first)) = ranges.first() else { continue };
            if let Err(error) = first.backend.synchronize_device(first.range.device) {
                tracing::warn!(%error, "the device could not be waited for before its mappings were closed");
            }
            self.release_ranges(ranges);
            closed += 1;
        }
        closed
    }

    fn close_idle_of(&self, exporter: &ProcessIdentity) {
        for key in self.leases.idle_keys() {
            if key.exporter == *exporter {
                self.close_idle(&key);
            }
        }
    }

    /// Does this range lie in memory of another process?
    pub(crate) fn holds(&self, range: DeviceRange) -> bool {
        self.addresses.overlap(range)
    }

    fn begin(&self, wanted: &Wanted<'_>, key: &LeaseKey) -> Result<Lease> {
        let (link, is_new) = self.link(wanted.descriptor.broker(), wanted.allow, wanted.deadline)?;
        match self.begin_over(&link, wanted, key) {
            // What is kept unused may be outdated, and is given up for this; so is what was dropped a moment ago.
            Err(error) if matches!(error.innermost(), Error::OverlapsInUse { .. }) => {
                let (runtime, exporter) = (Runtime::get()?, wanted.descriptor.exporter);
                // By the worker, as device work may have to be waited for.
                runtime.worker.submit(move || runtime.imports.close_idle_of(&exporter));
                runtime.worker.flush(wanted.deadline.left().min(DROPS_IN_PROGRESS));
                self.begin_over(&link, wanted, key)
            }
            // A busy exporter may have closed a connection that held no lease.
            Err(Error::ExporterGone { .. }) if !is_new => {
                let (link, _) = self.link(wanted.descriptor.broker(), wanted.allow, wanted.deadline)?;
                self.begin_over(&link, wanted, key)
            }
            begun => begun,
        }
    }

    fn begin_over(&self, link: &Arc<Link>, wanted: &Wanted<'_>, key: &LeaseKey) -> Result<Lease> {
        let descriptor = &wanted.descriptor;
        let peer = wanted.backend.local_peer_id(wanted.device)?;
        // Before the lease begins, so that no notice about it is missed.
        let notices = link.expect_notices(key);
        let epoch = link.epoch().unwrap_or(NO_EPOCH);
        let importer = (wanted.device, peer);
        let granted = link.open(descriptor.export, wanted.token(), wanted.access, importer, wanted.deadline);
        if let (Ok(_), Some(grant)) = (&granted, wanted.grant) {
            grant.used_up();
        }
        let begun = granted.and_then(|(grant, fds)| {
            kill_point!("importer:granted");
            if !grant.keep {
                notices.recall();
            }
            let id = grant.lease;
            let begun = self.open_granted(wanted, key, link, (notices, epoch), grant, fds);
            if begun.is_err() {
                link.release(id);
            }
            begun
        });
        if begun.is_err() {
            link.forget_notices(key);
        }
        begun
    }

    fn open_granted(
        &self,
        wanted: &Wanted<'_>,
        lease_key: &LeaseKey,
        link: &Arc<Link>,
        (notices, epoch): (Arc<ExportNotices>, u64),
        grant: Grant,
        fds: Vec<OwnedFd>,
    ) -> Result<Lease> {
        let Grant { lease: id, handles, ready: event, confirm, .. } = grant;
        check_grant(wanted, &handles, fds.len())?;
        let (mut handles, mut fds) = (handles.into_iter(), fds.into_iter());
        // Closes what has been opened where something fails behind it.
        let mut opened = Opening { table: self, ranges: Vec::with_capacity(wanted.descriptor.regions.len()) };
        for (index, region) in wanted.descriptor.regions.iter().enumerate() {
            let handles = handles.by_ref().take(region.len());
            let range = self.open_region(wanted, lease_key, handles, &mut fds).map_err(|error| match error {
                // The driver's words for an exporter that has died meanwhile, or dropped the export, differ; its broker's
                // silence or answer does not.
                Error::Vendor(_) => link.confirm(id, wanted.deadline).err().unwrap_or(error),
                error => error,
            });
            opened.ranges.push(range.map_err(|error| (wanted.blame)(index, error))?);
        }
        kill_point!("importer:opened");
        if confirm {
            // What the driver opened may already have been something else.
            link.confirm(id, wanted.deadline)?;
        }
        let ready = event.map(|handle| ready(wanted, link, id, &handle)).transpose()?;
        let ranges = opened.into_ranges();
        Ok(Lease {
            id,
            key: lease_key.clone(),
            token: wanted.descriptor.token,
            descriptor: OnceLock::new(),
            seen_ready: AtomicBool::new(false),
            link: Arc::clone(link),
            notices,
            epoch: AtomicU64::new(epoch),
            borrowed: confirm,
            mapped: ranges.iter().map(|(_, open)| open.range).collect(),
            ready,
            timeline: Mutex::default(),
            ranges: Mutex::new(ranges),
            revoked: AtomicBool::new(false),
            unfinished: AtomicBool::new(false),
        })
    }

    /// A hold on the driver's mapping of a region, opened by these handles unless it is open already.
    fn open_region(
        &self,
        wanted: &Wanted<'_>,
        lease_key: &LeaseKey,
        handles: impl Iterator<Item = WireHandle>,
        fds: &mut impl Iterator<Item = OwnedFd>,
    ) -> Result<HeldRange> {
        let mut allocations = Vec::new();
        let received = handles.map(|handle| {
            allocations.push(handle.allocation);
            ReceivedHandle {
                kind: handle.kind,
                bytes: handle.bytes,
                fds: fds.by_ref().take(usize::from(handle.fds)).collect(),
                size: handle.size,
                generation: handle.generation,
                home: wanted.home,
                exporter: wanted.descriptor.exporter,
            }
        });
        let received: Vec<_> = received.collect();
        let key = RangeKey { exporter: lease_key.exporter, allocations, on: lease_key.on };
        let open = || {
            let opened = wanted.backend.open(received, wanted.device, wanted.access)?;
            if let Some(runtime) = Runtime::existing() {
                runtime.metrics.driver_opens_total.add(1);
                runtime.metrics.mapped_bytes.add(opened.range.len);
            }
            self.addresses.add(opened.range);
            let (backend, range) = (Arc::clone(wanted.backend), opened.range);
            Ok(OpenRange { backend, range, opened: Mutex::new(Some(opened)) })
        };
        let (range, _) = self.ranges.acquire(&key, wanted.deadline, open, OpenRange::close)?;
        Ok((key, range))
    }

    fn release_ranges(&self, ranges: Vec<HeldRange>) {
        for (key, range) in ranges {
            self.ranges.release(&key, range, OpenRange::close);
        }
    }

    fn end(&self, lease: &Lease) {
        lease.finish_work();
        lease.end_timelines();
        self.release_ranges(std::mem::take(&mut *lease.lock_ranges()));
        kill_point!("importer:closed");
        tracing::debug!(pid = lease.key.exporter.pid, export = %lease.key.export, "closed");
        // From here on no notice about the export comes.
        self.give_back_over(&lease.link, &lease.key.exporter);
        lease.link.release(lease.id);
        kill_point!("importer:released");
        lease.link.forget_notices(&lease.key);
    }

    /// The link to an exporter, connected unless there is one already; and whether it was connected now.
    pub(crate) fn link(
        &self,
        (exporter, broker): (&ProcessIdentity, &BrokerAddress),
        allow: &AllowList,
        deadline: Deadline,
    ) -> Result<(Arc<Link>, bool)> {
        let new = || Arc::new(Gate::new(None));
        let slot = Arc::clone(self.lock_links().entry(*exporter).or_insert_with(new));
        let connecting = || deadline.passed("connecting to the exporting process", "");
        let mut slot = slot.enter(deadline).ok_or_else(connecting)?;
        if let Some(link) = slot.as_ref().filter(|link| !link.is_gone()) {
            return Ok((Arc::clone(link), false));
        }
        let connected = Link::connect(exporter, broker, allow, deadline);
        // An exporter that cannot be reached leaves nothing behind.
        let link = Arc::new(connected.inspect_err(|_| self.forget_link(exporter))?);
        Runtime::get()?.poller.watch(&link)?;
        *slot = Some(Arc::clone(&link));
        Ok((link, true))
    }

    /// The link to an exporter, where there is one that nobody is making just now.
    pub(super) fn known_link(&self, exporter: &ProcessIdentity) -> Option<Arc<Link>> {
        let slot = Arc::clone(self.lock_links().get(exporter)?);
        slot.try_enter()?.as_ref().filter(|link| !link.is_gone()).cloned()
    }

    /// Is there a link that tells, without asking the kernel, that the exporter has not ended?
    pub(super) fn knows_to_live(&self, exporter: &ProcessIdentity) -> bool {
        self.known_link(exporter).is_some_and(|link| link.is_known_to_live())
    }

    /// The exporter has gone, and its socket with it.
    pub(crate) fn forget_link(&self, exporter: &ProcessIdentity) {
        self.lock_links().remove(exporter);
        self.forget_ended(exporter);
    }

    fn lock_links(&self) -> MutexGuard<'_, HashMap<ProcessIdentity, Arc<LinkSlot>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lease {
    /// Waits until what mappings that have ended left running on the device has finished.
    fn finish_work(&self) {
        if !self.unfinished.swap(false, Ordering::AcqRel) {
            return;
        }
        let first = self.lock_ranges().first().map(|(_, range)| Arc::clone(range));
        // None are left where they were closed by force, which has waited.
        let Some(range) = first else { return };
        if let Err(error) = range.backend.synchronize_device(range.range.device) {
            tracing::warn!(%error, "the device could not be waited for before a mapping was closed");
        }
    }

    /// Nobody waits by a lease that has ended.
    fn end_timelines(&self) {
        let timeline = self.timeline.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(timeline) = timeline {
            timeline.ends().end(End::Released);
        }
    }

    fn lock_ranges(&self) -> MutexGuard<'_, Vec<HeldRange>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenRange {
    fn close(&self) {
        let Some(opened) = self.opened.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        if let Some(runtime) = Runtime::existing() {
            runtime.metrics.driver_closes_total.add(1);
            runtime.metrics.mapped_bytes.subtract(self.range.len);
            // Before the driver may give the addresses to somebody else.
            runtime.imports.addresses.remove(self.range);
        }
        if let Err(error) = self.backend.close(opened) {
            tracing::warn!(%error, "a mapping could not be closed");
        }
    }
}

/// What the bytes are waited for by. Where they are ready, the vendor's event says so. Where they are not, a word that the
/// exporter's stream writes: an event of a process that dies before it gets there is never reached (CUDA), while the word is
/// let go by this process itself; nor does every event open (CUDA keeps them in `/dev/shm`, which containers do not share).
/// Where there are no words, or the exporter is too busy to give one, the event it is.
fn ready(wanted: &Wanted<'_>, link: &Link, lease: LeaseId, handle: &HandleBytes) -> Result<Ready> {
    let event = wanted.backend.open_event(handle.as_slice(), wanted.device);
    // An event of a process that has just died may open, and say that it has been reached.
    link.check_alive()?;
    let reached = |event: &dyn DeviceEvent| event.query().unwrap_or(false);
    let has_words =
        || wanted.backend.capabilities(wanted.device).is_ok_and(|capabilities| capabilities.timelines);
    match event {
        Ok(event) if reached(&*event) || !has_words() => Ok(Ready::Event(event)),
        Ok(event) => match link.timeline(lease, wanted.backend, true, wanted.deadline.at_most(WORD_DEADLINE))
        {
            Ok(word) => Ok(Ready::Word(word)),
            Err(gone @ Error::ExporterGone { .. }) => Err(gone),
            Err(error) => {
                tracing::debug!(%error, "there is no word for the bytes; their event is waited for");
                Ok(Ready::Event(event))
            }
        },
        Err(error) if !has_words() => Err(error),
        // Where a word cannot be had either, the first error says what to change.
        Err(error) => match link.timeline(lease, wanted.backend, true, wanted.deadline) {
            Ok(word) => Ok(Ready::Word(word)),
            Err(Error::NotPermitted(why)) => {
                tracing::warn!(why, "the exporter cannot write a word when the bytes are ready either");
                Err(error)
            }
            Err(other) => Err(other),
        },
    }
}

/// How long an exporter may take to give a word where there is an event as well.
const WORD_DEADLINE: Duration = Duration::from_secs(1);

/// The grant is the exporter's word; it must fit the descriptor.
fn check_grant(wanted: &Wanted<'_>, handles: &[WireHandle], fds: usize) -> Result<()> {
    let misfit = |why: String| Err(Error::Protocol(why));
    let allocations: usize = wanted.descriptor.regions.iter().map(Vec::len).sum();
    if handles.len() != allocations {
        return misfit(format!("it sent {} handles for {allocations} allocations", handles.len()));
    }
    let claimed: usize = handles.iter().map(|handle| usize::from(handle.fds)).sum();
    if claimed != fds {
        if fds < claimed {
            return Err(Error::io(
                format!(
                    "receiving the memory's {claimed} file descriptors, of which {fds} came (this process may have too \
                     few left; raise its limit, ulimit -n)"
                ),
                rustix::io::Errno::MFILE,
            ));
        }
        return misfit(format!("it sent {fds} descriptors and spoke of {claimed}"));
    }
    let mut handles = handles.iter();
    for (index, region) in wanted.descriptor.regions.iter().enumerate() {
        for (extent, handle) in region.iter().zip(handles.by_ref()) {
            check_handle(extent, handle).map_err(|error| (wanted.blame)(index, error))?;
        }
    }
    Ok(())
}

fn check_handle(extent: &DescribedExtent, handle: &WireHandle) -> Result<()> {
    let generation = handle.generation.map_or(0, |generation| generation.0);
    if handle.size == extent.size && generation == extent.generation {
        return Ok(());
    }
    Err(Error::StaleGeneration(format!(
        "the descriptor names an allocation of {} bytes with number {}, the exporter one of {} bytes with number \
         {generation}",
        extent.size, extent.generation, handle.size
    )))
}

/// What a lease has open so far; closed again unless all of it is.
struct Opening<'a> {
    table: &'a ImportTable,
    ranges: Vec<HeldRange>,
}

impl Opening<'_> {
    fn into_ranges(mut self) -> Vec<HeldRange> {
        std::mem::take(&mut self.ranges)
    }
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        self.table.release_ranges(std::mem::take(&mut self.ranges));
    }
}
