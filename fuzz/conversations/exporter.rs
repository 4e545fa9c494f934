//! The exporter's side: a real [`BrokerSession`] with a real [`ExportTable`], compared with a model of `docs/spec/protocol.md`.

mod expected;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;

use super::script::{Script, Step, connection};
use crate::backend::{Access, DeviceIpc};
use crate::model::address::{DeviceRange, Extent};
use crate::model::lease::{Holder, LeaseId, LeaseState};
use crate::sharing::Runtime;
use crate::sharing::broker::BrokerSession;
use crate::sharing::export::{ExportTable, NewExport, Shared};
use crate::sharing::timeline::Termination;
use crate::transport::socket::{self, PeerCredentials, PeerSocket};
use crate::transport::{AllowList, Connection, ConnectionId, Metrics, Next, Served, Session};
use crate::wire::Token;
use crate::wire::descriptor::ExportId;
use crate::wire::examples::SOMEBODY;
use crate::wire::protocol::{MAX_SPANS, PROTOCOL_VERSION, Reply, Request, Span, decode};
use crate::wire::{Failure, Refusal};
use expected::Expected;

/// The kinds of steps, except [`SEND`].
pub(super) const SEND: u8 = 0;
pub(super) const SEND_WITH_DESCRIPTORS: u8 = 1;
pub(super) const READ_ANSWERS: u8 = 2;
/// Drops the export whose number is the packet's first byte.
pub(super) const DROP_EXPORT: u8 = 3;

/// The exports: read-write; read-only; of a user who also permits the stranger.
const EXPORTS: [(Access, bool); 3] =
    [(Access::ReadWrite, false), (Access::ReadOnly, false), (Access::ReadWrite, true)];

const CONNECTION: ConnectionId = ConnectionId(7);

/// Maximum number of packets of a script: enough for a peer that does not read, few enough to be quick.
const MOST_PACKETS: usize = 1300;

/// Maximum number of queued messages for a peer that does not read, and of wrong tokens.
const KEPT_MESSAGES: usize = 1024;
const GUESSES: usize = 16;

/// Maximum number of devices of a peer, and of bytes of its name on a whitelist.
const MOST_DEVICES: usize = 64;
const MOST_COPIES: usize = 64;
const LONGEST_PEER: usize = 64;

/// The token of an export that scripts know.
pub(super) fn token(export: u64) -> Token {
    Token::from_bytes([export as u8; 16])
}

/// An exporting process that serves one connection after another.
#[derive(Debug)]
pub struct Exporter {
    range: DeviceRange,
    shared: Shared,
    /// The sockets of exporter and importer. Kept from script to script, as they are large.
    buffers: Mutex<[Vec<u8>; 2]>,
}

/// The state of the connection by the specification.
#[derive(Default)]
struct Model {
    stranger: bool,
    /// Without a lease there is no timeline.
    has_allocations: bool,
    region_bytes: u64,
    devices: BTreeSet<u32>,
    said_hello: bool,
    leases: BTreeMap<u64, u64>,
    /// The leases of copies, which come without handles.
    staged: BTreeSet<u64>,
    opened: [u64; 3],
    granted: u64,
    guesses: usize,
    dropped: [bool; 3],
    answers: VecDeque<Expected>,
    buffer: Vec<u8>,
}

impl Exporter {
    /// Exports these allocations of a backend; none of them is opened.
    ///
    /// # Panics
    ///
    /// If the backend does not export them.
    pub fn new(backend: &Arc<dyn DeviceIpc>, extents: &[Extent]) -> Self {
        // Its counters must exist from the first lease on.
        Runtime::get().expect("this process has an identity");
        let table = ExportTable::default();
        let export = |extent| table.allocation(backend, extent).expect("the backend exports it");
        let allocations = extents.iter().map(export).collect();
        let shared =
            Shared { ready: None, allocations, regions: [].into(), remote: None, owner: None, keeps: false };
        Self { range: extents[0].allocation, shared, buffers: Mutex::default() }
    }

