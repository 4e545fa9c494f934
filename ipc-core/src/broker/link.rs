//! An importer's connection to one exporter: made once, then kept.
//!
//! A caller writes its request and reads the answer on its own thread, so that a round trip wakes no third thread.
//! Between requests the poller reads: notices of dropped exports, and the end of the connection.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::poller::LINK_BIT;
use super::protocol::{PROTOCOL_VERSION, Reply, Request, RequestId, decode, encode, short_name};
use super::socket::{self, PeerCredentials};
use super::{AllowList, BrokerAddress, ExportNotices, Grant, Refusal, Token};
use crate::backend::Access;
use crate::descriptor::{Descriptor, ExportId};
use crate::error::{Error, Result};
use crate::import::LeaseKey;
use crate::lease::LeaseId;
use crate::process::ProcessIdentity;
use crate::runtime::{ClosedByFork, Runtime};

/// What is run when the exporter has gone.
pub(crate) type GoneCallback = Box<dyn FnOnce(&Error) + Send>;

/// How long a lease's release may wait for an exporter that does not read.
const RELEASE_DEADLINE: Duration = Duration::from_secs(1);

/// How long to wait before a full queue of an exporter is tried again: connect(2) has nothing to wait on then.
const CONNECT_RETRY: Duration = Duration::from_millis(1);

/// A connection to an exporter's broker.
pub(crate) struct Link {
    watch_id: u64,
    exporter: ProcessIdentity,
    server: PeerCredentials,
    _closed_by_fork: ClosedByFork,
    socket: OwnedFd,
    calls: Mutex<Calls>,
    gone: AtomicBool,
    notices: Mutex<Notices>,
}

/// Whoever holds this reads from the socket.
#[derive(Default)]
struct Calls {
    next: u64,
    buffer: Vec<u8>,
    /// Requests whose caller gave up: their grant goes back when it comes.
    abandoned: HashSet<u64>,
}

#[derive(Default)]
struct Notices {
    exports: HashMap<ExportId, Arc<ExportNotices>>,
    callbacks: Vec<(u64, GoneCallback)>,
    next: u64,
}

