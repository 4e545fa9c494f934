//! An importer's connection to one exporter: made once, then kept.
//!
//! A caller writes its request and reads the answer on its own thread, so that a round trip wakes no third thread.
//! Between requests the poller reads: notices of dropped exports, and the end of the connection.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::apart::{Answer, Answered, Apart};
use super::conversation::{Conversation, Deadline, Inbox};
use super::gate::{Gate, Turn};
use super::poller::LINK_BIT;
use super::protocol::{PageId, Reply, Request, RequestId};
use super::{AllowList, BrokerAddress, ExportNotices, Grant, MAX_HANDLES, Refusal, Token, WireHandle};
use crate::backend::{Access, DeviceIpc};
use crate::descriptor::ExportId;
use crate::device::DeviceOrdinal;
use crate::error::{Error, Result};
use crate::import::KnownLease;
use crate::kill::kill_point;
use crate::lease::LeaseId;
use crate::process::ProcessIdentity;
use crate::runtime::Runtime;
use crate::timeline::{End, Ends, SLOTS, Side, Timeline, WordPage};

/// What is run when the exporter has gone.
pub(crate) type GoneCallback = Box<dyn FnOnce(&Error) + Send>;

/// How many bytes the handles of a lease have at most.
const MAX_HANDLE_BYTES: usize = 16 * 1024 * 1024;

/// How long a lease's release may wait for an exporter that does not read.
const RELEASE_DEADLINE: Duration = Duration::from_secs(1);

/// A connection to an exporter's broker.
pub(crate) struct Link {
    watch_id: u64,
    exporter: ProcessIdentity,
    broker: BrokerAddress,
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
    timelines: Vec<Weak<Ends>>,
    pages: HashMap<PageId, Weak<WordPage>>,
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
            (Reply::Grant(grant), fds) => Ok((grant, fds)),
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
        let (Reply::Timeline { page, slot, .. }, fds) =
            self.call(runtime, calls, &message, request, deadline)?
        else {
            return Err(self.ended_by(Error::Protocol("it gave words that were not asked for".into())));
        };
        let place = self.place(page, slot, fds).map_err(|error| self.ended_by(error))?;
        let timeline = Timeline::new(place, Side::Importer, Arc::clone(backend), self.exporter.pid);
        kill_point!("importer:took-timeline");
        let mut notices = self.lock_notices();
        notices.timelines.retain(|known| known.strong_count() > 0);
        notices.timelines.push(Arc::downgrade(timeline.ends()));
        drop(notices);
        // It may have gone in between, and have ended all that there were.
        if self.is_gone() {
            timeline.ends().end(End::Died);
        }
        Ok(timeline)
    }

    /// Finds or maps the page that an exporter names.
    fn place(&self, page: PageId, slot: u32, fds: Vec<OwnedFd>) -> Result<(Arc<WordPage>, u32)> {
        if slot >= SLOTS {
            return Err(Error::Protocol(format!("slot {slot} is none of a page's {SLOTS}")));
        }
        let mut notices = self.lock_notices();
        if let Some(known) = notices.pages.get(&page).and_then(Weak::upgrade) {
            return Ok((known, slot));
        }
        let file = fds.into_iter().next();
        let file = file.ok_or_else(|| {
            let what = "receiving a page of timeline words (this process may have no file descriptors left; raise its \
                        limit, ulimit -n)";
            Error::io(what, rustix::io::Errno::MFILE)
        })?;
        let opened = WordPage::open(file)?;
        notices.pages.retain(|_, known| known.strong_count() > 0);
        notices.pages.insert(page, Arc::downgrade(&opened));
        Ok((opened, slot))
    }

    /// Sends a request and waits for its answer; the poller is kept away meanwhile.
    fn call(
        &self,
        runtime: &Runtime,
        mut calls: Turn<'_, Calls>,
        message: &Request,
        request: RequestId,
        deadline: Deadline,
    ) -> Result<(Reply, Vec<OwnedFd>)> {
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
    ) -> Result<(Reply, Vec<OwnedFd>)> {
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
                other => self.take_notice(calls, other, fds).map_err(|error| self.ended_by(error))?,
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
    fn take_apart(&self, reply: Reply, fds: Vec<OwnedFd>) -> Result<()> {
        let lease = if let Reply::Staging { lease, .. } = &reply { Some(*lease) } else { None };
        let delivered = self.lock_notices().apart.deliver(reply, fds)?;
        match lease.filter(|_| !delivered) {
            Some(lease) => {
                self.conversation.send(&Request::Release { lease }, Deadline::after(Duration::ZERO))
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
        if let Err(error) = self.send(&Request::Release { lease }, deadline) {
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
        loop {
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
    }

    /// Leases that nobody uses go back, on the worker's thread; one that begins just now looks for itself.
    fn hear(&self, export: ExportId, notice: impl FnOnce(&ExportNotices)) {
        let Some(notices) = self.lock_notices().exports.get(&export).cloned() else { return };
        notice(&notices);
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
    fn take_notice(&self, calls: &mut Calls, reply: Reply, fds: Vec<OwnedFd>) -> Result<()> {
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
            Reply::Grant(grant) if calls.abandoned.remove(&grant.request.0) => self
                .conversation
                .send(&Request::Release { lease: grant.lease }, Deadline::after(Duration::ZERO)),
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
            Refusal::UserNotAllowed { uid } => Error::NotPermitted(format!(
                "process {pid} does not allow user {uid} to open this export; allow it there with IpcBuilder::allow"
            )),
            Refusal::Access { granted } => Error::AccessDenied { wanted: Access::ReadWrite, granted },
            Refusal::Stale { detail } => Error::StaleGeneration(detail),
            Refusal::Failed { detail } => {
                Error::NotPermitted(format!("process {pid} could not share it: {detail}"))
            }
        }
    }

    /// Notes that the exporter has ended; what waits for that is run by the worker.
    pub(crate) fn mark_gone(&self) -> Error {
        if !self.gone.swap(true, Ordering::AcqRel) {
            tracing::debug!(pid = self.exporter.pid, "an exporter has gone");
            let Notices { callbacks, exports, timelines, apart, .. } =
                std::mem::take(&mut *self.lock_notices());
            apart.end();
            // Before anything that may wait for a stream.
            for ends in timelines.iter().filter_map(Weak::upgrade) {
                ends.end(End::Died);
                if let Some(runtime) = Runtime::existing() {
                    runtime.poller.poison_again(ends);
                }
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
        self.lock_notices().callbacks.retain(|(known, _)| *known != id);
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
    pub(crate) fn wait(self, deadline: Deadline) -> Result<(Reply, Vec<OwnedFd>)> {
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
    fds: Vec<OwnedFd>,
    bytes: usize,
}

impl Arrived {
    fn add(&mut self, handles: Vec<WireHandle>, fds: Vec<OwnedFd>) -> Result<()> {
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
            self.fds.extend(fds);
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
    use crate::broker::AllocationId;

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
        arrived.add(handles(MAX_HANDLES - 1, 0), Vec::new()).unwrap();
        arrived.add(handles(1, 0), Vec::new()).unwrap();
        assert!(matches!(arrived.add(handles(1, 0), Vec::new()), Err(Error::Protocol(_))));
        assert_eq!(arrived.handles.len(), MAX_HANDLES);
        let mut large = Arrived::default();
        large.add(handles(16, MAX_HANDLE_BYTES / 16), Vec::new()).unwrap();
        assert!(matches!(large.add(handles(1, 1), Vec::new()), Err(Error::Protocol(_))));
    }
}