    /// Runs the importer that a script describes: its first byte states whether it is a user whom only one export permits.
    ///
    /// # Panics
    ///
    /// If the connection differs from the specification.
    pub fn serve(&self, input: &[u8]) {
        let [peer, script @ ..] = input else { return };
        let mut buffers = self.buffers.lock().expect("a script that fails is the last");
        let [buffer, models] = &mut *buffers;
        let mut model = Model {
            stranger: peer & 1 != 0,
            has_allocations: !self.shared.allocations.is_empty(),
            region_bytes: self.range.len,
            buffer: std::mem::take(models),
            ..Model::default()
        };
        let own = rustix::process::geteuid().as_raw();
        let stranger = own.wrapping_add(1);
        let credentials = PeerCredentials {
            pid: 1,
            uid: if model.stranger { stranger } else { own },
            gid: rustix::process::getegid().as_raw(),
        };
        let table = self.exports(stranger);
        let (near, far) = connection();
        // As on a kernel that cannot refuse descriptors.
        let runtime = Runtime::get().expect("this process has an identity");
        let connection = Connection::new(PeerSocket::new(near, true), credentials);
        let session = BrokerSession::new(runtime, &table, SOMEBODY, CONNECTION);
        let mut served = Served { connection, session };
        let metrics = Metrics::default();
        let mut packets = 0;
        let mut next = Next::Keep;
        for Step { action, times, packet } in Script(script) {
            packets += times;
            if packets > MOST_PACKETS {
                break;
            }
            for _ in 0..times {
                next = match action {
                    READ_ANSWERS => {
                        model.read_answers(&far, &mut served);
                        Next::Keep
                    }
                    DROP_EXPORT => model.drop_export(packet, &table, &mut served),
                    _ => {
                        let fds = [far.as_fd(); 3];
                        let fds = if action == SEND_WITH_DESCRIPTORS { &fds[..] } else { &[] };
                        socket::send(far.as_fd(), packet, fds).expect("what was sent before has been read");
                        let next = served.read(buffer, &metrics);
                        model.check(packet, !fds.is_empty(), next);
                        next
                    }
                };
                if next == Next::Close {
                    break;
                }
                assert_eq!(next, Next::Keep, "nobody sends so much that it has to pause");
                assert_eq!(served.session.has_said_hello(), model.said_hello);
                assert_eq!(served.session.has_leases(), !model.leases.is_empty());
            }
            if next == Next::Close {
                break;
            }
        }
        if next == Next::Keep {
            model.read_answers(&far, &mut served);
            assert!(model.answers.is_empty(), "not answered: {:?}", model.answers);
        } else {
            model.read_sent(&far);
        }
        *models = std::mem::take(&mut model.buffer);
        model.close(served, &table);
    }

    fn exports(&self, stranger: u32) -> ExportTable {
        let table = ExportTable::default();
        for ((access, allows), number) in EXPORTS.into_iter().zip(1..) {
            let allow = AllowList::own_user();
            let id = table.insert(NewExport {
                borrowed: None,
                backend: "fuzzing",
                bytes: self.range.len,
                access,
                allow: if allows { allow.user(stranger) } else { allow },
                ahead: false,
                claims: None,
                token: token(number),
                shared: Shared {
                    ready: None,
                    allocations: self.shared.allocations.clone(),
                    regions: [self.range].into(),
                    remote: None,
                    owner: None,
                    keeps: false,
                },
            });
            assert_eq!(id, ExportId(number));
        }
        table
    }
}

impl Model {
    /// Checks that the connection was rightly continued or closed after this packet.
    fn check(&mut self, packet: &[u8], brought_fds: bool, next: Next) {
        let expected = match decode::<Request>(packet) {
            _ if brought_fds => Next::Close,
            Ok(request) => self.answer(request),
            Err(_) => Next::Close,
        };
        // The number of messages that the kernel queues is unknown.
        let does_not_read = next == Next::Close && self.answers.len() > KEPT_MESSAGES;
        assert!(next == expected || does_not_read, "{next:?}, not {expected:?}, after {packet:02x?}");
    }

