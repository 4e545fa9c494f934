//! The session of one importer: its leases, and what its requests change.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use crate::backend::Access;
use crate::model::lease::LeaseId;
use crate::os::kill::kill_point;
use crate::os::log::Throttle;
use crate::os::process::ProcessIdentity;
use crate::sharing::Runtime;
use crate::sharing::claims::ClaimTable;
use crate::sharing::export::{ExportTable, Importer, OpenRequest, Readahead, stale};
use crate::sharing::lease_page::{LeasePlaces, LeaseWord};
use crate::sharing::staging::{Outgoing, Refused};
use crate::sharing::timeline::{Returned, Slots, Termination, Timeline};
use crate::transport::{Allotment, Budget, Connection, ConnectionId, Epoch, Next, PeerCredentials, Session};
use crate::wire::MAX_LEASES_AHEAD;
use crate::wire::descriptor::ExportId;
use crate::wire::protocol::{PROTOCOL_VERSION, Reply, Request, RequestId};
use crate::wire::{Failure, Refusal, short_name};

/// The longest time limit of a grant that an importer asks for.
const LONGEST_GRANT: Duration = Duration::from_secs(3600);

/// Number of leases of a block, the unit in which an importer takes its share of [`LEASES`].
const LEASES_OF_A_BLOCK: usize = 1024;

/// The leases of all importers, in blocks.
static LEASES: Budget = Budget::new("blocks of 1024 leases", || 1024);

/// The grants with a time limit that importers have asked for.
static GRANTS: Budget = Budget::new("unused grants", || 1 << 18);

/// Maximum number of requests of one peer that wait for the driver; the rest wait in its socket.
const MAX_WAITING: usize = 64;

/// Maximum number of wrong tokens of a peer. At this rate 128 bits take longer than the universe has existed.
const WRONG_TOKENS: u32 = 16;

/// Maximum number of devices that one process may open memory on.
const MAX_DEVICES: usize = 64;

/// Maximum length of the name of a process on a vendor's whitelist, in bytes.
const MAX_PEER_BYTES: usize = 64;

/// Maximum number of exports in a log event.
const SHOWN_EXPORTS: usize = 8;

/// The state of one importer's connection.
pub(crate) struct BrokerSession<'a> {
    pub(super) runtime: &'static Runtime,
    pub(super) exports: &'a ExportTable,
    pub(super) identity: ProcessIdentity,
    pub(super) connection: ConnectionId,
    /// The importer's program, once it has said hello.
    program: Option<Arc<str>>,
    pub(super) leases: HashMap<LeaseId, ExportId>,
    /// One for each begun block of leases after the first, which each connection has.
    blocks: Vec<Allotment>,
    wrong_tokens: u32,
    /// Replies that wait for the driver.
    pub(super) waiting: HashMap<u64, WaitingAnswer>,
    /// The number of the last of them.
    pub(super) checks: u64,
    /// The importer's devices, in the order of their first use.
    devices: Vec<u32>,
    /// Counter slots of the leases.
    pub(super) slots: Slots<LeaseId>,
    /// Words of the leases in the page of lease states.
    pub(super) places: LeasePlaces,
    /// Copies, by their leases.
    pub(super) stagings: HashMap<LeaseId, Arc<Outgoing>>,
    /// The number of the next opens that get no leases ahead, because the importer has returned one: its cache has no room, or the
    /// bytes are not ready yet.
    opens_without_ahead: usize,
    readahead: Readahead,
    /// The tables of claims that the importer has received, and its numbers there.
    claims: Vec<(Arc<ClaimTable>, u32)>,
    /// The importer exits in order, and its device work with the memory has completed.
    exits: bool,
}

/// A reply that waits for the driver. It contains no reference to the export, because the poller must not drop an owner.
pub(super) enum WaitingAnswer {
    Opened { request: RequestId, lease: LeaseId, device: usize },
    Confirmation(RequestId),
    Timeline(RequestId, LeaseId, Timeline),
}

/// An event from the worker.
pub(crate) enum Event {
    /// The driver has been called for the waiting reply with this number.
    Checked(u64, Result<(), Refusal>),
    /// A copy could not begin.
    StagingRefused(Refused),
    /// A reply of a copy, with its memory file if there is one.
    Answered(Reply, Option<OwnedFd>),
}

