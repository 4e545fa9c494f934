//! One importer's connection, seen from the exporter. Runs on the poller's thread: nothing here may block.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use super::socket::{self, MAX_FDS, PeerCredentials, PeerSocket};
use super::{ConnectionId, Epoch};
use crate::backend::Access;
use crate::wire::Grant;
use crate::wire::descriptor::ExportId;
use crate::wire::protocol::{
    PROTOCOL_VERSION, PageId, Refusal, Reply, Request, RequestId, WireHandle, decode, encode, short_name,
};

use crate::model::lease::LeaseId;
use crate::os::kill::kill_point;
use crate::os::process::ProcessIdentity;
use crate::sharing::Runtime;
use crate::sharing::export::{ExportTable, Granted, Importer, OpenRequest, stale};
use crate::sharing::staging::{Outgoing, Refused};
use crate::sharing::timeline::{End, Returned, Slots, Timeline};

/// How many answers may wait for a peer that does not read. Notices do not count: it has not asked for them, each export has
/// two at most, and who is told of thousands of drops at a time may take a while to read them.
const MAX_UNSENT: usize = 1024;

/// How many leases one process may hold.
const MAX_LEASES: usize = 1 << 20;

/// How many messages of one peer are answered before the others have their turn.
const MESSAGES_PER_TURN: u32 = 32;

/// How many messages a peer may send in a [`RATE_PERIOD`]; after that it waits for the next one.
const MESSAGES_PER_PERIOD: u32 = 10_000;
const RATE_PERIOD: Duration = Duration::from_millis(100);

/// Maximum number of requests of one peer that wait for the driver; the rest wait in its socket.
const MAX_WAITING: usize = 64;

/// Maximum number of copies of one peer that have begun or wait for room.
const MAX_STAGINGS: usize = 64;

/// How many tokens a peer may guess. At this rate 128 bits take longer than the universe has.
const WRONG_TOKENS: u32 = 16;

/// How many devices one process may open memory on.
const MAX_DEVICES: usize = 64;

/// The longest name of a process on a vendor's whitelist, in bytes.
const MAX_PEER_BYTES: usize = 64;

/// When descriptors are sent again that the kernel did not take, as too many are on their way already.
const DESCRIPTORS_RETRY: Duration = Duration::from_millis(1);

/// How many handles travel in one packet, so that it stays far below the longest.
const HANDLES_OF_A_PACKET: usize = 512;

/// What to do with the connection next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Go on.
    Keep,
    /// Go on, but read and send nothing more before that time.
    Pause(Instant),
    /// The peer has ended, or broke the rules.
    Close,
}

/// A connection and the leases that were given over it.
#[derive(Debug)]
pub(super) struct Served {
    id: ConnectionId,
    socket: PeerSocket,
    peer: PeerCredentials,
    program: Option<Arc<str>>,
    leases: HashMap<LeaseId, ExportId>,
    unsent: VecDeque<Unsent>,
    unsent_answers: usize,
    /// What the poller waits for.
    interest: EventFlags,
    period: Instant,
    read_in_period: u32,
    wrong_tokens: u32,
    /// Answers that wait for the driver's word about borrowed memory.
    waiting: HashMap<u64, Waiting>,
    checks: u64,
    /// The importer's devices, in the order in which it has named them.
    devices: Vec<u32>,
    /// Counter slots of its leases.
    slots: Slots<LeaseId>,
    /// Copies, by their leases.
    stagings: HashMap<LeaseId, Arc<Outgoing>>,
}

/// A message that the peer has not made room for yet.
#[derive(Debug)]
struct Unsent {
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
    is_answer: bool,
}

/// An answer that waits. It holds nothing of the export: what that owns is not for the poller to drop.
#[derive(Debug)]
enum Waiting {
    Grant { request: RequestId, lease: LeaseId, device: usize },
    Confirmation(RequestId),
    Timeline(RequestId, LeaseId, Timeline),
}

impl Served {
    pub(super) fn new(id: ConnectionId, socket: PeerSocket, peer: PeerCredentials) -> Self {
        Self {
            id,
            socket,
            peer,
            program: None,
            leases: HashMap::new(),
            unsent: VecDeque::new(),
            unsent_answers: 0,
            interest: EventFlags::IN,
            period: Instant::now(),
            read_in_period: 0,
            wrong_tokens: 0,
            waiting: HashMap::new(),
            checks: 0,
            devices: Vec::new(),
            slots: Slots::new(true),
            stagings: HashMap::new(),
        }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.fd()
    }

    pub(super) fn peer(&self) -> &PeerCredentials {
        &self.peer
    }

