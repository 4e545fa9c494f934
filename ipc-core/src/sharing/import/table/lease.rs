//! Leases of this process on exports of other processes.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use super::keys::LeaseKey;
use super::open_target::OpenTarget;
use super::range::RangeRef;
use super::regions::MappedRegions;
use crate::backend::stream::BorrowedStream;
use crate::backend::{DeviceEvent, DeviceIpc};
use crate::model::address::DeviceRange;
use crate::model::error::{Error, Result};
use crate::model::lease::{LeaseId, LeaseState};
use crate::sharing::Runtime;
use crate::sharing::import::cache::{CacheEntry, Cached};
use crate::sharing::import::link::Link;
use crate::sharing::import::notices::{ExportNotices, NotifiedLease};
use crate::sharing::lease_page::LeaseWord;
use crate::sharing::timeline::{Termination, Timeline};
use crate::transport::Deadline;
use crate::wire::Token;

/// A reference to a lease.
pub(in crate::sharing::import) type LeaseRef = Arc<CacheEntry<LeaseKey, Lease>>;

/// A weak reference to a lease, which may have ended.
#[derive(Clone, Debug)]
pub(in crate::sharing::import) struct KnownLease(Weak<CacheEntry<LeaseKey, Lease>>);

impl KnownLease {
    pub(in crate::sharing::import) fn of(lease: &LeaseRef) -> Self {
        Self(Arc::downgrade(lease))
    }

    pub(in crate::sharing::import) fn upgrade(&self) -> Option<LeaseRef> {
        self.0.upgrade()
    }

