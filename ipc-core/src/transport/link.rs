//! An importer's connection to one exporter: made once, then kept.
//!
//! A caller writes its request and reads the answer on its own thread, so that a round trip wakes no third thread.
//! Between requests the poller reads: notices of dropped exports, and the end of the connection.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::apart::{Answer, Answered, Apart};
use super::conversation::{Conversation, Deadline, Inbox, not_permitted, user_not_allowed};
use super::gate::{Gate, Turn};
use super::poller::{LINK_BIT, Poison};
use super::socket::ReceivedFds;
use super::{AllowList, ExportNotices, is_own_user};
use crate::backend::{Access, DeviceIpc};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::model::lease::LeaseId;
use crate::os::kill::kill_point;
use crate::os::process::ProcessIdentity;
use crate::sharing::Runtime;
use crate::sharing::import::KnownLease;
use crate::sharing::timeline::{End, Ends, Place, Returned, SLOTS, Side, TIMELINE_END, Timeline, WordPage};
use crate::wire::descriptor::ExportId;
use crate::wire::protocol::{PageId, Reply, Request, RequestId, short_detail};
use crate::wire::{BrokerAddress, Grant, MAX_HANDLES, Refusal, Token, WireHandle};

/// What is run when the exporter has gone.
pub(crate) type GoneCallback = Box<dyn FnOnce(&Error) + Send>;

/// How many bytes the handles of a lease have at most.
const MAX_HANDLE_BYTES: usize = 16 * 1024 * 1024;

/// Maximum number of messages that the poller reads before it turns to other connections.
const MESSAGES_PER_TURN: u32 = 16;

/// How long a lease's release may wait for an exporter that does not read.
const RELEASE_DEADLINE: Duration = Duration::from_secs(1);

/// A connection to an exporter's broker.
pub(crate) struct Link {
    watch_id: u64,
    exporter: ProcessIdentity,
    broker: BrokerAddress,
    /// The exporter was a process of this process's user when the connection was made.
    of_own_user: bool,
    conversation: Conversation,
    calls: Gate<Calls>,
    gone: AtomicBool,
    notices: Mutex<Notices>,
}

/// Whoever holds this reads from the socket.
#[derive(Default)]
struct Calls {
    next: u64,
    inbox: Inbox,
    /// Requests whose caller gave up: their grant goes back when it comes.
    abandoned: HashSet<u64>,
}

#[derive(Default)]
struct Notices {
    exports: HashMap<ExportId, Arc<ExportNotices>>,
    callbacks: Vec<(u64, GoneCallback)>,
    next: u64,
    /// The timelines of leases that have not been released.
    timelines: HashMap<LeaseId, Arc<Ends>>,
    /// Timelines of leases that have been released while a thread was submitting to them.
    late: Vec<(LeaseId, Arc<Ends>)>,
    pages: HashMap<PageId, Arc<WordPage>>,
    apart: Apart,
}

