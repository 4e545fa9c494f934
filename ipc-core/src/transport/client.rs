//! A process's connection to one exporter's broker: made once, then kept.
//!
//! A caller writes its request and reads the reply on its own thread, so that a round trip wakes no third thread. Between
//! requests the poller reads: notifications, replies to asynchronous requests, and the closing of the connection.

mod handles;
mod messages;

use std::collections::HashSet;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::async_requests::{AsyncReply, AsyncRequests};
use super::conversation::{Conversation, Deadline, ReceiveBuffer, not_permitted, user_not_allowed};
use super::socket::ReceivedFds;
use super::timed_mutex::{TimedGuard, TimedMutex};
use super::watch::{CLIENT_BIT, Epoll, WatchedClient};
use super::{AllowList, Metrics, is_own_user};
use crate::backend::Access;
use crate::model::error::{Error, Result};
use crate::os::kill::kill_point;
use crate::os::process::ProcessIdentity;
use crate::wire::protocol::{Reply, Request, RequestId};
use crate::wire::{BrokerAddress, Refusal, short_detail};

/// The part of a client that the layer above implements. Both methods may run on the poller's thread: they may not block.
pub(crate) trait Subscriber: Send + Sync + Sized + 'static {
    /// Handles a notification.
    ///
    /// # Errors
    ///
    /// A message that is none; the connection is closed then.
    fn notify(&self, message: Reply) -> Result<()>;

    /// Handles the termination of the exporter. Called once.
    fn exporter_gone(&self, client: &Client<Self>);
}

/// A connection to an exporter's broker.
pub(crate) struct Client<S> {
    watch_id: u64,
    exporter: ProcessIdentity,
    broker: BrokerAddress,
    /// The exporter was a process of this process's user when the connection was made.
    of_own_user: bool,
    conversation: Conversation,
    calls: TimedMutex<Calls>,
    gone: AtomicBool,
    /// The poller's descriptors, once the poller watches the connection.
    epoll: OnceLock<Arc<Epoll>>,
    async_requests: Mutex<AsyncRequests>,
    metrics: Arc<Metrics>,
    subscriber: S,
}

/// The right to read from the socket, and the state of its requests.
#[derive(Default)]
struct Calls {
    next: u64,
    inbox: ReceiveBuffer,
    /// Requests whose callers have timed out. A grant that arrives for one of them is given back.
    abandoned: HashSet<u64>,
}

