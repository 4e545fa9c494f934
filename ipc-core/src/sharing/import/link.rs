//! The importer's link to one exporter: leases, timelines and callbacks over one connection.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use super::link_pages::LinkPages;
use super::notices::{ExportNotices, NotifiedLease};
use crate::backend::{Access, DeviceIpc};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::model::lease::LeaseId;
use crate::os::kill::kill_point;
use crate::os::process::ProcessIdentity;
use crate::sharing::claims::Claims;
use crate::sharing::lease_page::{LeasePage, LeaseWord};
use crate::sharing::timeline::{Termination, Timeline};
use crate::sharing::{Runtime, RuntimeRef};
use crate::transport::socket::ReceivedFds;
use crate::transport::{AllowList, AsyncReply, Client, Deadline, Outcome, Subscriber};
use crate::wire::descriptor::ExportId;
use crate::wire::protocol::{Reply, Request, RequestId};
use crate::wire::{BrokerAddress, LeaseAhead, OpenedExport, Token};

/// A callback for the termination of an exporter.
pub(crate) type GoneCallback = Box<dyn FnOnce(&Error) + Send>;

/// Maximum time that a release waits for an exporter that does not read.
const RELEASE_DEADLINE: Duration = Duration::from_secs(1);

/// The link to an exporter.
pub(crate) type Link = Client<Subscriptions>;

/// The parts of this process that an exporter's notifications and termination concern.
pub(crate) struct Subscriptions {
    runtime: &'static Runtime,
    exporter: ProcessIdentity,
    broker: BrokerAddress,
    state: Mutex<LinkState>,
    /// The page with the states of the leases, if the exporter has sent one.
    lease_page: OnceLock<Arc<LeasePage>>,
}

#[derive(Default)]
struct LinkState {
    exports: HashMap<ExportId, Arc<ExportNotices>>,
    callbacks: Vec<(u64, GoneCallback)>,
    last_callback: u64,
    pages: LinkPages,
}

impl Subscriptions {
    fn lock(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a notification about an export. Its idle leases end, on the worker; an open in progress checks for itself.
    fn note(&self, export: ExportId, notice: impl FnOnce(&ExportNotices) -> bool) {
        let Some(notices) = self.lock().exports.get(&export).cloned() else { return };
        if notice(&notices) {
            self.run_dropped(&notices);
            self.close_idle(notices.leases());
            // The exporter waits for its memory, so it receives the deferred reports now.
            self.runtime.imports.give_back_soon(self.runtime, &self.exporter);
        }
    }

    /// Runs the callbacks for the drop of an export, if it has been dropped.
    fn run_dropped(&self, notices: &ExportNotices) {
        if notices.is_dropped() {
            for (_, callback) in notices.take_callbacks() {
                self.runtime.worker.submit(callback);
            }
        }
    }

    /// Notes the drops of exports that an exporter which has terminated could not report by a message: their leases' words state
    /// them.
    fn note_unreported_drops(&self, exports: &HashMap<ExportId, Arc<ExportNotices>>) {
        for notices in exports.values().filter(|notices| !notices.is_dropped()) {
            let leases: Vec<_> = notices.leases().iter().filter_map(Weak::upgrade).collect();
            if leases.iter().any(|lease| lease.is_dropped()) && notices.drop_export() {
                self.run_dropped(notices);
            }
            // Not on the poller's thread, where these may be the last references.
            self.runtime.worker.submit(move || drop(leases));
        }
    }

    fn close_idle(&self, leases: Vec<Weak<dyn NotifiedLease>>) {
        let runtime = self.runtime;
        if !leases.is_empty() {
            runtime.worker.submit(move || {
                leases.iter().filter_map(Weak::upgrade).for_each(|lease| lease.close_if_idle(runtime));
            });
        }
    }

    fn run(&self, callback: GoneCallback) {
        let error = Error::ExporterGone { pid: self.exporter.pid };
        self.runtime.worker.submit(move || callback(&error));
    }
}

impl Subscriber for Subscriptions {
    fn notify(&self, message: Reply) -> Result<()> {
        match message {
            Reply::Dropped { export } => self.note(export, ExportNotices::drop_export),
            Reply::Recall { export } => self.note(export, ExportNotices::recall),
            _ => return Err(Error::Protocol("it sent a reply for a notification".into())),
        }
        Ok(())
    }