    /// Notes that a mapping that was released on a stream has been closed.
    pub(in crate::sharing::import) fn note_released(&self) {
        if let Some(lease) = self.upgrade() {
            lease.releasing.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Returns whether mappings of the lease wait for the stream that they were released on.
    pub(super) fn is_releasing(&self) -> bool {
        self.upgrade().is_some_and(|lease| lease.is_open() && lease.releasing.load(Ordering::Acquire) > 0)
    }
}

/// Returns a lease as its export's notifications know it.
pub(super) fn notified(lease: &LeaseRef) -> Weak<dyn NotifiedLease> {
    Arc::downgrade(lease) as _
}

impl NotifiedLease for CacheEntry<LeaseKey, Lease> {
    fn open_token(&self) -> Option<Token> {
        self.is_open().then(|| self.key().token)
    }

    fn is_dropped(&self) -> bool {
        self.is_open() && Lease::is_dropped(self)
    }

    fn close_if_idle(self: Arc<Self>, runtime: &Runtime) {
        runtime.imports.close_idle(&self);
    }
}

/// A lease and its mappings.
#[derive(Debug)]
pub(in crate::sharing::import) struct Lease {
    pub(super) id: LeaseId,
    pub(in crate::sharing::import) link: Arc<Link>,
    pub(in crate::sharing::import) notices: Arc<ExportNotices>,
    /// Reports to the exporter whether the lease is in use.
    pub(super) word: Option<LeaseWord>,
    /// The exporter's drop counter when the export was last known not to be dropped; `u64::MAX` if it publishes none.
    pub(super) epoch: AtomicU64,
    /// Whether the exporter has borrowed the memory: it is asked at every open.
    pub(super) borrowed: bool,
    /// Whether the lease belongs to one mapping only.
    pub(super) alone: bool,
    pub(super) regions: MappedRegions,
    pub(in crate::sharing::import) ready: Option<Box<Ready>>,
    /// Whether the host has seen that the bytes are ready.
    pub(in crate::sharing::import) seen_ready: AtomicBool,
    /// Created at its first use.
    pub(super) timeline: Mutex<Option<Timeline>>,
    /// Whether the references to the driver mappings have been released: at the lease's end, or by force after the exporter's
    /// termination.
    pub(super) unmapped: AtomicBool,
    /// Whether the driver mapping was closed while mappings existed.
    pub(super) revoked: AtomicBool,
    /// Whether device work of ended mappings may still be running: the thread that ends the lease waits for the device first.
    pub(super) unfinished: AtomicBool,
    /// The number of mappings that were released on a stream which has not reached that point.
    pub(super) releasing: AtomicUsize,
}

/// The signal that the bytes are written.
#[derive(Debug)]
pub(in crate::sharing::import) enum Ready {
    /// An event, and whether it is known to have been reached while the exporter was alive.
    Event(Box<dyn DeviceEvent>, AtomicBool),
    /// A word that the exporter's stream writes, if the event cannot be opened here.
    Word(Timeline),
}

impl Ready {
    pub(in crate::sharing::import) fn wait_on(&self, stream: BorrowedStream<'_>) -> Result<()> {
        match self {
            Self::Event(event, _) => event.wait_on(stream),
            Self::Word(timeline) => timeline.wait_ready_on(stream),
        }
    }

    /// Checks that the exporter has written the bytes, or still may. The event of a process that has terminated may report that it was
    /// reached although it was not.
    fn check(&self, exporter: &Link) -> Result<()> {
        match self {
            Self::Event(_, reached) if reached.load(Ordering::Acquire) => Ok(()),
            Self::Event(event, reached) => {
                let is_reached = event.query().unwrap_or(false);
                exporter.check_alive()?;
                reached.fetch_or(is_reached, Ordering::AcqRel);
                Ok(())
            }
            Self::Word(timeline) if timeline.is_ready() => Ok(()),
            Self::Word(timeline) => match exporter.check_alive() {
                // It may have written them before its termination.
                Err(error) if !timeline.is_ready() => Err(error),
                _ => Ok(()),
            },
        }
    }

    pub(in crate::sharing::import) fn synchronize(&self, timeout: Duration) -> Result<()> {
        match self {
            Self::Event(event, _) => event.wait(timeout),
            Self::Word(timeline) => timeline.wait_ready(timeout),
        }
    }
}

impl Lease {
    /// Checks that the mappings of this lease may still be used.
    pub(in crate::sharing::import) fn check(&self) -> Result<()> {
        if self.is_revoked() { Err(self.link.error_gone()) } else { Ok(()) }
    }

    /// Notes that the host has seen that the bytes are ready.
    pub(in crate::sharing::import) fn note_ready(&self) {
        self.seen_ready.store(true, Ordering::Release);
    }

    /// Checks that the exporter has written the bytes, or still may.
    pub(in crate::sharing::import) fn check_ready(&self) -> Result<()> {
        self.check()?;
        match &self.ready {
            Some(ready) if !self.seen_ready.load(Ordering::Acquire) => ready.check(&self.link),
            _ => Ok(()),
        }
    }

    /// Returns whether the exporter states, in memory that it shares with this process, that it has dropped the export.
    pub(in crate::sharing::import) fn is_dropped(&self) -> bool {
        self.word.as_ref().is_some_and(LeaseWord::is_dropped)
    }

    fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }

    /// Returns whether device work may be using the memory, for an exporter that lives.
    pub(super) fn may_have_work(&self) -> bool {
        let is_idle = self.word.as_ref().is_some_and(|word| word.state() == LeaseState::Idle);
        !is_idle && !self.is_revoked() && !self.link.is_gone()
    }

    /// Returns its number in the exporting process.
    pub(in crate::sharing::import) const fn id(&self) -> LeaseId {
        self.id
    }

    /// Returns the timeline of this lease.
    pub(in crate::sharing::import) fn timeline(&self, deadline: Deadline) -> Result<Timeline> {
        self.check()?;
        let mut timeline = self.timeline.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*timeline {
            return Ok(known.clone());
        }
        let begun = self.link.timeline(self.id, self.backend(), false, deadline)?;
        Ok(timeline.insert(begun).clone())
    }

    pub(in crate::sharing::import) fn backend(&self) -> &Arc<dyn DeviceIpc> {
        &self.regions.first().backend
    }

    /// Returns the addresses at which the driver mapped the allocations of each region.
    pub(in crate::sharing::import) fn mapped(&self) -> &[DeviceRange] {
        self.regions.mapped()
    }

    /// Returns the references to the driver mappings for release, once.
    pub(super) fn unmap(&self) -> Option<&[RangeRef]> {
        if self.unmapped.swap(true, Ordering::AcqRel) { None } else { Some(self.regions.give_up()) }
    }

    /// Returns whether a new mapping, or the bearer of a grant, may use it, if that is known without a message and a system
    /// call.
    pub(super) fn is_usable_at_once(&self, by_grant: bool) -> bool {
        let may_be_opened = || {
            by_grant
                || !self.notices.is_dropped()
                    && self.link.epoch().is_some_and(|epoch| epoch == self.epoch.load(Ordering::Acquire))
        };
        !self.borrowed
            && !self.is_revoked()
            && may_be_opened()
            // Last: the counters of a terminated exporter must not be mistaken for current ones.
            && self.link.is_known_alive()
    }

    /// Checks that the bearer of a grant may use it. The lease keeps the memory, and the grant is the right to open the export.
    pub(super) fn check_for_bearers(&self, wanted: &OpenTarget<'_>) -> Result<()> {
        self.check()?;
        if self.link.is_gone() {
            return Err(self.link.error_gone());
        }
        // The exporter checks borrowed memory at every open, which is not possible for a dropped export.
        if self.borrowed && !self.notices.is_dropped() {
            return match self.link.confirm(self.id, wanted.deadline) {
                // The notification of the drop has not arrived yet.
                Err(Error::ExportDropped { .. }) => self.check(),
                confirmed => confirmed,
            };
        }
        Ok(())
    }

    /// Checks that a new mapping may use it.
    pub(super) fn check_for_newcomers(&self, wanted: &OpenTarget<'_>) -> Result<()> {
        let (pid, deadline) = (wanted.descriptor.exporter().pid, wanted.deadline);
        self.check()?;
        if self.link.is_gone() {
            return Err(self.link.error_gone());
        }
        if self.notices.is_dropped() {
            return Err(Error::ExportDropped { pid });
        }
        if self.borrowed {
            return self.link.confirm(self.id, deadline);
        }
        // Read before the request, so that a drop after the reply is not mistaken for an earlier one.
        let epoch = self.link.epoch();
        if epoch.is_none_or(|epoch| epoch != self.epoch.load(Ordering::Acquire)) {
            self.link.confirm(self.id, deadline)?;
            self.epoch.store(epoch.unwrap_or(NO_EPOCH), Ordering::Release);
        }
        Ok(())
    }
}

/// The counter of an exporter that publishes none: it is asked at every open.
pub(super) const NO_EPOCH: u64 = u64::MAX;

impl Cached for Lease {
    /// Returns false for a lease with a timeline: the exporter waits for the end of the lease, not for another mapping.
    fn may_be_kept(&self) -> bool {
        let unused = self.timeline.lock().unwrap_or_else(PoisonError::into_inner).is_none();
        !self.alone && unused && !self.is_revoked() && self.notices.may_keep() && !self.link.is_gone()
    }