impl Link {
    /// Connects, and makes sure that the exporter is the one that is expected before anything secret is sent.
    pub(crate) fn connect(
        expected: &ProcessIdentity,
        broker: &BrokerAddress,
        allow: &AllowList,
        deadline: Deadline,
    ) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let (conversation, exporter) = Conversation::connect(broker, Some(expected), allow, deadline)?;
        Ok(Self {
            watch_id: NEXT.fetch_add(1, Ordering::Relaxed) | LINK_BIT,
            exporter,
            broker: broker.clone(),
            of_own_user: is_own_user(conversation.server().uid),
            conversation,
            calls: Gate::new(Calls::default()),
            gone: AtomicBool::new(false),
            notices: Mutex::default(),
        })
    }

    /// Asks for a lease. `like` is one that this process holds and that looks the same.
    pub(crate) fn open(
        &self,
        export: ExportId,
        token: Token,
        access: Access,
        (on, peer): (DeviceOrdinal, Vec<u8>),
        like: Option<LeaseId>,
        deadline: Deadline,
    ) -> Result<(Grant, Vec<OwnedFd>)> {
        let runtime = Runtime::get()?;
        let mut calls = self.turn(deadline)?;
        calls.next += 1;
        let request = RequestId(calls.next);
        let open = Request::Open { request, export, token, access, on: on.get(), peer, like };
        let answer = self.call(runtime, calls, &open, request, deadline)?;
        match answer {
            (Reply::Grant(grant), fds) => Ok((grant, fds.take())),
            _ => Err(self.ended_by(Error::Protocol("it granted what was not asked for".into()))),
        }
    }

    /// Asks whether newcomers may still open the export of a lease.
    pub(crate) fn confirm(&self, lease: LeaseId, deadline: Deadline) -> Result<()> {
        let runtime = Runtime::get()?;
        let mut calls = self.turn(deadline)?;
        calls.next += 1;
        let request = RequestId(calls.next);
        let answer = self.call(runtime, calls, &Request::Confirm { request, lease }, request, deadline)?;
        match answer.0 {
            Reply::Confirmed { .. } => Ok(()),
            _ => Err(self.ended_by(Error::Protocol("it confirmed what was not asked for".into()))),
        }
    }

    /// The importer's side of a lease's timeline. With `ready` the exporter writes its first word when the bytes are.
    pub(crate) fn timeline(
        &self,
        lease: LeaseId,
        backend: &Arc<dyn DeviceIpc>,
        ready: bool,
        deadline: Deadline,
    ) -> Result<Timeline> {
        let runtime = Runtime::get()?;
        let mut calls = self.turn(deadline)?;
        calls.next += 1;
        let request = RequestId(calls.next);
        let message = Request::Timeline { request, lease, ready };
        let (Reply::Timeline { page, slot, base, .. }, fds) =
            self.call(runtime, calls, &message, request, deadline)?
        else {
            return Err(self.ended_by(Error::Protocol("it gave words that were not asked for".into())));
        };
        let place = self.lock_notices().place((page, slot, base), fds);
        let timeline = place.and_then(|place| self.timeline_at(lease, place, backend));
        let timeline = timeline.map_err(|error| self.ended_by(error))?;
        kill_point!("importer:took-timeline");
        // It may have gone in between, and have ended all that there were.
        if self.is_gone() {
            timeline.ends().end(End::Died);
        }
        Ok(timeline)
    }

    /// The timeline of a lease: the one that it has, or a new one at this place.
    fn timeline_at(&self, lease: LeaseId, place: Place, backend: &Arc<dyn DeviceIpc>) -> Result<Timeline> {
        let mut notices = self.lock_notices();
        if let Some(known) = notices.timelines.get(&lease) {
            let is_same = Arc::ptr_eq(&known.place().page, &place.page)
                && (known.place().slot, known.place().base) == (place.slot, place.base);
            let same = is_same.then(|| Timeline::of(Arc::clone(known)));
            return same.ok_or_else(|| Error::Protocol("it gave a lease words twice".into()));
        }
        let timeline = Timeline::new(place, Side::Importer, Arc::clone(backend), self.exporter.pid);
        notices.timelines.insert(lease, Arc::clone(timeline.ends()));
        Ok(timeline)
    }

    /// Sends a request and waits for its answer; the poller is kept away meanwhile.
    fn call(
        &self,
        runtime: &Runtime,
        mut calls: Turn<'_, Calls>,
        message: &Request,
        request: RequestId,
        deadline: Deadline,
    ) -> Result<(Reply, ReceivedFds)> {
        if self.is_gone() {
            return Err(self.exporter_gone());
        }
        runtime.metrics.requests_total.add(1);
        runtime.poller.arm(self, false);
        let answer = self.send(message, deadline).and_then(|()| {
            kill_point!("importer:asked");
            self.answer_to(&mut calls, request, deadline)
        });
        if matches!(answer, Err(Error::Timeout { .. })) {
            calls.abandoned.insert(request.0);
        }
        drop(calls);
        if !self.is_gone() {
            runtime.poller.arm(self, true);
        }
        answer
    }

    fn answer_to(
        &self,
        calls: &mut Calls,
        request: RequestId,
        deadline: Deadline,
    ) -> Result<(Reply, ReceivedFds)> {
        // What came in packets of its own, before the last.
        let mut arrived = Arrived::default();
        loop {
            let received = self.conversation.receive(&mut calls.inbox, deadline);
            let (reply, fds) = received.map_err(|error| self.ended_by(error))?;
            match reply {
                Reply::Handles { request: answered, handles } if answered == request => {
                    arrived.add(handles, fds).map_err(|error| self.ended_by(error))?;
                }
                Reply::Grant(mut grant) if grant.request == request => {
                    let last = std::mem::take(&mut grant.handles);
                    arrived.add(last, fds).map_err(|error| self.ended_by(error))?;
                    grant.handles = arrived.handles;
                    return Ok((Reply::Grant(grant), arrived.fds));
                }
                Reply::Confirmed { request: answered } | Reply::Timeline { request: answered, .. }
                    if answered == request =>
                {
                    return Ok((reply, fds));
                }
                Reply::Refused { request: refused, refusal } if refused == request => {
                    return Err(self.explain(refusal));
                }
                other => {
                    self.take_notice(calls, other, fds).map_err(|error| self.ended_by(error))?;
                    // There may always be one more of them.
                    if deadline.left().is_zero() {
                        return Err(self.conversation.no_answer(deadline));
                    }
                }
            }
        }
    }

    /// Asks something whose answer may take long: others ask and are answered meanwhile.
    pub(crate) fn ask_apart(
        self: &Arc<Self>,
        message: impl FnOnce(RequestId) -> Request,
        deadline: Deadline,
    ) -> Result<Pending> {
        let runtime = Runtime::get()?;
        let (request, answer) = self.lock_notices().apart.begin();
        let pending = Pending { link: Arc::clone(self), request, answer };
        // Looked at behind the entry above, which is told where the exporter goes from now on.
        if self.is_gone() {
            return Err(self.exporter_gone());
        }
        runtime.metrics.requests_total.add(1);
        self.send(&message(request), deadline)?;
        Ok(pending)
    }

    /// An answer to what was asked apart. A lease that nobody waits for any longer goes back.
    fn take_apart(&self, reply: Reply, fds: ReceivedFds) -> Result<()> {
        let lease = if let Reply::Staging { lease, .. } = &reply { Some(*lease) } else { None };
        let delivered = self.lock_notices().apart.deliver(reply, fds)?;
        match lease.filter(|_| !delivered) {
            Some(lease) => {
                self.conversation.send(&Request::release_unused(lease), Deadline::after(Duration::ZERO))
            }
            None => Ok(()),
        }
    }

    /// Gives a lease back. An exporter that has gone, or does not read, has nothing to be told.
    pub(crate) fn release(&self, lease: LeaseId) {
        if self.is_gone() {
            return;
        }
        count_release();
        let deadline = Deadline::after(RELEASE_DEADLINE);
        let release = self.lock_notices().release(lease);
        if let Err(error) = self.send(&release, deadline) {
            tracing::warn!(%lease, %error, "a lease could not be given back; the exporter is taken to have gone");
            self.mark_gone();
        }
    }

    /// Gives grants back. An exporter that has gone has nothing to be told, and one that does not read is taken to have.
    pub(crate) fn end_grants(&self, grants: Vec<(ExportId, Token)>) {
        if self.is_gone() || grants.is_empty() {
            return;
        }
        count_release();
        let deadline = Deadline::after(RELEASE_DEADLINE);
        if let Err(error) = self.send(&Request::EndGrants { grants }, deadline) {
            tracing::warn!(%error, "grants could not be given back; the exporter is taken to have gone");
            self.mark_gone();
        }
    }

    /// Reads what has come while no caller is waiting. Called by the poller; false where a caller reads just now.
    pub(super) fn on_readable(&self) -> bool {
        let Some(mut calls) = self.calls.try_enter() else { return false };
        for _ in 0..MESSAGES_PER_TURN {
            let taken = match self.conversation.try_receive(&mut calls.inbox.buffer) {
                Ok(None) => return true,
                Ok(Some((reply, fds))) => self.take_notice(&mut calls, reply, fds),
                Err(error) => Err(error),
            };
            if taken.is_err() {
                self.mark_gone();
                return true;
            }
        }
        // The poller comes back to the rest when others have had their turn.
        true
    }

    /// Leases that nobody uses go back, on the worker's thread; one that begins just now looks for itself.
    fn hear(&self, export: ExportId, notice: impl FnOnce(&ExportNotices) -> bool) {
        let Some(notices) = self.lock_notices().exports.get(&export).cloned() else { return };
        if !notice(&notices) {
            return;
        }
        self.close_idle(notices.leases());
        if let Ok(runtime) = Runtime::get() {
            // The exporter waits for its memory, so it is told now what it could be told later.
            runtime.imports.give_back_soon(&self.exporter);
        }
    }

    fn close_idle(&self, leases: Vec<KnownLease>) {
        let Ok(runtime) = Runtime::get() else { return };
        if !leases.is_empty() {
            runtime.worker.submit(move || leases.iter().for_each(|lease| runtime.imports.close_idle(lease)));
        }
    }

    /// A message that answers nobody who still waits.
    fn take_notice(&self, calls: &mut Calls, reply: Reply, fds: ReceivedFds) -> Result<()> {
        match reply {
            reply if Apart::is_of_it(&reply) => self.take_apart(reply, fds),
            Reply::Dropped { export } => {
                self.hear(export, ExportNotices::drop_export);
                Ok(())
            }
            Reply::Recall { export } => {
                self.hear(export, ExportNotices::recall);
                Ok(())
            }
            // Its descriptors were closed with the packet. An exporter that let a caller wait in vain and does not read
            // either has gone as far as we are concerned: the poller waits for nobody.
            Reply::Grant(grant) if calls.abandoned.remove(&grant.request.0) => {
                self.conversation.send(&Request::release_unused(grant.lease), Deadline::after(Duration::ZERO))
            }
            Reply::Refused { request, .. }
            | Reply::Confirmed { request }
            | Reply::Timeline { request, .. }
                if calls.abandoned.remove(&request.0) =>
            {
                Ok(())
            }
            Reply::Handles { request, .. } if calls.abandoned.contains(&request.0) => Ok(()),
            _ => Err(Error::Protocol("it answered what nobody had asked".into())),
        }
    }

    fn send(&self, request: &Request, deadline: Deadline) -> Result<()> {
        self.conversation.send(request, deadline).map_err(|error| self.ended_by(error))
    }

    /// An exporter that has ended, or does not speak the protocol, has gone; one that takes its time has not.
    pub(crate) fn ended_by(&self, error: Error) -> Error {
        if matches!(error, Error::ExporterGone { .. } | Error::Protocol(_)) {
            self.mark_gone();
        }
        error
    }

    fn explain(&self, refusal: Refusal) -> Error {
        let pid = self.exporter.pid;
        match refusal {
            Refusal::Dropped => Error::ExportDropped { pid },
            Refusal::WrongToken => Error::wrong_token(pid),
            Refusal::UserNotAllowed { uid } => user_not_allowed(pid, uid),
            Refusal::Access { granted } => Error::AccessDenied { wanted: Access::ReadWrite, granted },
            Refusal::Stale { detail } => Error::StaleGeneration(short_detail(&detail)),
            Refusal::Failed { detail } => {
                let detail = short_detail(&detail);
                Error::NotPermitted(format!("process {pid} could not share it: {detail}"))
            }
        }
    }

    /// Notes that the exporter has ended; what waits for that is run by the worker.
    pub(crate) fn mark_gone(&self) -> Error {
        if !self.gone.swap(true, Ordering::AcqRel) {
            tracing::debug!(pid = self.exporter.pid, "an exporter has gone");
            let Notices { callbacks, exports, timelines, late, pages, apart, .. } =
                std::mem::take(&mut *self.lock_notices());
            apart.end();
            // Before anything that may wait for a stream.
            for ends in timelines.into_values().chain(late.into_iter().map(|(_, ends)| ends)) {
                ends.end(End::Died);
                if ends.needs_poison() {
                    poison_again(Poison::Timeline(ends));
                }
            }
            for page in pages.into_values().filter(|page| page.is_awaited()) {
                page.poison(Side::Importer);
                poison_again(Poison::Page(page, Side::Importer));
            }
            self.close_idle(exports.values().flat_map(|notices| notices.leases()).collect());
            for (_, callback) in callbacks {
                self.run(callback);
            }
            if let Ok(runtime) = Runtime::get() {
                runtime.imports.forget_link(&self.exporter);
                runtime.poller.unwatch(self);
            }
        }
        self.exporter_gone()
    }

    fn run(&self, callback: GoneCallback) {
        let error = self.exporter_gone();
        if let Ok(runtime) = Runtime::get() {
            runtime.worker.submit(move || callback(&error));
        }
    }

    /// Has callbacks run when the exporter goes, or at once when it has.
    pub(crate) fn on_gone(&self, callback: GoneCallback) -> u64 {
        let mut notices = self.lock_notices();
        notices.next += 1;
        let id = notices.next;
        if self.is_gone() {
            drop(notices);
            self.run(callback);
        } else {
            notices.callbacks.push((id, callback));
        }
        id
    }

    pub(crate) fn forget_callback(&self, id: u64) {
        let forgotten: Vec<_> =
            self.lock_notices().callbacks.extract_if(.., |(known, _)| *known == id).collect();
        // Values that it captured may ask the link when they are dropped: not under the lock.
        drop(forgotten);
    }

    /// From now on notices about the export are kept for a lease on it.
    pub(crate) fn expect_notices(&self, export: ExportId, lease: &KnownLease) -> Arc<ExportNotices> {
        // Under the lock, so that they are not forgotten in between.
        let mut all = self.lock_notices();
        let notices = all.exports.entry(export).or_default();
        notices.add(lease);
        Arc::clone(notices)
    }

    /// A lease on the export has ended; the notices go with the last.
    pub(crate) fn forget_notices(&self, export: ExportId, lease: &KnownLease) {
        let mut all = self.lock_notices();
        if all.exports.get(&export).is_some_and(|notices| notices.remove(lease)) {
            all.exports.remove(&export);
        }
    }

    /// Checks that the caller may talk to this exporter: the connection is the process's, and each `Ipc` has an allow list
    /// of its own.
    pub(crate) fn check_permitted(&self, allow: &AllowList) -> Result<()> {
        if self.is_permitted(allow) {
            return Ok(());
        }
        Err(not_permitted(&self.broker, self.conversation.server()))
    }

    /// Returns whether the caller may talk to this exporter. Costs no system call.
    pub(crate) fn is_permitted(&self, allow: &AllowList) -> bool {
        self.of_own_user || allow.lists(self.conversation.server())
    }

    /// Where it was reached.
    pub(crate) const fn broker(&self) -> &BrokerAddress {
        &self.broker
    }

    /// How many drops the exporter has counted, where it tells.
    pub(crate) fn epoch(&self) -> Option<u64> {
        self.conversation.epoch()
    }

    /// Has the exporter hung up, as far as the kernel knows by now?
    pub(crate) fn check_alive(&self) -> Result<()> {
        if self.is_gone() || self.conversation.has_hung_up() { Err(self.exporter_gone()) } else { Ok(()) }
    }

    /// Is it known, without asking the kernel, that the exporter has not ended? Where it has, and that can be known by
    /// anybody, this is false.
    pub(crate) fn is_known_to_live(&self) -> bool {
        !self.is_gone() && self.conversation.exporter_lives() == Some(true)
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    pub(crate) fn exporter_gone(&self) -> Error {
        Error::ExporterGone { pid: self.exporter.pid }
    }

    pub(super) fn watch_id(&self) -> u64 {
        self.watch_id
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.conversation.socket()
    }

    /// The exporter's process id in our pid namespace, where it has one.
    pub(super) fn exporter_pid(&self) -> Option<u32> {
        Some(self.conversation.server().pid).filter(|pid| *pid != 0)
    }

    /// The right to read from the socket.
    fn turn(&self, deadline: Deadline) -> Result<Turn<'_, Calls>> {
        let waited = self.calls.enter(deadline);
        waited.ok_or_else(|| self.conversation.no_answer(deadline))
    }

    fn lock_notices(&self) -> MutexGuard<'_, Notices> {
        self.notices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Notices {
    /// Finds or maps the page that an exporter names.
    fn place(&mut self, (page, slot, base): (PageId, u32, u64), fds: ReceivedFds) -> Result<Place> {
        if slot >= SLOTS || base >= TIMELINE_END {
            return Err(Error::Protocol(format!(
                "slot {slot} of {SLOTS} with base {base}: a counter page has no such place"
            )));
        }
        if let Some(known) = self.pages.get(&page) {
            return Ok(Place { page: Arc::clone(known), slot, base });
        }
        let file = fds.take_first();
        let file = file.ok_or_else(|| {
            let what = "receiving a page of timeline words (this process may have no file descriptors left; raise its \
                        limit, ulimit -n)";
            Error::io(what, rustix::io::Errno::MFILE)
        })?;
        let opened = WordPage::open(file)?;
        self.pages.insert(page, Arc::clone(&opened));
        Ok(Place { page: opened, slot, base })
    }

    /// The release of a lease, with its words.
    fn release(&mut self, lease: LeaseId) -> Request {
        let mut late = Vec::new();
        self.late.retain(|(lease, ends)| match ends.report() {
            Some(words) => {
                late.push((*lease, words));
                false
            }
            None => true,
        });
        let words = match self.timelines.remove(&lease) {
            None => Some(Returned::default()),
            Some(ends) => {
                ends.end(End::Released);
                let words = ends.report();
                if words.is_none() {
                    self.late.push((lease, ends));
                }
                words
            }
        };
        self.keep_one_unused_page();
        Request::Release { lease, words, late }
    }

    /// A page is registered with devices, which takes a driver call; so one that nothing uses is kept for the next lease.
    fn keep_one_unused_page(&mut self) {
        if self.pages.len() > 1 {
            let mut kept = false;
            self.pages.retain(|_, page| Arc::strong_count(page) > 1 || !std::mem::replace(&mut kept, true));
        }
    }
}