impl Session for BrokerSession<'_> {
    type Event = Event;

    fn answer(&mut self, request: Request, connection: &mut Connection) -> Next {
        match (request, &self.program) {
            (Request::Hello { protocol, program }, None) => {
                self.program = Some(short_name(&program).into());
                self.say_hello(protocol, connection)
            }
            (Request::Open { request, export, token, grant, access, on, peer, like }, Some(program)) => {
                let importer = self.importer(program, connection);
                let wanted = OpenRequest { export, token, grant, access };
                self.open(request, wanted, importer, (on, peer, like), connection)
            }
            (Request::Release { lease, words, late }, Some(_)) => {
                self.release(lease, words, late, connection)
            }
            (Request::List { request, after }, Some(_)) => {
                let (exports, more) = self.exports.list(after, connection.peer());
                connection.send(&Reply::Listing { request, exports, more }, &[])
            }
            (Request::Confirm { request, lease }, Some(_)) => self.confirm(request, lease, connection),
            (Request::Timeline { request, lease, ready }, Some(_)) => {
                self.timeline(request, lease, ready, connection)
            }
            (Request::Grant { request, lease, limit_ms }, Some(_)) => {
                let limit = Duration::from_millis(limit_ms);
                connection.send(&self.grant(request, lease, limit, connection.peer()), &[])
            }
            (Request::EndGrants { grants }, Some(_)) => {
                // A grant that does not exist any longer ended with its channel, or at its time limit.
                grants.into_iter().for_each(|(export, token)| self.exports.end_grant(export, token));
                Next::Keep
            }
            (Request::Stage { request, export, token, grant, spans }, Some(program)) => {
                let importer = self.importer(program, connection);
                let wanted = OpenRequest { export, token, grant, access: Access::ReadOnly };
                self.stage(request, (wanted, &spans), importer, connection)
            }
            (Request::StageNext { request, lease, chunk }, Some(_)) => {
                let Some(staging) = self.stagings.get(&lease) else {
                    return connection.violated("it asked for a chunk of a copy that it does not hold");
                };
                match staging.ask(request, chunk) {
                    Ok(Some(answer)) => connection.send(&answer, &[]),
                    Ok(None) => Next::Keep,
                    Err(how) => connection.violated(how),
                }
            }
            (Request::Claims { request, lease }, Some(_)) => self.claims(request, lease, connection),
            (Request::Exit, Some(_)) => {
                self.exits = true;
                Next::Keep
            }
            (Request::LeaseChanged { lease }, Some(_)) => {
                // The importer may have returned it meanwhile.
                let export = self.leases.get(&lease).copied();
                match export.filter(|export| self.exports.lease_changed(*export, lease)) {
                    Some(export) => connection.send(&Reply::Recall { export }, &[]),
                    None => Next::Keep,
                }
            }
            (Request::Hello { .. }, Some(_)) => connection.violated("it said hello twice"),
            (_, None) => connection.violated("it did not say hello first"),
        }
    }

    fn handle(&mut self, event: Event, connection: &mut Connection) -> Next {
        match event {
            Event::Checked(check, result) => self.checked(check, result, connection),
            Event::StagingRefused(refused) => self.staging_refused(refused, connection),
            Event::Answered(reply, file) => {
                connection.send(&reply, &file.iter().map(AsFd::as_fd).collect::<Vec<_>>())
            }
        }
    }

    fn has_said_hello(&self) -> bool {
        self.program.is_some()
    }

    fn has_leases(&self) -> bool {
        !self.leases.is_empty()
    }

    fn is_full(&self) -> bool {
        self.waiting.len() >= MAX_WAITING
    }
}

impl<'a> BrokerSession<'a> {
    pub(crate) fn new(
        runtime: &'static Runtime,
        exports: &'a ExportTable,
        identity: ProcessIdentity,
        connection: ConnectionId,
    ) -> Self {
        Self {
            runtime,
            exports,
            identity,
            connection,
            program: None,
            leases: HashMap::new(),
            blocks: Vec::new(),
            wrong_tokens: 0,
            waiting: HashMap::new(),
            checks: 0,
            devices: Vec::new(),
            slots: Slots::new(true),
            places: LeasePlaces::default(),
            stagings: HashMap::new(),
            opens_without_ahead: 0,
            readahead: Readahead::default(),
            claims: Vec::new(),
            exits: false,
        }
    }