    fn exporter_gone(&self, client: &Link) {
        let LinkState { callbacks, exports, pages, .. } = std::mem::take(&mut *self.lock());
        // Before calls that may wait for a stream.
        pages.poison(|words| self.runtime.poller.poison_again(words));
        // A forked child has neither the threads nor a table of its own.
        if !self.runtime.owner.is_here() {
            return;
        }
        self.note_unreported_drops(&exports);
        let lost = exports
            .iter()
            .filter(|(_, notices)| !notices.is_dropped())
            .map(|(id, notices)| (id, notices.leases()));
        let lost: Vec<_> = lost.filter(|(_, leases)| !leases.is_empty()).collect();
        let pid = self.exporter.pid;
        if lost.is_empty() {
            tracing::debug!(target: crate::os::log::IMPORT, pid, "an exporter has terminated");
        } else {
            self.runtime.metrics.exporters_lost_total.add(1);
            let leases: usize = lost.iter().map(|(_, leases)| leases.len()).sum();
            tracing::warn!(target: crate::os::log::IMPORT,
                pid,
                leases,
                exports = lost.len(),
                "an exporter has terminated while this process has leases on its exports"
            );
        }
        self.close_idle(exports.values().flat_map(|notices| notices.leases()).collect());
        for (_, callback) in callbacks {
            self.run(callback);
        }
        self.runtime.imports.forget_link(&self.exporter, &self.broker);
        self.runtime.poller.unwatch(client);
    }
}

impl Client<Subscriptions> {
    /// Connects, and verifies that the exporter is the expected one before anything secret is sent.
    pub(crate) fn connect_to(
        exporter: &ProcessIdentity,
        broker: &BrokerAddress,
        allow: &AllowList,
        deadline: Deadline,
        runtime: &'static Runtime,
    ) -> Result<Self> {
        let (state, lease_page) = (Mutex::default(), OnceLock::new());
        let subscriptions =
            Subscriptions { runtime, exporter: *exporter, broker: broker.clone(), state, lease_page };
        let metrics = Arc::clone(&runtime.metrics);
        let mut link = Self::connect(exporter, broker, allow, deadline, (subscriptions, metrics))?;
        if let Some(file) = link.take_lease_page() {
            let page = LeasePage::open(file).inspect_err(|error| {
                tracing::warn!(target: crate::os::log::IMPORT, %error, "the page of lease states cannot be used");
            });
            let _ = page.map(|page| link.subscriber().lease_page.set(page));
        }
        Ok(link)
    }

    /// Returns the state of the process that the connection belongs to.
    pub(crate) const fn runtime(&self) -> RuntimeRef {
        self.subscriber().runtime.for_guard()
    }

    /// Returns the word of a lease. `None` without a page: the exporter then counts the lease as in use.
    pub(super) fn lease_word(&self, slot: u32) -> Option<LeaseWord> {
        self.subscriber().lease_page.get()?.word(slot)
    }

    /// Reports that the state of a lease has changed, if the exporter watches it.
    pub(super) fn report_change(&self, lease: LeaseId) {
        let report = || Request::LeaseChanged { lease };
        self.send_final(report, "the state of a lease", Deadline::after(RELEASE_DEADLINE));
    }

    /// Asks for a lease, by the token of the export and a grant of it where there is one. `like` is a lease that this process holds on memory of an equal layout.
    /// Calls `ahead` with the leases ahead before any notification about them is read.
    #[expect(clippy::too_many_arguments, reason = "the fields of the request")]
    pub(crate) fn open(
        &self,
        export: ExportId,
        (token, grant): (Token, Option<Token>),
        access: Access,
        (on, peer): (DeviceOrdinal, Vec<u8>),
        like: Option<LeaseId>,
        deadline: Deadline,
        ahead: impl FnOnce(&[LeaseAhead]),
    ) -> Result<(OpenedExport, Vec<OwnedFd>)> {
        let open =
            |request| Request::Open { request, export, token, grant, access, on: on.get(), peer, like };
        let note = |reply: &Reply| {
            if let Reply::Opened(opened) = reply {
                ahead(&opened.ahead);
            }
        };
        match self.call_and_note(open, deadline, note)? {
            (Reply::Opened(grant), fds) => Ok((grant, fds.take())),
            _ => Err(self.check_gone(Error::Protocol("it granted what was not asked for".into()))),
        }
    }

    /// Asks whether the export of a lease may still be opened.
    pub(crate) fn confirm(&self, lease: LeaseId, deadline: Deadline) -> Result<()> {
        match self.call(|request| Request::Confirm { request, lease }, deadline)?.0 {
            Reply::Confirmed { .. } => Ok(()),
            _ => Err(self.check_gone(Error::Protocol("it confirmed what was not asked for".into()))),
        }
    }

    /// Requests a lease's timeline. With `ready` the exporter writes its first counter when the bytes are ready.
    pub(crate) fn timeline(
        &self,
        lease: LeaseId,
        backend: &Arc<dyn DeviceIpc>,
        ready: bool,
        deadline: Deadline,
    ) -> Result<Timeline> {
        let request = |request| Request::Timeline { request, lease, ready };
        let (Reply::Timeline { page, slot, base, .. }, fds) = self.call(request, deadline)? else {
            return Err(self.check_gone(Error::Protocol("it gave words that were not asked for".into())));
        };
        let timeline = self.subscriber().lock().pages.timeline(
            lease,
            (page, slot, base),
            fds,
            backend,
            self.exporter().pid,
        );
        let timeline = timeline.map_err(|error| self.check_gone(error))?;
        kill_point!("importer:took-timeline");
        // The exporter may have terminated before this timeline was known.
        if self.is_gone() {
            timeline.endpoint().end(Termination::Died);
        }
        Ok(timeline)
    }