    /// What the poller is to wait for from now on, if that has changed.
    pub(super) fn take_change_of_interest(&mut self, paused: bool) -> Option<EventFlags> {
        let reading = if paused || self.is_full() { EventFlags::empty() } else { EventFlags::IN };
        let writing = if paused || self.unsent.is_empty() { EventFlags::empty() } else { EventFlags::OUT };
        let before = std::mem::replace(&mut self.interest, reading | writing);
        (before != self.interest).then_some(self.interest)
    }

    /// Returns whether as many requests wait for the driver as may: no more are read until one of them has been answered.
    fn is_full(&self) -> bool {
        self.waiting.len() >= MAX_WAITING
    }

    /// Returns whether the poller waits for requests of this peer.
    pub(super) fn is_read(&self) -> bool {
        self.interest.contains(EventFlags::IN)
    }

    pub(super) fn has_said_hello(&self) -> bool {
        self.program.is_some()
    }

    pub(super) fn has_leases(&self) -> bool {
        !self.leases.is_empty()
    }

    /// The counter slots, of a connection that has ended.
    pub(super) fn take_slots(&mut self) -> Slots<LeaseId> {
        std::mem::replace(&mut self.slots, Slots::new(true))
    }

    /// The leases that end with the connection. Those under which a device still copies end when it has finished.
    pub(super) fn into_leases(mut self) -> HashMap<LeaseId, ExportId> {
        for (lease, staging) in &self.stagings {
            if !staging.end(End::Died) {
                self.leases.remove(lease);
            }
        }
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
            if self.is_full() {
                return Next::Keep;
            }
            if self.socket.next_brings_fds() {
                return self.broke_the_rules("it sends descriptors, which no request brings");
            }
            let len = match socket::take_bytes(self.socket.fd(), buffer) {
                Ok(Some(len)) => len,
                Err(Errno::AGAIN) => return Next::Keep,
                Ok(None) => return Next::Close,
                Err(error) => return self.broke_the_rules(&error.to_string()),
            };
            self.read_in_period += 1;
            if let Some(runtime) = Runtime::existing() {
                runtime.metrics.messages_total.add(1);
            }
            let request: Request = match decode(&buffer[..len]) {
                Ok(request) => request,
                Err(error) => return self.broke_the_rules(&error.to_string()),
            };
            let waits = request.has_an_answer();
            let next = self.answer(request, exports, identity);
            // Who waits for an answer has mostly sent nothing behind; the kernel says where there is more.
            if waits || next == Next::Close {
                return next;
            }
        }
        Next::Keep
    }

    fn answer(&mut self, request: Request, exports: &ExportTable, identity: &ProcessIdentity) -> Next {
        match (request, &self.program) {
            (Request::Hello { protocol, program }, None) => {
                self.program = Some(short_name(&program).into());
                let page: Vec<_> = exports.epoch().map(Epoch::file).into_iter().collect();
                let hello = Reply::Hello { protocol: PROTOCOL_VERSION, exporter: *identity };
                let sent = self.send(&hello, &page);
                kill_point!("exporter:answered-hello");
                if protocol == PROTOCOL_VERSION { sent } else { Next::Close }
            }
            (Request::Open { request, export, token, access, on, peer, like }, Some(program)) => {
                let importer = Importer {
                    credentials: self.peer,
                    program: Arc::clone(program),
                    connection: Some(self.id),
                };
                let failed = |detail| Reply::Refused { request, refusal: Refusal::Failed { detail } };
                if let Some(detail) = self.too_many_leases() {
                    return self.send(&failed(detail), &[]);
                }
                if peer.len() > MAX_PEER_BYTES {
                    return self.broke_the_rules("its name on a whitelist is too long");
                }
                let Some(device) = self.position_of(on) else {
                    let detail = format!("the importing process has used {MAX_DEVICES} devices already");
                    return self.send(&failed(detail), &[]);
                };
                match exports.grant(OpenRequest { export, token, access }, importer) {
                    Ok(granted) => {
                        // Before there is the new lease, which a guess might name.
                        let open_there = self.has_it_open(like, &granted, exports);
                        self.leases.insert(granted.lease, export);
                        kill_point!("exporter:leased");
                        if open_there {
                            self.send_last(request, &granted, Vec::new(), true, &[])
                        } else if granted.needs_the_driver(device) {
                            let answer = Waiting::Grant { request, lease: granted.lease, device };
                            self.ask_the_driver(answer, move || granted.prepare(device, &peer))
                        } else {
                            self.send_grant(request, &granted, device)
                        }
                    }
                    Err(refusal) => self.refuse(request, export, refusal),
                }
            }
            (Request::Release { lease, words, late }, Some(_)) => match self.leases.remove(&lease) {
                Some(export) => {
                    if let Some(words) = words {
                        self.slots.returned(lease, words);
                    }
                    let staging = self.stagings.remove(&lease);
                    if staging.is_none_or(|staging| staging.end(End::Released)) {
                        exports.release(export, lease, End::Released);
                    }
                    self.give_back(lease, late);
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
                        Some(memory) => {
                            self.ask_the_driver(Waiting::Confirmation(request), move || stale(memory.check()))
                        }
                        None => self.send(&Reply::Confirmed { request }, &[]),
                    },
                }
            }
            (Request::Timeline { request, lease, ready }, Some(_)) => {
                self.timeline(request, lease, ready, exports)
            }
            (Request::EndGrants { grants }, Some(_)) => {
                // One that is not there any more ended with its channel.
                grants.into_iter().for_each(|(export, token)| exports.end_grant(export, token));
                Next::Keep
            }
            (Request::Stage { request, export, token }, Some(program)) => {
                let importer = Importer {
                    credentials: self.peer,
                    program: Arc::clone(program),
                    connection: Some(self.id),
                };
                self.stage(
                    request,
                    OpenRequest { export, token, access: Access::ReadOnly },
                    importer,
                    exports,
                )
            }
            (Request::StageNext { request, lease, chunk }, Some(_)) => {
                let Some(staging) = self.stagings.get(&lease) else {
                    return self.broke_the_rules("it asked for a chunk of a copy that it does not hold");
                };
                match staging.ask(request, chunk) {
                    Ok(Some(answer)) => self.send(&answer, &[]),
                    Ok(None) => Next::Keep,
                    Err(how) => self.broke_the_rules(how),
                }
            }
            (Request::Hello { .. }, Some(_)) => self.broke_the_rules("it said hello twice"),
            (_, None) => self.broke_the_rules("it did not say hello first"),
        }
    }

    /// Begins a lease under which the bytes are copied; all that follows is the worker's.
    fn stage(
        &mut self,
        request: RequestId,
        wanted: OpenRequest,
        importer: Importer,
        exports: &ExportTable,
    ) -> Next {
        let too_many_copies = || {
            let many = self.stagings.len() >= MAX_STAGINGS;
            many.then(|| format!("the importing process has {MAX_STAGINGS} copies under way already"))
        };
        if let Some(detail) = self.too_many_leases().or_else(too_many_copies) {
            return self.send(&Reply::Refused { request, refusal: Refusal::Failed { detail } }, &[]);
        }
        let export = wanted.export;
        let granted = match exports.grant(wanted, importer) {
            Ok(granted) => granted,
            Err(refusal) => return self.refuse(request, export, refusal),
        };
        let lease = granted.lease;
        let Some(staging) = Outgoing::begin((self.id, self.peer.pid), export, request, &granted) else {
            drop(granted);
            exports.release(export, lease, End::Released);
            return self.send(&Reply::Refused { request, refusal: Refusal::Dropped }, &[]);
        };
        self.leases.insert(lease, export);
        self.stagings.insert(lease, staging);
        Next::Keep
    }

    /// A copy could not begin: its importer, which does not know of the lease yet, is told.
    pub(super) fn staging_refused(&mut self, refused: Refused, exports: &ExportTable) -> Next {
        let Refused { lease, request, refusal } = refused;
        let Some(staging) = self.stagings.remove(&lease) else { return Next::Keep };
        if let Some(export) = self.leases.remove(&lease)
            && staging.end(End::Released)
        {
            exports.release(export, lease, End::Released);
        }
        self.send(&Reply::Refused { request, refusal }, &[])
    }

    /// Others wait for host memory that this importer may be leaving unused.
    pub(super) fn end_silent_stagings(&self) {
        self.stagings.values().for_each(|staging| staging.end_if_silent());
    }

    fn too_many_leases(&self) -> Option<String> {
        let many = self.leases.len() >= MAX_LEASES;
        many.then(|| format!("the importing process holds {MAX_LEASES} leases already"))
    }

    fn refuse(&mut self, request: RequestId, export: ExportId, refusal: Refusal) -> Next {
        self.log_refusal(export, &refusal);
        self.wrong_tokens += u32::from(matches!(refusal, Refusal::WrongToken));
        if self.wrong_tokens > WRONG_TOKENS {
            return self.broke_the_rules("it guesses tokens");
        }
        self.send(&Reply::Refused { request, refusal }, &[])
    }

    /// Gives a lease its words; where the importer waits for the bytes by one of them, once the driver has been told.
    fn timeline(&mut self, request: RequestId, lease: LeaseId, ready: bool, exports: &ExportTable) -> Next {
        let Some(export) = self.leases.get(&lease) else {
            return self.broke_the_rules("it asked for the words of a lease that it does not hold");
        };
        let slots = &mut self.slots;
        let begun = exports.timeline(*export, lease, !ready, || slots.take());
        let (timeline, shared) = match begun {
            Ok(Some(begun)) => begun,
            Ok(None) => return self.send(&Reply::Refused { request, refusal: Refusal::Dropped }, &[]),
            Err(error) => {
                let refusal = Refusal::Failed { detail: error.to_string() };
                return self.send(&Reply::Refused { request, refusal }, &[]);
            }
        };
        self.slots.note(lease, &timeline);
        if !ready || shared.ready.is_none() {
            return self.send_timeline(request, lease, &timeline);
        }
        let waiting = Waiting::Timeline(request, lease, timeline.clone());
        self.ask_the_driver(waiting, move || {
            let Some(ready) = &shared.ready else { return Ok(()) };
            let signalled = timeline.signal_ready(&*ready.event);
            signalled.map_err(|error| Refusal::Failed { detail: error.to_string() })
        })
    }

    /// The page comes along each time: an importer that gave up waiting may have missed it.
    fn send_timeline(&mut self, request: RequestId, lease: LeaseId, timeline: &Timeline) -> Next {
        let place = timeline.ends().place();
        let (slot, base) = (place.slot, place.base);
        let next = match self.slots.page_of(lease) {
            Some((number, file)) => {
                self.send(&Reply::Timeline { request, page: PageId(number), slot, base }, &[file.as_fd()])
            }
            // The lease was released meanwhile.
            None => self.send(&Reply::Refused { request, refusal: Refusal::Dropped }, &[]),
        };
        kill_point!("exporter:gave-timeline");
        next
    }

    /// Frees the words of a lease that has ended, and of others whose words the importer has finished with since.
    fn give_back(&mut self, lease: LeaseId, late: Vec<(LeaseId, Returned)>) {
        self.slots.give_back(lease);
        for (lease, words) in late {
            // Words of a lease that has not ended are not returned so.
            if !self.leases.contains_key(&lease) {
                self.slots.returned(lease, words);
                self.slots.give_back(lease);
            }
        }
    }

    /// Which of the importer's devices this is: its first, second, … `None` where there are too many.
    fn position_of(&mut self, on: u32) -> Option<usize> {
        if let Some(known) = self.devices.iter().position(|device| *device == on) {
            return Some(known);
        }
        if self.devices.len() >= MAX_DEVICES {
            return None;
        }
        self.devices.push(on);
        Some(self.devices.len() - 1)
    }

    /// The handles in as many packets as their descriptors need, the last of them with the lease.
    fn send_grant(&mut self, request: RequestId, granted: &Granted, device: usize) -> Next {
        let allocations = &granted.shared.allocations;
        let exported: Option<Vec<_>> =
            allocations.iter().map(|allocation| allocation.handle(device)).collect();
        let Some(exported) = exported else {
            return self.broke_the_rules("a handle was to be sent that has not been made");
        };
        let mut fds = Vec::new();
        let mut packet = Vec::with_capacity(exported.len().min(HANDLES_OF_A_PACKET));
        for (allocation, exported) in allocations.iter().zip(&exported) {
            if fds.len() + exported.fds.len() > MAX_FDS || packet.len() >= HANDLES_OF_A_PACKET {
                let handles = std::mem::take(&mut packet);
                let next = self.send(&Reply::Handles { request, handles }, &fds);
                if next != Next::Keep {
                    return next;
                }
                fds.clear();
            }
            fds.extend(exported.fds.iter().map(AsFd::as_fd));
            packet.push(WireHandle {
                allocation: allocation.id(),
                kind: exported.kind,
                bytes: exported.bytes.clone(),
                fds: exported.fds.len() as u16,
                size: exported.extent.allocation.len,
                generation: exported.extent.generation,
            });
        }
        self.send_last(request, granted, packet, false, &fds)
    }

    /// Does the importer hold a lease on the very same allocations, whose handles it has got, so that it needs them no more?
    fn has_it_open(&self, like: Option<LeaseId>, granted: &Granted, exports: &ExportTable) -> bool {
        let held = like.and_then(|lease| Some((*self.leases.get(&lease)?, lease)));
        let copied = like.is_some_and(|lease| self.stagings.contains_key(&lease));
        let same = |(export, lease)| exports.has_allocations_of(export, lease, &granted.shared);
        granted.borrowed.is_none() && !copied && held.is_some_and(same)
    }

    /// The lease, with the last of the handles.
    fn send_last(
        &mut self,
        request: RequestId,
        granted: &Granted,
        handles: Vec<WireHandle>,
        like: bool,
        fds: &[BorrowedFd<'_>],
    ) -> Next {
        let ready = granted.shared.ready.as_ref().map(|ready| ready.handle.clone());
        let (lease, keep, confirm) = (granted.lease, granted.keep, granted.borrowed.is_some());
        let next =
            self.send(&Reply::Grant(Grant { request, lease, handles, ready, keep, confirm, like }), fds);
        kill_point!("exporter:granted");
        next
    }

    /// Has the worker do what calls the driver; the answer waits for what it says.
    fn ask_the_driver(
        &mut self,
        answer: Waiting,
        ask: impl FnOnce() -> std::result::Result<(), Refusal> + Send + 'static,
    ) -> Next {
        let Ok(runtime) = Runtime::get() else { return Next::Close };
        self.checks += 1;
        let (connection, check) = (self.id, self.checks);
        self.waiting.insert(check, answer);
        runtime.worker.submit(move || runtime.poller.checked(connection, check, ask()));
        Next::Keep
    }

    /// The worker has asked the driver.
    pub(super) fn checked(
        &mut self,
        check: u64,
        result: std::result::Result<(), Refusal>,
        exports: &ExportTable,
    ) -> Next {
        match (self.waiting.remove(&check), result) {
            (None, _) => Next::Keep,
            (Some(Waiting::Grant { request, lease, device }), Ok(())) => {
                let export = self.leases.get(&lease);
                match export.and_then(|export| exports.granted(*export, lease)) {
                    Some(granted) => self.send_grant(request, &granted, device),
                    None => self.send(&Reply::Refused { request, refusal: Refusal::Dropped }, &[]),
                }
            }
            (Some(Waiting::Confirmation(request)), Ok(())) => self.send(&Reply::Confirmed { request }, &[]),
            (Some(Waiting::Grant { request, lease, .. }), Err(refusal)) => {
                if let Some(export) = self.leases.remove(&lease) {
                    exports.release(export, lease, End::Released);
                }
                self.send(&Reply::Refused { request, refusal }, &[])
            }
            (Some(Waiting::Timeline(request, lease, timeline)), Ok(())) => {
                self.send_timeline(request, lease, &timeline)
            }
            (Some(Waiting::Confirmation(request) | Waiting::Timeline(request, ..)), Err(refusal)) => {
                self.send(&Reply::Refused { request, refusal }, &[])
            }
        }
    }

    /// Sends a message now if the peer reads, else later; a peer that never reads loses its connection.
    pub(super) fn send(&mut self, reply: &Reply, fds: &[BorrowedFd<'_>]) -> Next {
        let Ok(bytes) = encode(reply) else { return Next::Close };
        if self.unsent.is_empty() {
            match socket::send(self.socket.fd(), &bytes, fds) {
                Ok(()) => return Next::Keep,
                Err(Errno::AGAIN | Errno::TOOMANYREFS) => {}
                Err(_) => return Next::Close,
            }
        }
        let is_answer = !matches!(reply, Reply::Dropped { .. } | Reply::Recall { .. });
        if is_answer && self.unsent_answers >= MAX_UNSENT {
            return self.broke_the_rules("it does not read its messages");
        }
        let owned: std::io::Result<Vec<_>> = fds.iter().map(BorrowedFd::try_clone_to_owned).collect();
        match owned {
            Ok(fds) => {
                self.unsent_answers += usize::from(is_answer);
                self.unsent.push_back(Unsent { bytes, fds, is_answer });
                Next::Keep
            }
            Err(error) => self.broke_the_rules(&format!("its descriptors could not be kept: {error}")),
        }
    }

    /// Sends what had to wait.
    pub(super) fn flush(&mut self) -> Next {
        while let Some(first) = self.unsent.front() {
            let borrowed: Vec<_> = first.fds.iter().map(AsFd::as_fd).collect();
            match socket::send(self.socket.fd(), &first.bytes, &borrowed) {
                Ok(()) => {
                    self.unsent_answers -= usize::from(first.is_answer);
                    self.unsent.pop_front();
                }
                Err(Errno::AGAIN) => return Next::Keep,
                // The user has as many descriptors on their way as the kernel allows; peers that read make room.
                Err(Errno::TOOMANYREFS) => return Next::Pause(Instant::now() + DESCRIPTORS_RETRY),
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