    /// Returns the termination of the importer's leases when its connection has closed.
    pub(super) const fn termination(&self) -> Termination {
        if self.exits { Termination::Exited } else { Termination::Died }
    }

    /// Logs the end of the connection: a warning if the importer used memory, and did not report an orderly exit.
    pub(super) fn log_end(&self, peer: &PeerCredentials) {
        let (pid, uid, leases) = (peer.pid, peer.uid, self.leases.len());
        if leases == 0 {
            return tracing::debug!(target: crate::os::log::EXPORT, pid, uid, "an importer without leases has disconnected");
        }
        let in_use = self.leases.keys().filter(|lease| !self.places.is_idle(**lease)).count();
        let program = self.program.as_deref().unwrap_or_default();
        let mut exports: Vec<_> = self.leases.values().copied().collect();
        exports.sort_unstable();
        exports.dedup();
        let bytes: u64 = exports.iter().map(|export| self.exports.bytes(*export)).sum();
        let shown =
            exports.iter().take(SHOWN_EXPORTS).map(ToString::to_string).collect::<Vec<_>>().join(", ");
        if self.exits || in_use == 0 {
            static EXITS: Throttle = Throttle::new();
            if let Some(count) = EXITS.count() {
                tracing::info!(target: crate::os::log::EXPORT,
                    pid,
                    uid,
                    program,
                    leases,
                    bytes,
                    exports = shown,
                    count,
                    "an importer has exited; its leases end"
                );
            }
        } else {
            self.runtime.metrics.importers_lost_total.add(1);
            static WARNINGS: Throttle = Throttle::new();
            if let Some(count) = WARNINGS.count() {
                tracing::warn!(target: crate::os::log::EXPORT,
                    pid,
                    uid,
                    program,
                    leases,
                    in_use,
                    bytes,
                    exports = shown,
                    count,
                    "an importer is gone without notice (killed or crashed); its leases end"
                );
            }
        }
    }

    /// Takes the allotments of a closed connection, which its leases have until they have ended.
    pub(super) fn take_blocks(&mut self) -> Vec<Allotment> {
        std::mem::take(&mut self.blocks)
    }

    /// Takes the counter slots of a closed connection.
    pub(crate) fn take_slots(&mut self) -> Slots<LeaseId> {
        std::mem::replace(&mut self.slots, Slots::new(true))
    }

    /// Returns the leases that end with the connection. Those that a device still copies under end when it has finished.
    pub(crate) fn into_leases(mut self) -> HashMap<LeaseId, ExportId> {
        for (lease, staging) in &self.stagings {
            if !staging.end(self.termination()) {
                self.leases.remove(lease);
            }
        }
        self.leases
    }

    fn importer(&self, program: &Arc<str>, connection: &Connection) -> Importer {
        Importer {
            credentials: *connection.peer(),
            program: Arc::clone(program),
            connection: Some(self.connection),
            word: None,
            is_remote: false,
        }
    }

    fn say_hello(&mut self, protocol: u16, connection: &mut Connection) -> Next {
        let mut pages: Vec<_> = self.exports.epoch().map(Epoch::file).into_iter().collect();
        // The position distinguishes the two pages.
        let states = if pages.is_empty() { None } else { self.places.begin() };
        pages.extend(states.as_ref().map(AsFd::as_fd));
        let hello = Reply::Hello { protocol: PROTOCOL_VERSION, exporter: self.identity };
        let sent = connection.send(&hello, &pages);
        kill_point!("exporter:answered-hello");
        if protocol == PROTOCOL_VERSION { sent } else { Next::Close }
    }