    fn answer(&mut self, request: Request) -> Next {
        match request {
            Request::Hello { protocol, .. } if !self.said_hello => {
                self.said_hello = true;
                self.answers.push_back(Expected::Hello);
                if protocol == PROTOCOL_VERSION { Next::Keep } else { Next::Close }
            }
            _ if !self.said_hello => Next::Close,
            Request::Hello { .. } => Next::Close,
            Request::Open { request, export, token, access, on, peer, like, .. } => {
                if peer.len() > LONGEST_PEER {
                    return Next::Close;
                }
                if !self.devices.contains(&on) && self.devices.len() == MOST_DEVICES {
                    let detail = format!("the importing process has used {MOST_DEVICES} devices already");
                    let refusal = Refusal::Failed(Failure::quota(detail));
                    self.answers.push_back(Expected::Refused { request: request.0, refusal });
                    return Next::Keep;
                }
                self.devices.insert(on);
                match self.refusal(export.0, token, access) {
                    Some(refusal) => return self.refuse(request.0, refusal),
                    None => {
                        self.granted += 1;
                        self.opened[export.0 as usize - 1] += 1;
                        // All exports have the same memory.
                        let held = |lease: LeaseId| {
                            self.leases.contains_key(&lease.0) && !self.staged.contains(&lease.0)
                        };
                        let like = like.is_some_and(held);
                        self.leases.insert(self.granted, export.0);
                        let (request, lease) = (request.0, self.granted);
                        self.answers.push_back(Expected::Opened { request, lease, like });
                    }
                }
                Next::Keep
            }
            Request::Release { lease, .. } => {
                if self.leases.remove(&lease.0).is_some() {
                    Next::Keep
                } else {
                    Next::Close
                }
            }
            Request::LeaseChanged { .. } => Next::Keep,
            Request::Confirm { request, lease } => {
                let request = request.0;
                self.answers.push_back(match self.has_export_of(lease) {
                    true => Expected::Confirmed { request },
                    false => Expected::Refused { request, refusal: Refusal::Dropped },
                });
                Next::Keep
            }
            Request::Timeline { request, lease, .. } => {
                if !self.leases.contains_key(&lease.0) {
                    return Next::Close;
                }
                // No export has a ready event, so the driver is not called.
                self.answers.push_back(if self.has_allocations {
                    Expected::Timeline { request: request.0 }
                } else {
                    Expected::Refused { request: request.0, refusal: Refusal::Dropped }
                });
                Next::Keep
            }
            Request::Stage { request, export, token, spans, .. } => {
                if spans.len() > MAX_SPANS {
                    return Next::Close;
                }
                if self.staged.iter().filter(|lease| self.leases.contains_key(lease)).count() >= MOST_COPIES {
                    self.answers
                        .push_back(Expected::RefusedFor { request: request.0, part: "copies under way" });
                    return Next::Keep;
                }
                let refusal = match self.refusal(export.0, token, Access::ReadOnly) {
                    Some(refusal) => Some(refusal),
                    None => {
                        self.granted += 1;
                        self.opened[export.0 as usize - 1] += 1;
                        (!self.has_allocations).then_some(Refusal::Dropped)
                    }
                };
                if refusal.is_none() && !self.has(&spans) {
                    self.answers.push_back(Expected::RefusedFor { request: request.0, part: "span" });
                    return Next::Keep;
                }
                match refusal {
                    Some(refusal) => return self.refuse(request.0, refusal),
                    // The worker replies, which serves the exports of the process and not these.
                    None => {
                        self.leases.insert(self.granted, export.0);
                        self.staged.insert(self.granted);
                    }
                }
                Next::Keep
            }
            // The exporter watches no lease.
            Request::StageNext { .. } => Next::Close,
            // None of these exports has been sent by a channel.
            Request::Grant { request, lease, .. } => {
                let request = request.0;
                self.answers.push_back(match self.has_export_of(lease) {
                    true => Expected::Granted { request },
                    false => Expected::Refused { request, refusal: Refusal::Dropped },
                });
                Next::Keep
            }
            // None of these exports has a table of claims.
            Request::Claims { request, .. } => {
                self.answers.push_back(Expected::Refused { request: request.0, refusal: Refusal::Dropped });
                Next::Keep
            }
            Request::EndGrants { .. } | Request::Exit => Next::Keep,
            Request::List { request, .. } => {
                self.answers.push_back(Expected::Listing { request: request.0 });
                Next::Keep
            }
        }
    }

    /// Returns whether the importer has this lease, of an export that has not been dropped.
    fn has_export_of(&self, lease: LeaseId) -> bool {
        self.leases.get(&lease.0).is_some_and(|export| !self.dropped[*export as usize - 1])
    }

    /// Expects a refusal, or the end of the connection after too many wrong tokens.
    fn refuse(&mut self, request: u64, refusal: Refusal) -> Next {
        self.guesses += usize::from(matches!(refusal, Refusal::WrongToken));
        if self.guesses > GUESSES {
            return Next::Close;
        }
        self.answers.push_back(Expected::Refused { request, refusal });
        Next::Keep
    }

