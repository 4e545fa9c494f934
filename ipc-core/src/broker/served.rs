//! One importer's connection, seen from the exporter. Runs on the poller's thread: nothing here may block.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::protocol::{
    PROTOCOL_VERSION, Refusal, Reply, Request, RequestId, WireHandle, decode, encode, short_name,
};
use super::socket::{self, PeerCredentials};
use super::{ConnectionId, Epoch, Grant};
use crate::descriptor::ExportId;
use crate::export::{BorrowedMemory, ExportTable, Granted, Importer, OpenRequest};
use crate::kill::kill_point;
use crate::lease::LeaseId;
use crate::process::ProcessIdentity;
use crate::runtime::{ClosedByFork, Runtime};

/// How many messages may wait for a peer that does not read.
const MAX_UNSENT: usize = 1024;

/// How many leases one process may hold.
const MAX_LEASES: usize = 1 << 20;

/// How many messages of one peer are answered before the others have their turn.
const MESSAGES_PER_TURN: u32 = 32;

/// How many messages a peer may send in a [`RATE_PERIOD`]; after that it waits for the next one.
const MESSAGES_PER_PERIOD: u32 = 10_000;
const RATE_PERIOD: Duration = Duration::from_millis(100);

/// How many tokens a peer may guess. At this rate 128 bits take longer than the universe has.
const WRONG_TOKENS: u32 = 16;

/// What to do with the connection next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Go on.
    Keep,
    /// Go on, but read nothing before that time.
    Pause(Instant),
    /// The peer has ended, or broke the rules.
    Close,
}

/// A connection and the leases that were given over it.
#[derive(Debug)]
pub(super) struct Served {
    id: ConnectionId,
    _closed_by_fork: ClosedByFork,
    socket: OwnedFd,
    peer: PeerCredentials,
    program: Option<String>,
    leases: HashMap<LeaseId, ExportId>,
    unsent: VecDeque<(Vec<u8>, Vec<OwnedFd>)>,
    /// What the poller waits for.
    interest: EventFlags,
    period: Instant,
    read_in_period: u32,
    wrong_tokens: u32,
    /// Answers that wait for the driver's word about borrowed memory.
    waiting: HashMap<u64, Waiting>,
    checks: u64,
}

/// An answer that waits. It holds nothing of the export: what that owns is not for the poller to drop.
#[derive(Debug)]
enum Waiting {
    Grant(RequestId, LeaseId),
    Confirmation(RequestId),
}