    /// Sends a request whose reply may take long.
    pub(crate) fn request(
        self: &Arc<Self>,
        message: impl FnOnce(RequestId) -> Request,
        deadline: Deadline,
    ) -> Result<Pending> {
        let (request, reply) = self.call_async(message, deadline)?;
        Ok(Pending { link: Arc::clone(self), request, reply })
    }

    /// Releases a lease.
    pub(crate) fn release(&self, lease: LeaseId) {
        let release = || self.subscriber().lock().pages.release(lease);
        self.send_final(release, "a lease", Deadline::after(RELEASE_DEADLINE));
    }

    /// Asks for a grant of the export of a lease, for another process.
    pub(crate) fn grant(&self, lease: LeaseId, limit: Duration, deadline: Deadline) -> Result<Token> {
        let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        match self.call(|request| Request::Grant { request, lease, limit_ms }, deadline)?.0 {
            Reply::Granted { token, .. } => Ok(token),
            _ => Err(self.check_gone(Error::Protocol("it granted what was not asked for".into()))),
        }
    }

    /// Asks for the table of claims of the export of a lease.
    pub(crate) fn claims(&self, lease: LeaseId, deadline: Deadline) -> Result<Claims> {
        let (reply, fds) = self.call(|request| Request::Claims { request, lease }, deadline)?;
        let Reply::Claims { importer, .. } = reply else {
            return Err(self.check_gone(Error::Protocol("it sent what was not asked for".into())));
        };
        let file = fds.take_first();
        let file = file.ok_or_else(|| {
            let what = "receiving a table of claims (this process may have no file descriptors left; raise its limit, ulimit -n)";
            Error::io(what, rustix::io::Errno::MFILE)
        })?;
        Claims::open(file, importer)
    }

    /// Gives grants back.
    pub(crate) fn end_grants(&self, grants: Vec<(ExportId, Token)>) {
        if !grants.is_empty() {
            let end = || Request::EndGrants { grants };
            self.send_final(end, "grants", Deadline::after(RELEASE_DEADLINE));
        }
    }

    /// Reports that this process exits in order, and has completed its device work with the exporter's memory. An exporter that does
    /// not read it in time assumes a death.
    pub(crate) fn announce_exit(&self, deadline: Deadline) {
        let _ = self.try_send(&Request::Exit, deadline);
    }

    /// Runs a callback when the exporter terminates, or now if it has. Returns the callback's number.
    pub(crate) fn on_gone(&self, callback: GoneCallback) -> u64 {
        let mut state = self.subscriber().lock();
        state.last_callback += 1;
        let id = state.last_callback;
        if self.is_gone() {
            drop(state);
            self.subscriber().run(callback);
        } else {
            state.callbacks.push((id, callback));
        }
        id
    }

    /// Removes a callback.
    pub(crate) fn forget_callback(&self, id: u64) {
        let forgotten: Vec<_> =
            self.subscriber().lock().callbacks.extract_if(.., |(known, _)| *known == id).collect();
        // Dropped without the lock: captured values may call the link.
        drop(forgotten);
    }

    /// Records the notifications about the export for a lease on it from now on.
    pub(crate) fn expect_notices(
        &self,
        export: ExportId,
        lease: &Weak<dyn NotifiedLease>,
    ) -> Arc<ExportNotices> {
        // Under the lock, so that they are not removed meanwhile.
        let mut state = self.subscriber().lock();
        let notices = state.exports.entry(export).or_default();
        notices.add(lease);
        Arc::clone(notices)
    }

    /// Returns whether this process has a lease on the export that it may keep idle.
    pub(super) fn may_keep(&self, export: ExportId) -> bool {
        self.subscriber().lock().exports.get(&export).is_some_and(|notices| notices.may_keep())
    }

    /// Forgets a lease on the export that has ended; the notices go with the last.
    pub(crate) fn forget_notices(&self, export: ExportId, lease: &Weak<dyn NotifiedLease>) {
        let mut state = self.subscriber().lock();
        if state.exports.get(&export).is_some_and(|notices| notices.remove(lease)) {
            state.exports.remove(&export);
        }
    }
}

/// An asynchronous request. Dropping it abandons the request.
pub(crate) struct Pending {
    link: Arc<Link>,
    request: RequestId,
    reply: Arc<AsyncReply>,
}

impl Pending {
    /// Waits for the reply.
    pub(crate) fn wait(self, deadline: Deadline) -> Result<(Reply, ReceivedFds)> {
        match self.reply.wait(deadline) {
            Some(Outcome::Reply(Reply::Refused { refusal, .. }, _)) => Err(self.link.explain(refusal)),
            Some(Outcome::Reply(reply, fds)) => Ok((reply, fds)),
            Some(Outcome::ExporterGone) => Err(self.link.error_gone()),
            None => Err(self.link.error_timeout(deadline)),
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.link.abandon(self.request);
        // It may have arrived meanwhile.
        if let Some(Outcome::Reply(Reply::Staging { lease, .. }, _)) = self.reply.take() {
            self.link.release(lease);
        }
    }
}