fn poison_again(words: Poison) {
    if let Some(runtime) = Runtime::existing() {
        runtime.poller.poison_again(words);
    }
}

fn count_release() {
    if let Some(runtime) = Runtime::existing() {
        runtime.metrics.releases_total.add(1);
    }
}

/// What was asked apart. Dropping it gives it up.
pub(crate) struct Pending {
    link: Arc<Link>,
    request: RequestId,
    answer: Arc<Answer>,
}

impl Pending {
    /// Waits for the answer.
    pub(crate) fn wait(self, deadline: Deadline) -> Result<(Reply, ReceivedFds)> {
        match self.answer.wait(deadline) {
            Some(Answered::With(Reply::Refused { refusal, .. }, _)) => Err(self.link.explain(refusal)),
            Some(Answered::With(reply, fds)) => Ok((reply, fds)),
            Some(Answered::ByTheEnd) => Err(self.link.exporter_gone()),
            None => Err(self.link.conversation.no_answer(deadline)),
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.link.lock_notices().apart.give_up(self.request);
        // It may have come just now, and nobody has taken it.
        if let Some(Answered::With(Reply::Staging { lease, .. }, _)) = self.answer.take() {
            self.link.release(lease);
        }
    }
}

/// The handles of a lease that have come so far. How many there are is the exporter's word, so it is bounded.
#[derive(Default)]
struct Arrived {
    handles: Vec<WireHandle>,
    fds: ReceivedFds,
    bytes: usize,
}

impl Arrived {
    fn add(&mut self, handles: Vec<WireHandle>, fds: ReceivedFds) -> Result<()> {
        self.bytes += handles.iter().map(|handle| handle.bytes.as_slice().len()).sum::<usize>();
        let (count, descriptors) = (self.handles.len() + handles.len(), self.fds.len() + fds.len());
        if count > MAX_HANDLES || descriptors > MAX_HANDLES || self.bytes > MAX_HANDLE_BYTES {
            return Err(Error::Protocol(format!(
                "it sends more than {MAX_HANDLES} handles, or {MAX_HANDLE_BYTES} bytes of them"
            )));
        }
        if self.handles.is_empty() {
            // All of them, but for regions of many allocations.
            (self.handles, self.fds) = (handles, fds);
        } else {
            self.handles.extend(handles);
            self.fds.append(fds);
        }
        Ok(())
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("exporter", &self.exporter)
            .field("gone", &self.gone)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{HandleBytes, HandleKind};
    use crate::wire::AllocationId;

    fn handles(count: usize, bytes: usize) -> Vec<WireHandle> {
        let handle = |index| WireHandle {
            allocation: AllocationId(index as u64),
            kind: HandleKind(1),
            bytes: HandleBytes::new(vec![0; bytes]),
            fds: 0,
            size: 1,
            generation: None,
        };
        (0..count).map(handle).collect()
    }

    #[test]
    fn an_exporter_that_sends_handles_without_end_is_stopped() {
        let mut arrived = Arrived::default();
        arrived.add(handles(MAX_HANDLES - 1, 0), ReceivedFds::default()).unwrap();
        arrived.add(handles(1, 0), ReceivedFds::default()).unwrap();
        assert!(matches!(arrived.add(handles(1, 0), ReceivedFds::default()), Err(Error::Protocol(_))));
        assert_eq!(arrived.handles.len(), MAX_HANDLES);
        let mut large = Arrived::default();
        large.add(handles(16, MAX_HANDLE_BYTES / 16), ReceivedFds::default()).unwrap();
        assert!(matches!(large.add(handles(1, 1), ReceivedFds::default()), Err(Error::Protocol(_))));
    }
}