impl Served {
    pub(super) fn new(id: ConnectionId, socket: OwnedFd, peer: PeerCredentials) -> Self {
        Self {
            id,
            _closed_by_fork: ClosedByFork::new(socket.as_fd()),
            socket,
            peer,
            program: None,
            leases: HashMap::new(),
            unsent: VecDeque::new(),
            interest: EventFlags::IN,
            period: Instant::now(),
            read_in_period: 0,
            wrong_tokens: 0,
            waiting: HashMap::new(),
            checks: 0,
        }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(super) fn peer(&self) -> &PeerCredentials {
        &self.peer
    }

    /// What the poller is to wait for from now on, if that has changed.
    pub(super) fn take_change_of_interest(&mut self, paused: bool) -> Option<EventFlags> {
        let reading = if paused { EventFlags::empty() } else { EventFlags::IN };
        let writing = if self.unsent.is_empty() { EventFlags::empty() } else { EventFlags::OUT };
        let before = std::mem::replace(&mut self.interest, reading | writing);
        (before != self.interest).then_some(self.interest)
    }

    pub(super) fn has_said_hello(&self) -> bool {
        self.program.is_some()
    }

    pub(super) fn has_leases(&self) -> bool {
        !self.leases.is_empty()
    }

    pub(super) fn into_leases(self) -> HashMap<LeaseId, ExportId> {
        self.leases
    }

    /// Reads and answers what the peer has sent.
    pub(super) fn read(
        &mut self,
        buffer: &mut Vec<u8>,
        exports: &ExportTable,
        identity: &ProcessIdentity,
    ) -> Next {
        if self.period.elapsed() >= RATE_PERIOD {
            self.period = Instant::now();
            self.read_in_period = 0;
        }
        for _ in 0..MESSAGES_PER_TURN {
            if self.read_in_period >= MESSAGES_PER_PERIOD {
                return Next::Pause(self.period + RATE_PERIOD);
            }
            let packet = match socket::receive(self.socket.as_fd(), buffer) {
                Ok(Some(packet)) => packet,
                Err(Errno::AGAIN) => return Next::Keep,
                Ok(None) => return Next::Close,
                Err(error) => return self.broke_the_rules(&error.to_string()),
            };
            self.read_in_period += 1;
            // No request carries descriptors; whatever came along is closed here.
            drop(packet.fds);
            let next = match decode(&packet.bytes) {
                Ok(request) => self.answer(request, exports, identity),
                Err(error) => return self.broke_the_rules(&error.to_string()),
            };
            if next == Next::Close {
                return Next::Close;
            }
        }
        Next::Keep
    }

    fn answer(&mut self, request: Request, exports: &ExportTable, identity: &ProcessIdentity) -> Next {
        match (request, &self.program) {
            (Request::Hello { protocol, program }, None) => {
                self.program = Some(short_name(&program));
                let page: Vec<_> = exports.epoch().map(Epoch::file).into_iter().collect();
                let hello = Reply::Hello { protocol: PROTOCOL_VERSION, exporter: *identity };
                let sent = self.send(&hello, &page);
                kill_point!("exporter:answered-hello");
                if protocol == PROTOCOL_VERSION { sent } else { Next::Close }
            }
            (Request::Open { request, export, token, access, peer: _ }, Some(program)) => {
                let importer =
                    Importer { credentials: self.peer, program: program.clone(), connection: Some(self.id) };
                if self.leases.len() >= MAX_LEASES {
                    let detail = format!("the importing process holds {MAX_LEASES} leases already");
                    return self.send(&Reply::Refused { request, refusal: Refusal::Failed { detail } }, &[]);
                }
                match exports.grant(OpenRequest { export, token, access }, importer) {
                    Ok(granted) => {
                        self.leases.insert(granted.lease, export);
                        kill_point!("exporter:leased");
                        match granted.borrowed.clone() {
                            Some(memory) => self.check_first(memory, Waiting::Grant(request, granted.lease)),
                            None => self.send_grant(request, &granted),
                        }
                    }
                    Err(refusal) => {
                        self.log_refusal(export, &refusal);
                        self.wrong_tokens += u32::from(matches!(refusal, Refusal::WrongToken));
                        if self.wrong_tokens > WRONG_TOKENS {
                            return self.broke_the_rules("it guesses tokens");
                        }
                        self.send(&Reply::Refused { request, refusal }, &[])
                    }
                }
            }
            (Request::Release { lease }, Some(_)) => match self.leases.remove(&lease) {
                Some(export) => {
                    exports.release(export, lease);
                    kill_point!("exporter:released");
                    Next::Keep
                }
                None => self.broke_the_rules("it released a lease that it does not hold"),
            },
            (Request::List { request, after }, Some(_)) => {
                let (exports, more) = exports.list(after, &self.peer);
                self.send(&Reply::Listing { request, exports, more }, &[])
            }
            (Request::Confirm { request, lease }, Some(_)) => {
                let export = self.leases.get(&lease);
                match export.filter(|export| exports.may_be_opened(**export)) {
                    None => self.send(&Reply::Refused { request, refusal: Refusal::Dropped }, &[]),
                    Some(export) => match exports.borrowed(*export) {
                        Some(memory) => self.check_first(memory, Waiting::Confirmation(request)),
                        None => self.send(&Reply::Confirmed { request }, &[]),
                    },
                }
            }
            (Request::Hello { .. }, Some(_)) => self.broke_the_rules("it said hello twice"),
            (_, None) => self.broke_the_rules("it did not say hello first"),
        }
    }

    fn send_grant(&mut self, request: RequestId, granted: &Granted) -> Next {
        let mut fds = Vec::new();
        let mut handles = Vec::with_capacity(granted.shared.allocations.len());
        for allocation in &granted.shared.allocations {
            let exported = allocation.exported();
            fds.extend(exported.fds.iter().map(AsFd::as_fd));
            handles.push(WireHandle {
                allocation: allocation.id(),
                kind: exported.kind,
                bytes: exported.bytes.clone(),
                fds: exported.fds.len() as u16,
                size: exported.extent.allocation.len,
                generation: exported.extent.generation,
            });
        }
        let ready = granted.shared.ready.as_ref().map(|ready| ready.handle.clone());
        let (keep, confirm) = (granted.keep, granted.borrowed.is_some());
        let grant = Grant { request, lease: granted.lease, handles, ready, keep, confirm };
        let next = self.send(&Reply::Grant(grant), &fds);
        kill_point!("exporter:granted");
        next
    }

    /// Has the worker ask the driver about borrowed memory; the answer waits for what it says.
    fn check_first(&mut self, memory: BorrowedMemory, answer: Waiting) -> Next {
        let Ok(runtime) = Runtime::get() else { return Next::Close };
        self.checks += 1;
        let (connection, check) = (self.id, self.checks);
        self.waiting.insert(check, answer);
        runtime.worker.submit(move || runtime.poller.checked(connection, check, memory.check()));
        Next::Keep
    }

    /// The worker has asked the driver.
    pub(super) fn checked(&mut self, check: u64, result: Result<(), String>, exports: &ExportTable) -> Next {
        match (self.waiting.remove(&check), result) {
            (None, _) => Next::Keep,
            (Some(Waiting::Grant(request, lease)), Ok(())) => {
                let export = self.leases.get(&lease);
                match export.and_then(|export| exports.granted(*export, lease)) {
                    Some(granted) => self.send_grant(request, &granted),
                    None => self.send(&Reply::Refused { request, refusal: Refusal::Dropped }, &[]),
                }
            }
            (Some(Waiting::Confirmation(request)), Ok(())) => self.send(&Reply::Confirmed { request }, &[]),
            (Some(Waiting::Grant(request, lease)), Err(detail)) => {
                if let Some(export) = self.leases.remove(&lease) {
                    exports.release(export, lease);
                }
                self.send(&Reply::Refused { request, refusal: Refusal::Stale { detail } }, &[])
            }
            (Some(Waiting::Confirmation(request)), Err(detail)) => {
                self.send(&Reply::Refused { request, refusal: Refusal::Stale { detail } }, &[])
            }
        }
    }

    /// Sends a message now if the peer reads, else later; a peer that never reads loses its connection.
    pub(super) fn send(&mut self, reply: &Reply, fds: &[BorrowedFd<'_>]) -> Next {
        let Ok(bytes) = encode(reply) else { return Next::Close };
        if self.unsent.is_empty() {
            match socket::send(self.socket.as_fd(), &bytes, fds) {
                Ok(()) => return Next::Keep,
                Err(Errno::AGAIN) => {}
                Err(_) => return Next::Close,
            }
        }
        if self.unsent.len() >= MAX_UNSENT {
            return self.broke_the_rules("it does not read its messages");
        }
        let owned: Result<Vec<_>, _> = fds.iter().map(BorrowedFd::try_clone_to_owned).collect();
        match owned {
            Ok(owned) => {
                self.unsent.push_back((bytes, owned));
                Next::Keep
            }
            Err(error) => self.broke_the_rules(&format!("its descriptors could not be kept: {error}")),
        }
    }

    /// Sends what had to wait.
    pub(super) fn flush(&mut self) -> Next {
        while let Some((bytes, fds)) = self.unsent.front() {
            let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            match socket::send(self.socket.as_fd(), bytes, &borrowed) {
                Ok(()) => drop(self.unsent.pop_front()),
                Err(Errno::AGAIN) => return Next::Keep,
                Err(_) => return Next::Close,
            }
        }
        Next::Keep
    }

    fn log_refusal(&self, export: ExportId, refusal: &Refusal) {
        tracing::warn!(pid = self.peer.pid, uid = self.peer.uid, %export, ?refusal, "an open was refused");
    }

    fn broke_the_rules(&self, how: &str) -> Next {
        tracing::warn!(
            pid = self.peer.pid,
            uid = self.peer.uid,
            how,
            "the connection of an importer is closed"
        );
        Next::Close
    }
}
