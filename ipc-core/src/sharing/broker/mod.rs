//! The exporter's side of the connections: the answers to importers' requests.
//!
//! A descriptor opens nothing. The importer connects to the exporter's socket, both processes ask the kernel for the peer's
//! user, the importer presents the export's token, and the broker answers with a *lease*: the vendor's handle, its file
//! descriptors, and the promise to keep the memory until the lease ends. A lease ends exactly once: by a message, or by the
//! importer's death, which the kernel reports by the closing of the socket or by a pidfd, whichever is first (a forked child
//! keeps the socket open, but not the process).
//!
//! This module runs on the poller's thread: it must not call a driver, run user code, or wait. The worker makes such calls and
//! sends the result back as an event.

mod answers;
mod copies;
mod session;
mod waiting;

use std::any::Any;
use std::collections::{VecDeque, hash_map};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) use session::{BrokerSession, Event};

use crate::model::error::Result;
use crate::model::lease::LeaseId;
use crate::os::{Timers, clock};
use crate::sharing::staging::Refused;
use crate::sharing::timeline::{
    Finish, FollowUp, FollowUps, OwnCounter, Poison, Side, Slots, Termination, Timeline,
};
use crate::sharing::{Runtime, Watch};
use crate::transport::{Allotment, ConnectionId, PeerCredentials, Poller, Service};
use crate::wire::Reply;
use crate::wire::descriptor::ExportId;

/// Interval between two checks whether copies make progress while others wait for them.
const STAGINGS: Duration = Duration::from_secs(1);

/// Maximum number of leases of closed connections that end in one turn of the poller.
const ENDED_IN_A_TURN: usize = 256;

/// The leases of a closed connection that have not ended yet.
struct Ending {
    leases: hash_map::IntoIter<LeaseId, ExportId>,
    /// Counts the leases until all have ended.
    _blocks: Vec<Allotment>,
    slots: Slots<LeaseId>,
    how: Termination,
}

/// The broker of a process.
pub(crate) struct Broker {
    runtime: &'static Runtime,
    follow_ups: FollowUps,
    /// Whether the page that importers read is bound to the life of the poller's thread.
    tied: bool,
    /// Time of the next check of copies while others wait for them.
    next_look_at_stagings: Option<Instant>,
    /// Dropped exports that wait until importers close reclaimed memory, by the time at which they stop waiting.
    retiring: Timers<ExportId>,
    /// Time of the next look at grants with a time limit.
    next_look_at_grants: Option<Instant>,
    /// The closed connections whose leases end in further turns, and the times since when they wait for one.
    ending: VecDeque<(Instant, Ending)>,
}

/// A command of another thread.
pub(crate) enum Command {
    FollowUp(FollowUp),
    /// A copy waits for others: check from now on whether their importers make progress.
    WatchStagings,
    /// An export is retired at this time, whether the importers have closed the memory of reclaimed leases or not.
    RetireAt(Instant, ExportId),
    /// A grant ends at this time, unless it ends before.
    ExpireGrantsAt(Instant),
}

impl Broker {
    /// Creates the broker of this process.
    pub(crate) fn of_process() -> Result<Self> {
        let runtime = Runtime::get()?;
        let follow_ups = FollowUps::new(runtime.worker.clone());
        Ok(Self {
            runtime,
            follow_ups,
            tied: false,
            next_look_at_stagings: None,
            retiring: Timers::default(),
            next_look_at_grants: None,
            ending: VecDeque::new(),
        })
    }

    /// Binds the page that importers read to the life of this thread, before the first importer receives the page.
    fn tie_page(&mut self) {
        if !std::mem::replace(&mut self.tied, true)
            && let Some(page) = self.runtime.exports.epoch()
        {
            page.tie_to_this_thread();
        }
    }

    /// Ends leases of a closed connection: some now, and the rest in further turns, so that other importers are served meanwhile.
    fn end(&mut self, mut ending: Ending) {
        for (lease, export) in ending.leases.by_ref().take(ENDED_IN_A_TURN) {
            self.runtime.exports.release(export, lease, ending.how);
        }
        if ending.leases.len() > 0 {
            return self.ending.push_back((clock::now(), ending));
        }
        let slots = ending.slots;
        for page in slots.awaited_pages() {
            page.poison(Side::Exporter);
            self.follow_ups.begin(FollowUp::Poison(Poison::Page(page, Side::Exporter)));
        }
        // They may hold the last reference to the caller's backend, whose drop calls a driver.
        self.runtime.worker.submit(move || drop(slots));
    }
}

impl Service for Broker {
    type Session = BrokerSession<'static>;
    type Command = Command;

    fn permits(&self, peer: &PeerCredentials) -> bool {
        self.runtime.exports.permits(peer)
    }