    /// Checks that these are the bytes of the only region, in order and each once.
    fn has(&self, spans: &[Span]) -> bool {
        let mut free = 0..u128::from(self.region_bytes);
        spans.iter().all(|span| {
            let begin = u128::from(span.offset);
            let bytes = begin..begin + u128::from(span.len);
            let fits =
                span.region == 0 && !bytes.is_empty() && free.start <= bytes.start && bytes.end <= free.end;
            free.start = bytes.end;
            fits
        })
    }

    fn refusal(&self, export: u64, shown: Token, access: Access) -> Option<Refusal> {
        let at = usize::try_from(export).ok()?.checked_sub(1).filter(|at| *at < EXPORTS.len());
        let Some(at) = at else { return Some(Refusal::Dropped) };
        let (granted, allows) = EXPORTS[at];
        if self.stranger && !allows {
            return Some(Refusal::Dropped);
        }
        if shown != token(export) {
            return Some(Refusal::WrongToken);
        }
        if self.dropped[at] {
            return Some(Refusal::Dropped);
        }
        (access.is_writable() && !granted.is_writable()).then_some(Refusal::Access { granted })
    }

    fn drop_export(
        &mut self,
        packet: &[u8],
        table: &ExportTable,
        served: &mut Served<BrokerSession<'_>>,
    ) -> Next {
        let number = packet.first().map_or(0, |number| u64::from(*number) % 3 + 1);
        let Some(dropped) = self.dropped.get_mut(number.wrapping_sub(1) as usize) else { return Next::Keep };
        if std::mem::replace(dropped, true) {
            return Next::Keep;
        }
        let export = ExportId(number);
        table.drop_export(export);
        // The poller notifies the connections that hold it.
        if !self.leases.values().any(|held| *held == number) {
            return Next::Keep;
        }
        let next = served.connection.send(&Reply::Dropped { export }, &[]);
        assert!(next == Next::Keep || self.answers.len() > KEPT_MESSAGES, "{next:?} after a notice");
        if next == Next::Keep {
            self.answers.push_back(Expected::Dropped { export: number });
        }
        next
    }

    /// Receives all replies, including those that had to wait.
    fn read_answers(&mut self, far: &OwnedFd, served: &mut Served<BrokerSession<'_>>) {
        loop {
            let read = self.read_sent(far);
            assert_eq!(served.connection.flush(), Next::Keep);
            if read == 0 {
                break;
            }
        }
        assert!(self.answers.is_empty(), "not answered: {:?}", self.answers);
    }

    /// Receives the packets that were sent, and returns their number.
    fn read_sent(&mut self, far: &OwnedFd) -> usize {
        for read in 0.. {
            match socket::receive(far.as_fd(), &mut self.buffer) {
                Ok(Some(packet)) => {
                    let reply = decode(&packet.bytes).expect("the exporter speaks the protocol");
                    let expected = self.answers.pop_front();
                    Expected::check(expected.as_ref(), &reply, packet.fds.len(), self.stranger);
                }
                Err(Errno::AGAIN) => return read,
                other => panic!("the connection is still there, but {other:?}"),
            }
        }
        unreachable!("a socket holds fewer messages than there are numbers")
    }

    /// Checks that the connection holds the leases of the model, and that its end releases everything.
    fn close(self, served: Served<BrokerSession<'_>>, table: &ExportTable) {
        let leases = served.session.into_leases();
        let held: BTreeMap<u64, u64> = leases.iter().map(|(lease, export)| (lease.0, export.0)).collect();
        // Grants that no open has used count as a holder, and last until their time limit.
        let is_lease = |holder: &&Holder| holder.state != LeaseState::InMessage;
        let leases_of = |number| table.holders(ExportId(number)).iter().filter(is_lease).count();
        // A lease whose reply could not be sent has begun all the same, and ends here.
        assert_eq!(held, self.leases);
        for (number, opened) in (1..).zip(self.opened) {
            assert_eq!(leases_of(number), held.values().filter(|export| **export == number).count());
            assert_eq!(table.holders(ExportId(number)).opened(), opened);
        }
        for (lease, export) in leases {
            table.release(export, lease, Termination::Released);
        }
        for number in 1..=3 {
            assert_eq!(leases_of(number), 0);
        }
    }
}

#[cfg(test)]
mod tests;