    fn rest(&self) {
        let finished = !self.unfinished.load(Ordering::Acquire);
        if self.word.as_ref().is_some_and(|word| word.rest(finished)) {
            self.report_change();
        }
    }

    fn resume(&self) -> bool {
        let Some(word) = &self.word else { return true };
        let resumed = word.resume();
        if resumed == Some(true) {
            self.report_change();
        }
        resumed.is_some()
    }

    fn bytes(&self) -> u64 {
        self.mapped().iter().map(|range| range.len).fold(0, u64::saturating_add)
    }

    /// Returns false if the exporter has terminated or the memory was closed by force: a kept mapping could not be used.
    fn is_busy(&self) -> bool {
        self.unfinished.load(Ordering::Acquire) && !self.is_revoked() && !self.link.is_gone()
    }
}

impl Lease {
    /// Notifies the exporter, if it watches this lease, of its new state: on the worker, as the exporter may not read.
    fn report_change(&self) {
        let Some(runtime) = self.link.runtime().here() else { return };
        let (link, lease) = (Arc::clone(&self.link), self.id);
        runtime.worker.submit(move || link.report_change(lease));
    }

    /// Notes a mapping that is closed once a stream has reached the point of its release. [`KnownLease::note_released`] follows.
    pub(in crate::sharing::import) fn note_releasing(&self) {
        self.releasing.fetch_add(1, Ordering::AcqRel);
    }

    /// Records that device work of a mapping that ends now may still be running.
    pub(super) fn leave_unfinished(&self) {
        // Usually set already: avoids a write to a cache line that other threads read.
        if !self.unfinished.load(Ordering::Relaxed) {
            self.unfinished.store(true, Ordering::Release);
        }
    }

    /// Waits for the device work of mappings that have ended.
    pub(super) fn finish_work(&self) {
        if !self.unfinished.swap(false, Ordering::AcqRel) {
            return;
        }
        // The thread that closed it by force has waited.
        if self.unmapped.load(Ordering::Acquire) {
            return;
        }
        self.wait_for_device();
    }

    pub(super) fn wait_for_device(&self) {
        if let Err(error) = self.backend().synchronize_device(self.mapped()[0].device) {
            tracing::warn!(target: crate::os::log::IMPORT, %error, "the device could not be waited for before a mapping was closed");
        }
    }

    /// Ends the timelines of a lease that ends.
    pub(super) fn end_timelines(&self) {
        let timeline = self.timeline.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(timeline) = timeline {
            timeline.endpoint().end(Termination::Released);
        }
        if let Some(Ready::Word(word)) = self.ready.as_deref() {
            word.endpoint().end(Termination::Released);
        }
    }
}