impl<S: Subscriber> Client<S> {
    /// Connects, and verifies that the exporter is the expected one before anything secret is sent.
    pub(crate) fn connect(
        expected: &ProcessIdentity,
        broker: &BrokerAddress,
        allow: &AllowList,
        deadline: Deadline,
        (subscriber, metrics): (S, Arc<Metrics>),
    ) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let (conversation, exporter) = Conversation::connect(broker, Some(expected), allow, deadline)?;
        Ok(Self {
            watch_id: NEXT.fetch_add(1, Ordering::Relaxed) | CLIENT_BIT,
            exporter,
            broker: broker.clone(),
            of_own_user: is_own_user(conversation.server().uid),
            conversation,
            calls: TimedMutex::new(Calls::default()),
            gone: AtomicBool::new(false),
            epoll: OnceLock::new(),
            async_requests: Mutex::default(),
            metrics,
            subscriber,
        })
    }

    /// Sends a request and waits for its reply; the poller does not read meanwhile.
    pub(crate) fn call(
        &self,
        request: impl FnOnce(RequestId) -> Request,
        deadline: Deadline,
    ) -> Result<(Reply, ReceivedFds)> {
        self.call_and_note(request, deadline, |_| {})
    }

    /// Sends a request and waits for its reply. Calls `note` with the reply before any later message is read.
    pub(crate) fn call_and_note(
        &self,
        request: impl FnOnce(RequestId) -> Request,
        deadline: Deadline,
        note: impl FnOnce(&Reply),
    ) -> Result<(Reply, ReceivedFds)> {
        let mut calls = self.lock_calls(deadline)?;
        calls.next += 1;
        let id = RequestId(calls.next);
        if self.is_gone() {
            return Err(self.error_gone());
        }
        self.metrics.requests_total.add(1);
        self.arm(false);
        let reply = self.send(&request(id), deadline).and_then(|()| {
            kill_point!("importer:asked");
            self.reply_to(&mut calls, id, deadline)
        });
        let _ = reply.as_ref().map(|(reply, _)| note(reply));
        if matches!(reply, Err(Error::Timeout { .. })) {
            calls.abandoned.insert(id.0);
        }
        drop(calls);
        if !self.is_gone() {
            self.arm(true);
        }
        reply
    }

    /// Sends a request whose reply may take long: other requests are sent and answered meanwhile.
    pub(crate) fn call_async(
        &self,
        request: impl FnOnce(RequestId) -> Request,
        deadline: Deadline,
    ) -> Result<(RequestId, Arc<AsyncReply>)> {
        let (id, reply) = self.lock_async_requests().begin();
        // Looked at after the entry above was made, which the termination of the exporter answers from now on.
        let sent = if self.is_gone() {
            Err(self.error_gone())
        } else {
            self.metrics.requests_total.add(1);
            self.send(&request(id), deadline)
        };
        sent.inspect_err(|_| self.abandon(id)).map(|()| (id, reply))
    }

    /// Stops waiting for the reply to an asynchronous request.
    pub(crate) fn abandon(&self, request: RequestId) {
        self.lock_async_requests().abandon(request);
    }

    /// Sends a request that has no reply, or whose reply another call takes.
    fn send(&self, request: &Request, deadline: Deadline) -> Result<()> {
        self.conversation.send(request, deadline).map_err(|error| self.check_gone(error))
    }

    /// Sends a request that has no reply. Changes nothing where the exporter does not read it in time.
    pub(crate) fn try_send(&self, request: &Request, deadline: Deadline) -> Result<()> {
        self.conversation.send(request, deadline)
    }

    /// Sends a request that has no reply. An exporter that does not read it in time counts as terminated, one that has terminated
    /// does not need it.
    pub(crate) fn send_final(
        &self,
        request: impl FnOnce() -> Request,
        what: &'static str,
        deadline: Deadline,
    ) {
        if self.is_gone() {
            return;
        }
        self.metrics.releases_total.add(1);
        if let Err(error) = self.send(&request(), deadline) {
            tracing::warn!(target: crate::os::log::TRANSPORT, what, %error, "could not be sent; the exporter counts as terminated");
            self.mark_gone();
        }
    }

    /// Passes an error on; notes the termination of an exporter that has closed the connection or violated the protocol.
    pub(crate) fn check_gone(&self, error: Error) -> Error {
        if matches!(error, Error::ExporterGone { .. } | Error::Protocol(_)) {
            self.mark_gone();
        }
        error
    }

    /// Returns the error for a refusal.
    pub(crate) fn explain(&self, refusal: Refusal) -> Error {
        let pid = self.exporter.pid;
        match refusal {
            Refusal::Dropped => Error::ExportDropped { pid },
            Refusal::WrongToken => Error::wrong_token(pid),
            Refusal::UserNotAllowed { uid } => user_not_allowed(pid, uid),
            Refusal::Access { granted } => Error::AccessDenied { wanted: Access::ReadWrite, granted },
            Refusal::Stale { detail } => Error::StaleGeneration(short_detail(&detail)),
            Refusal::Failed(failure) => failure.into_error(pid),
        }
    }

    /// Notes that the exporter has terminated.
    pub(crate) fn mark_gone(&self) {
        if !self.gone.swap(true, Ordering::AcqRel) {
            let requests = std::mem::take(&mut *self.lock_async_requests());
            requests.end();
            self.subscriber.exporter_gone(self);
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

    pub(crate) const fn exporter(&self) -> &ProcessIdentity {
        &self.exporter
    }

    /// Returns the address that the connection was made to.
    pub(crate) const fn broker(&self) -> &BrokerAddress {
        &self.broker
    }

    pub(crate) const fn subscriber(&self) -> &S {
        &self.subscriber
    }

    /// Takes the file of the page of lease states, where the exporter has sent one.
    pub(crate) fn take_lease_page(&mut self) -> Option<OwnedFd> {
        self.conversation.take_lease_page()
    }

    /// Returns the exporter's count of drops, where it publishes one.
    pub(crate) fn epoch(&self) -> Option<u64> {
        self.conversation.epoch()
    }

    /// Checks, by asking the kernel, that the exporter has not closed the connection.
    pub(crate) fn check_alive(&self) -> Result<()> {
        if self.is_gone() || self.conversation.has_hung_up() { Err(self.error_gone()) } else { Ok(()) }
    }

    /// Returns whether the exporter is known to be alive, without asking the kernel. False as soon as any process can know of its
    /// termination.
    pub(crate) fn is_known_alive(&self) -> bool {
        !self.is_gone() && self.conversation.exporter_lives() == Some(true)
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Returns the error for an exporter that has terminated.
    pub(crate) fn error_gone(&self) -> Error {
        Error::ExporterGone { pid: self.exporter.pid }
    }

    /// Returns the error for an exporter that does not reply in time.
    pub(crate) fn error_timeout(&self, deadline: Deadline) -> Error {
        self.conversation.no_answer(deadline)
    }

    /// Returns whether the exporter is another copy of the library in this process, as the kernel reports it.
    pub(crate) fn is_in_this_process(&self) -> bool {
        self.conversation.server().pid == std::process::id()
    }

    /// Returns the exporter's process id in this pid namespace, where it has one.
    pub(super) fn server_pid(&self) -> Option<u32> {
        Some(self.conversation.server().pid).filter(|pid| *pid != 0)
    }

    pub(super) fn set_watched(&self, epoll: &Arc<Epoll>) {
        let _ = self.epoll.set(Arc::clone(epoll));
    }

    /// Lets the poller read, or keeps it away.
    fn arm(&self, armed: bool) {
        if let Some(epoll) = self.epoll.get() {
            epoll.arm(self.watch_id, self.conversation.socket(), armed);
        }
    }

    fn lock_calls(&self, deadline: Deadline) -> Result<TimedGuard<'_, Calls>> {
        let locked = self.calls.lock(deadline);
        locked.ok_or_else(|| self.conversation.no_answer(deadline))
    }

    fn lock_async_requests(&self) -> MutexGuard<'_, AsyncRequests> {
        self.async_requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Subscriber> WatchedClient for Client<S> {
    fn watch_id(&self) -> u64 {
        self.watch_id
    }

    fn socket(&self) -> BorrowedFd<'_> {
        self.conversation.socket()
    }

    fn on_readable(&self) -> bool {
        Client::on_readable(self)
    }

    fn is_gone(&self) -> bool {
        Client::is_gone(self)
    }

    fn mark_gone(&self) {
        Client::mark_gone(self);
    }
}

impl<S> fmt::Debug for Client<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("exporter", &self.exporter)
            .field("gone", &self.gone)
            .finish_non_exhaustive()
    }
}