    /// Begins a lease.
    fn open(
        &mut self,
        request: RequestId,
        wanted: OpenRequest,
        mut importer: Importer,
        (on, peer, like): (u32, Vec<u8>, Option<LeaseId>),
        connection: &mut Connection,
    ) -> Next {
        let export = wanted.export;
        let exceeded = |detail| Reply::Refused { request, refusal: Refusal::Failed(Failure::quota(detail)) };
        if let Some(detail) = self.too_many_leases(connection) {
            return connection.send(&exceeded(detail), &[]);
        }
        if peer.len() > MAX_PEER_BYTES {
            return connection.violated("its name on a whitelist is too long");
        }
        let Some(device) = self.position_of(on) else {
            let detail = format!("the importing process has used {MAX_DEVICES} devices already");
            return connection.send(&exceeded(detail), &[]);
        };
        let has_right = wanted.grant.is_some() || self.exports.claims(export).is_some();
        let is_permitted = has_right && self.opens_without_ahead == 0;
        let ahead = is_permitted.then(|| (wanted.access, importer.clone()));
        self.opens_without_ahead = self.opens_without_ahead.saturating_sub(1);
        importer.word = self.places.take();
        let slot = importer.word.as_ref().map(LeaseWord::slot);
        let granted = self.exports.grant(wanted, importer);
        if let Some(slot) = slot {
            self.places.note(slot, granted.as_ref().ok().map(|granted| granted.lease));
        }
        match granted {
            Ok(granted) => {
                // Before the new lease is in the map, so that a guessed number cannot name it.
                let open_there = self.has_it_open(like, &granted);
                self.leases.insert(granted.lease, export);
                kill_point!("exporter:leased");
                let needs_the_driver = !open_there && granted.needs_the_driver(device);
                if let Some(ahead) = ahead.filter(|_| !needs_the_driver)
                    && self.lease_ahead(request, export, ahead, device, connection) != Next::Keep
                {
                    return Next::Close;
                }
                if open_there {
                    self.send_last(request, &granted, Vec::new(), true, &[], connection)
                } else if needs_the_driver {
                    let answer = WaitingAnswer::Opened { request, lease: granted.lease, device };
                    self.ask_the_driver(answer, move || granted.prepare(device, &peer))
                } else {
                    self.send_opened(request, &granted, device, connection)
                }
            }
            Err(refusal) => self.refuse(request, export, refusal, connection),
        }
    }

    /// Begins leases ahead, and sends them.
    fn lease_ahead(
        &mut self,
        request: RequestId,
        opened: ExportId,
        (access, importer): (Access, Importer),
        device: usize,
        connection: &mut Connection,
    ) -> Next {
        let Self { exports, places, leases, readahead, .. } = self;
        let others = readahead.of_open(opened);
        // Drivers do not open handles of the same process.
        let others = if connection.peer().pid == self.identity.pid { 0 } else { others };
        let begun = exports.lease_ahead(opened, access, &importer, (others, device), || places.take());
        readahead.note(&begun);
        for ahead in &begun {
            places.note(ahead.slot, Some(ahead.lease));
            leases.insert(ahead.lease, ahead.export);
        }
        if begun.is_empty() {
            Next::Keep
        } else {
            connection.send(&Reply::Ahead { request, leases: begun }, &[])
        }
    }

    /// Ends a lease.
    fn release(
        &mut self,
        lease: LeaseId,
        words: Option<Returned>,
        late: Vec<(LeaseId, Returned)>,
        connection: &Connection,
    ) -> Next {
        let Some(export) = self.leases.remove(&lease) else {
            return connection.violated("it released a lease that it does not hold");
        };
        if let Some(words) = words {
            self.slots.returned(lease, words);
        }
        let staging = self.stagings.remove(&lease);
        if staging.is_none_or(|staging| staging.end(Termination::Released))
            && self.exports.release(export, lease, Termination::Released)
        {
            self.opens_without_ahead = MAX_LEASES_AHEAD;
        }
        self.give_back(lease, late);
        self.places.give_back(lease);
        kill_point!("exporter:released");
        Next::Keep
    }

    /// Confirms that the export of a lease may still be opened.
    fn confirm(&mut self, request: RequestId, lease: LeaseId, connection: &mut Connection) -> Next {
        let export = self.leases.get(&lease);
        match export.filter(|export| self.exports.may_be_opened(**export)) {
            None => connection.send(&Reply::Refused { request, refusal: Refusal::Dropped }, &[]),
            Some(export) => match self.exports.borrowed(*export) {
                Some(memory) => {
                    self.ask_the_driver(WaitingAnswer::Confirmation(request), move || stale(memory.check()))
                }
                None => connection.send(&Reply::Confirmed { request }, &[]),
            },
        }
    }