    fn connected(&mut self, connection: ConnectionId) -> Self::Session {
        self.tie_page();
        BrokerSession::new(self.runtime, &self.runtime.exports, self.runtime.identity, connection)
    }

    fn closed(&mut self, mut session: Self::Session, peer: &PeerCredentials) {
        session.log_end(peer);
        // Before the ends of its leases, which call the exports' callbacks.
        session.release_claims();
        let (slots, how) = (session.take_slots(), session.termination());
        let blocks = session.take_blocks();
        let ending = Ending { leases: session.into_leases().into_iter(), _blocks: blocks, slots, how };
        self.end(ending);
    }

    fn run(&mut self, command: Command) {
        match command {
            Command::FollowUp(follow_up) => self.follow_ups.begin(follow_up),
            Command::WatchStagings => {
                self.next_look_at_stagings.get_or_insert_with(|| clock::now() + STAGINGS);
            }
            Command::RetireAt(at, export) => drop(self.retiring.insert(at, export)),
            Command::ExpireGrantsAt(at) => {
                self.next_look_at_grants = Some(self.next_look_at_grants.map_or(at, |next| next.min(at)));
            }
        }
    }

    fn next_timer(&self) -> Option<Instant> {
        let ending = self.ending.front().map(|(since, _)| *since);
        let looks = self.next_look_at_stagings.into_iter().chain(self.next_look_at_grants);
        self.follow_ups.next().into_iter().chain(looks).chain(self.retiring.next()).chain(ending).min()
    }

    fn run_timers<'a>(&mut self, now: Instant, sessions: impl Iterator<Item = &'a Self::Session>) {
        self.follow_ups.run(now);
        if let Some((_, ending)) = self.ending.pop_front() {
            self.end(ending);
        }
        while let Some(export) = self.retiring.take_due(now) {
            self.runtime.exports.retire_overdue(export);
        }
        if self.next_look_at_grants.is_some_and(|at| at <= now) {
            self.next_look_at_grants = self.runtime.exports.expire_grants(now);
        }
        if self.next_look_at_stagings.is_some_and(|at| at <= now) {
            let waited_for = self.runtime.stagings.somebody_waits();
            if waited_for {
                sessions.for_each(BrokerSession::end_silent_stagings);
            }
            self.next_look_at_stagings = waited_for.then(|| now + STAGINGS);
        }
    }
}

impl Poller<Broker> {
    /// Sends a reply to an importer, with a descriptor if there is one.
    pub(crate) fn answer(&self, connection: ConnectionId, reply: Reply, file: Option<OwnedFd>) {
        self.send_event(connection, Event::Answered(reply, file));
    }

    /// Refuses a copy that could not begin.
    pub(crate) fn refuse_staging(&self, connection: ConnectionId, refused: Refused) {
        self.send_event(connection, Event::StagingRefused(refused));
    }

    /// Checks from now on whether the importers of copies make progress, because a copy waits for others.
    pub(crate) fn watch_stagings(&self) {
        self.send_command(Command::WatchStagings);
    }

    /// Retires an export at this time, whether the importers have closed the memory of reclaimed leases or not.
    pub(crate) fn retire_at(&self, at: Instant, export: ExportId) {
        self.send_command(Command::RetireAt(at, export));
    }

    /// Ends grants whose time limit has passed, at this time.
    pub(crate) fn expire_grants_at(&self, at: Instant) {
        self.send_command(Command::ExpireGrantsAt(at));
    }

    /// Poisons words again, for a while.
    pub(crate) fn poison_again(&self, words: Poison) {
        self.follow_up(FollowUp::Poison(words));
    }

    /// Ends both sides of a timeline within this process, once the signals of the near side have arrived.
    pub(crate) fn end_once_arrived(&self, near: Timeline, far: Option<Timeline>) {
        self.follow_up(FollowUp::EndOnceArrived(near, far));
    }

    /// Ends this side's counter for good, once its signals have arrived.
    pub(crate) fn finish_once_arrived(&self, finish: Finish) {
        self.follow_up(FollowUp::FinishOnceArrived(finish));
    }

    /// Keeps a value until the signals that were submitted in this order have arrived.
    pub(crate) fn keep_until_arrived(&self, order: Arc<OwnCounter>, kept: Arc<dyn Any + Send + Sync>) {
        self.follow_up(FollowUp::KeepUntilArrived(order, kept));
    }

    /// Polls a condition, and makes its descriptor readable once it is true.
    pub(crate) fn watch_condition(&self, watch: Watch) {
        self.follow_up(FollowUp::Watch(watch));
    }

    fn follow_up(&self, follow_up: FollowUp) {
        self.send_command(Command::FollowUp(follow_up));
    }
}