impl Link {
    /// Connects, and makes sure that the exporter is the descriptor's before anything secret is sent.
    pub(crate) fn connect(descriptor: &Descriptor, allow: &AllowList, deadline: Deadline) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let exporter = descriptor.exporter;
        let address = &descriptor.broker;
        let socket = socket::new_socket().map_err(|error| Error::io("creating a socket", error))?;
        connect(&socket, address, &exporter, deadline)?;
        let server = socket::peer_credentials(&socket)
            .map_err(|error| Error::io(format!("asking who listens at {address}"), error))?;
        if !allow.permits(&server) {
            return Err(Error::NotPermitted(format!(
                "the exporter's socket {address} is served by user {} (process {}), who is not this process's user; \
                 allow it with IpcBuilder::allow if that is meant",
                server.uid, server.pid
            )));
        }
        let link = Self {
            watch_id: NEXT.fetch_add(1, Ordering::Relaxed) | LINK_BIT,
            exporter,
            server,
            _closed_by_fork: ClosedByFork::new(socket.as_fd()),
            socket,
            calls: Mutex::default(),
            gone: AtomicBool::new(false),
            notices: Mutex::default(),
        };
        link.say_hello(deadline)?;
        Ok(link)
    }

    fn say_hello(&self, deadline: Deadline) -> Result<()> {
        let mut calls = self.lock_calls();
        self.send(&Request::Hello { protocol: PROTOCOL_VERSION, program: program_name() }, deadline)?;
        match self.receive(&mut calls, deadline)? {
            Reply::Hello { protocol, .. } if protocol != PROTOCOL_VERSION => Err(Error::Protocol(format!(
                "it speaks version {protocol} of the protocol and this process version {PROTOCOL_VERSION}; update \
                 device-ipc in the {} process",
                if protocol > PROTOCOL_VERSION { "importing" } else { "exporting" }
            ))),
            Reply::Hello { exporter, .. } if exporter != self.exporter => Err(self.exporter_gone()),
            Reply::Hello { .. } => Ok(()),
            _ => Err(Error::Protocol("its first message is no hello".into())),
        }
    }

    /// Asks for a lease.
    pub(crate) fn open(
        &self,
        export: ExportId,
        token: Token,
        access: Access,
        peer: Vec<u8>,
        deadline: Deadline,
    ) -> Result<(Grant, Vec<OwnedFd>)> {
        let runtime = Runtime::get()?;
        let mut calls = self.lock_calls();
        if self.is_gone() {
            return Err(self.exporter_gone());
        }
        runtime.metrics.requests_total.add(1);
        calls.next += 1;
        let request = RequestId(calls.next);
        runtime.poller.arm(self, false);
        let answer = self
            .send(&Request::Open { request, export, token, access, peer }, deadline)
            .and_then(|()| self.answer_to(&mut calls, request, deadline));
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
    ) -> Result<(Grant, Vec<OwnedFd>)> {
        loop {
            let (reply, fds) = self.receive_with_fds(calls, deadline)?;
            match reply {
                Reply::Grant(grant) if grant.request == request => return Ok((grant, fds)),
                Reply::Refused { request: refused, refusal } if refused == request => {
                    return Err(self.explain(refusal));
                }
                other => self.take_notice(calls, other)?,
            }
        }
    }

    /// Gives a lease back. An exporter that has gone, or does not read, has nothing to be told.
    pub(crate) fn release(&self, lease: LeaseId) {
        if self.is_gone() {
            return;
        }
        let deadline = Deadline::after(RELEASE_DEADLINE);
        if let Err(error) = self.send(&Request::Release { lease }, deadline) {
            tracing::warn!(%lease, %error, "a lease could not be given back; the exporter is taken to have gone");
            self.mark_gone();
        }
    }

    /// Reads what has come while no caller is waiting. Called by the poller; false where a caller reads just now.
    pub(super) fn on_readable(&self) -> bool {
        let mut calls = match self.calls.try_lock() {
            Ok(calls) => calls,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        loop {
            let result = match socket::receive(self.socket(), &mut calls.buffer) {
                Err(Errno::AGAIN) => return true,
                Ok(Some(packet)) => match decode(&packet.bytes) {
                    Ok(reply) => self.take_notice(&mut calls, reply),
                    Err(error) => Err(Error::Protocol(error.to_string())),
                },
                Ok(None) | Err(_) => Err(self.exporter_gone()),
            };
            if result.is_err() {
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
    }

    fn close_idle(&self, leases: Vec<LeaseKey>) {
        let Ok(runtime) = Runtime::get() else { return };
        if !leases.is_empty() {
            runtime.worker.submit(move || leases.iter().for_each(|lease| runtime.imports.close_idle(lease)));
        }
    }

    /// A message that answers nobody who still waits.
    fn take_notice(&self, calls: &mut Calls, reply: Reply) -> Result<()> {
        match reply {
            Reply::Dropped { export } => {
                self.hear(export, ExportNotices::drop_export);
                Ok(())
            }
            Reply::Recall { export } => {
                self.hear(export, ExportNotices::recall);
                Ok(())
            }
            // Its descriptors were closed with the packet.
            Reply::Grant(grant) if calls.abandoned.remove(&grant.request.0) => {
                self.send(&Request::Release { lease: grant.lease }, Deadline::after(RELEASE_DEADLINE))
            }
            Reply::Refused { request, .. } if calls.abandoned.remove(&request.0) => Ok(()),
            _ => Err(Error::Protocol("it answered what nobody had asked".into())),
        }
    }

    fn send(&self, request: &Request, deadline: Deadline) -> Result<()> {
        let bytes = encode(request)?;
        loop {
            match socket::send(self.socket(), &bytes, &[]) {
                Ok(()) => return Ok(()),
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, deadline)?,
                Err(_) => return Err(self.mark_gone()),
            }
        }
    }

    fn receive(&self, calls: &mut Calls, deadline: Deadline) -> Result<Reply> {
        Ok(self.receive_with_fds(calls, deadline)?.0)
    }

    fn receive_with_fds(&self, calls: &mut Calls, deadline: Deadline) -> Result<(Reply, Vec<OwnedFd>)> {
        loop {
            match socket::receive(self.socket(), &mut calls.buffer) {
                Ok(Some(packet)) => {
                    let reply = decode(&packet.bytes).map_err(|error| {
                        self.mark_gone();
                        Error::Protocol(error.to_string())
                    })?;
                    return Ok((reply, packet.fds));
                }
                Err(Errno::AGAIN) => self.wait(PollFlags::IN, deadline)?,
                Ok(None) | Err(_) => return Err(self.mark_gone()),
            }
        }
    }

    fn wait(&self, interest: PollFlags, deadline: Deadline) -> Result<()> {
        match socket::wait_until(self.socket(), interest, deadline.at) {
            Ok(true) => Ok(()),
            Ok(false) => Err(deadline.passed(
                "the answer of the exporting process",
                &format!("; is process {} stopped or very busy?", self.exporter.pid),
            )),
            Err(error) => Err(Error::io("waiting for the exporting process", error)),
        }
    }

    fn explain(&self, refusal: Refusal) -> Error {
        let pid = self.exporter.pid;
        match refusal {
            Refusal::Dropped => Error::ExportDropped { pid },
            Refusal::WrongToken => Error::NotPermitted(format!(
                "process {pid} does not know this descriptor's token; it was altered"
            )),
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
            let (callbacks, exports) = {
                let mut notices = self.lock_notices();
                (std::mem::take(&mut notices.callbacks), std::mem::take(&mut notices.exports))
            };
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

    /// From now on notices about the lease's export are kept for it.
    pub(crate) fn expect_notices(&self, lease: &LeaseKey) -> Arc<ExportNotices> {
        // Under the lock, so that they are not forgotten in between.
        let mut all = self.lock_notices();
        let notices = all.exports.entry(lease.export()).or_default();
        notices.add(lease);
        Arc::clone(notices)
    }

    /// A lease on the export has ended; the notices go with the last.
    pub(crate) fn forget_notices(&self, lease: &LeaseKey) {
        let mut all = self.lock_notices();
        if all.exports.get(&lease.export()).is_some_and(|notices| notices.remove(lease)) {
            all.exports.remove(&lease.export());
        }
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
        self.socket.as_fd()
    }

    /// The exporter's process id in our pid namespace, where it has one.
    pub(super) fn exporter_pid(&self) -> Option<u32> {
        Some(self.server.pid).filter(|pid| *pid != 0)
    }

    fn lock_calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_notices(&self) -> MutexGuard<'_, Notices> {
        self.notices.lock().unwrap_or_else(PoisonError::into_inner)
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

fn connect(
    socket: &OwnedFd,
    address: &BrokerAddress,
    exporter: &ProcessIdentity,
    deadline: Deadline,
) -> Result<()> {
    let target = address.to_socket_address()?;
    loop {
        match rustix::net::connect(socket, &target) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if Instant::now() < deadline.at => std::thread::sleep(CONNECT_RETRY),
            Err(Errno::AGAIN) => return Err(deadline.passed("connecting to the exporting process", "")),
            Err(Errno::CONNREFUSED) => return Err(Error::ExporterGone { pid: exporter.pid }),
            Err(Errno::NOENT) => return Err(missing_socket(address, exporter)),
            Err(error) => return Err(Error::io(format!("connecting to the exporter at {address}"), error)),
        }
    }
}

/// A socket that is not there: its exporter has ended, or its directory is not mounted here.
fn missing_socket(address: &BrokerAddress, exporter: &ProcessIdentity) -> Error {
    match address {
        BrokerAddress::Path(path) if path.parent().is_some_and(|directory| !directory.is_dir()) => Error::io(
            format!(
                "connecting to the exporter at {address} (its directory must be mounted at the same path here)"
            ),
            Errno::NOENT,
        ),
        _ => Error::ExporterGone { pid: exporter.pid },
    }
}

/// This program's name, for the exporter's list of holders.
fn program_name() -> String {
    let path = std::env::args_os().next().unwrap_or_default();
    let name = std::path::Path::new(&path).file_name().unwrap_or_default();
    short_name(&name.to_string_lossy())
}

/// When to give up, and how long that was to take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    pub(crate) at: Instant,
    after: Duration,
}

impl Deadline {
    pub(crate) fn after(time: Duration) -> Self {
        let now = Instant::now();
        // A time beyond the clock's range is as good as for ever.
        let at = now.checked_add(time).unwrap_or(now + Duration::from_secs(u64::from(u32::MAX)));
        Self { at, after: time }
    }

    pub(crate) fn left(&self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    pub(crate) fn passed(&self, what: &str, detail: &str) -> Error {
        Error::Timeout { what: what.to_owned(), after: self.after, detail: detail.to_owned() }
    }
}