    /// Begins a grant of the export of a lease, for a third process.
    fn grant(&self, request: RequestId, lease: LeaseId, limit: Duration, peer: &PeerCredentials) -> Reply {
        let refused = |refusal| Reply::Refused { request, refusal };
        let Some(export) = self.leases.get(&lease) else { return refused(Refusal::Dropped) };
        let allotment = match GRANTS.take(peer) {
            Ok(allotment) => allotment,
            Err(detail) => return refused(Refusal::Failed(Failure::quota(detail))),
        };
        match self.exports.begin_timed_grant(*export, limit.min(LONGEST_GRANT), Some(allotment)) {
            Ok(token) => Reply::Granted { request, token },
            Err(error) => refused(error.into()),
        }
    }

    /// Sends the table of claims of the export of a lease.
    fn claims(&mut self, request: RequestId, lease: LeaseId, connection: &mut Connection) -> Next {
        let export = self.leases.get(&lease);
        let Some(table) = export.and_then(|export| self.exports.claims(*export)) else {
            return connection.send(&Reply::Refused { request, refusal: Refusal::Dropped }, &[]);
        };
        let known = self.claims.iter().find(|(known, _)| Arc::ptr_eq(known, &table));
        let importer = match known {
            Some((_, importer)) => *importer,
            None => {
                let importer = table.number_or_crowd();
                self.claims.push((Arc::clone(&table), importer));
                importer
            }
        };
        connection.send(&Reply::Claims { request, importer }, &[table.file()])
    }

    /// Releases the claims of a closed connection.
    pub(super) fn release_claims(&mut self) {
        for (table, importer) in self.claims.drain(..) {
            table.dismiss(importer);
        }
    }

    /// Returns the error for a peer that can hold no further lease, and the leases ahead that may begin with it.
    pub(super) fn too_many_leases(&mut self, connection: &Connection) -> Option<String> {
        let blocks = (self.leases.len() + MAX_LEASES_AHEAD) / LEASES_OF_A_BLOCK;
        // One more is kept: not at each turn around the boundary of a block.
        self.blocks.truncate(blocks + 1);
        while self.blocks.len() < blocks {
            match LEASES.take(connection.peer()) {
                Ok(block) => self.blocks.push(block),
                Err(why) => return Some(format!("{why}; release leases that are no longer needed")),
            }
        }
        None
    }

    /// Sends a refusal, and counts wrong tokens.
    pub(super) fn refuse(
        &mut self,
        request: RequestId,
        export: ExportId,
        refusal: Refusal,
        connection: &mut Connection,
    ) -> Next {
        let peer = connection.peer();
        static WARNINGS: Throttle = Throttle::new();
        if matches!(refusal, Refusal::Dropped) {
            // A descriptor outlives its export.
            tracing::debug!(target: crate::os::log::EXPORT, pid = peer.pid, uid = peer.uid, %export, "an open of a dropped export is refused");
        } else if let Some(count) = WARNINGS.count() {
            tracing::warn!(target: crate::os::log::EXPORT, pid = peer.pid, uid = peer.uid, %export, ?refusal, count, "an open is refused");
        }
        self.wrong_tokens += u32::from(matches!(refusal, Refusal::WrongToken));
        if self.wrong_tokens > WRONG_TOKENS {
            return connection.violated("it guesses tokens");
        }
        connection.send(&Reply::Refused { request, refusal }, &[])
    }

    /// Frees the counter slots of a lease that has ended, and of earlier leases whose slots the importer no longer uses.
    fn give_back(&mut self, lease: LeaseId, late: Vec<(LeaseId, Returned)>) {
        self.slots.give_back(lease);
        for (lease, words) in late {
            // The counter slot of a live lease is not returned by this message.
            if !self.leases.contains_key(&lease) {
                self.slots.returned(lease, words);
                self.slots.give_back(lease);
            }
        }
    }

    /// Returns the index of the importer's device among its used devices; `None` if there are too many.
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
}
