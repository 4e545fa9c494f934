//! The poller's thread. Nothing here calls a driver, runs the user's code or blocks on a send.

mod admission;

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use admission::Refusals;
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::io::Errno;

use super::ConnectionId;
use super::link::Link;
use super::poller::{Command, Finish, LINK_BIT, Notice, Poison, SOCKET_BIT, Shared, WAKE, WatchedSocket};
use super::served::{Next, Served};
use super::socket::timespec;
use super::socket_file::SocketFile;
use crate::os::{ClosedByFork, Pace, PollMode};
use crate::sharing::Runtime;
use crate::sharing::timeline::{End, OwnCounter, Side, Timeline, return_own_slot};
use crate::wire::descriptor::ExportId;
use crate::wire::protocol::Reply;

/// When the words of a peer that has gone are ended again, in case a signal that it had submitted has come after; how
/// often, with pauses that double: for two minutes. The driver takes down a killed process's queues within seconds.
const POISON_AGAIN: Duration = Duration::from_millis(2);
const POISON_TIMES: u32 = 16;

/// The same for words of which no timeline is left, though a stream may still wait for them: for half a second.
const POISON_UNUSED_TIMES: u32 = 8;

/// Maximum number of timelines and pages whose words are ended repeatedly.
const MAX_POISONED: usize = 1024;

/// How often it is looked whether signals within this process have arrived.
const ARRIVAL: Duration = Duration::from_millis(1);

/// How often it is looked whether copies that others wait behind go on.
const STAGINGS: Duration = Duration::from_secs(1);

/// How long the loop looks for the next request before it sleeps, while importers ask one thing after the other: a driver's
/// open in between is no reason to be woken.
const SPIN: Duration = Duration::from_micros(100);

/// What the loop waits on, beside links.
enum Source {
    Listener(Listener),
    Served(Box<Served>),
    /// The process behind a connection.
    ServedProcess(u64, #[allow(dead_code, reason = "keeps the descriptor open")] OwnedFd),
    /// The process behind a link.
    LinkProcess(Arc<Link>, #[allow(dead_code, reason = "keeps the descriptor open")] OwnedFd),
    /// The process at the other end of a socket that is only watched.
    SocketProcess(u64, #[allow(dead_code, reason = "keeps the descriptor open")] OwnedFd),
}

struct Listener {
    _closed_by_fork: ClosedByFork,
    socket: OwnedFd,
    /// Does the kernel refuse descriptors that others send to it?
    refuses_fds: bool,
    file: Option<SocketFile>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            file.remove();
        }
    }
}

/// What is done at a certain time, unless its source has gone.
#[derive(Clone, Copy, Debug)]
enum Timer {
    /// Closes a connection that has not said hello.
    Hello,
    /// Reads again from a connection that had sent too much.
    Resume,
    /// Lets importers in again.
    Listen,
    /// Ends the words of a peer that has gone once more, for the so many-th time.
    Poison(u32),
    /// Looks whether the signals of a timeline have arrived.
    Arrival,
    /// The same, to end this side's counter then.
    Finish,
    /// Looks whether importers take the chunks of copies that others wait behind.
    Stagings,
}

/// The state of the poller's thread.
pub(super) struct EventLoop {
    shared: Arc<Shared>,
    sources: HashMap<u64, Source>,
    /// Links by their watch id, with the id of the source that is their process.
    links: HashMap<u64, (Arc<Link>, Option<u64>)>,
    /// The process of a connection, by the connection.
    processes: HashMap<u64, u64>,
    timers: BTreeMap<(Instant, u64), Timer>,
    connections: usize,
    refusals: Refusals,
    /// Has the page that importers read been tied to this thread's life?
    tied: bool,
    /// Words that have been ended: what the peer had submitted to its device may still arrive.
    ended: BTreeMap<u64, Poison>,
    /// Timelines within this process that end when what was submitted has arrived.
    arriving: HashMap<u64, (Timeline, Option<Timeline>)>,
    /// Timelines whose own counter ends when it has come so far.
    finishing: HashMap<u64, Finish>,
    /// Is there a [`Timer::Stagings`]?
    watches_stagings: bool,
    /// Sockets that are only watched, with the id of the source that is the process at their other end.
    sockets: HashMap<u64, (Weak<dyn WatchedSocket>, Option<u64>)>,
    /// What is kept until the signals of a timeline have arrived.
    kept: HashMap<u64, (Arc<OwnCounter>, Arc<dyn Any + Send + Sync>)>,
    next: u64,
    buffer: Vec<u8>,
    /// How requests have been coming.
    pace: Pace,
    /// Has a request been read since the loop last waited?
    was_asked: bool,
}

impl EventLoop {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            sources: HashMap::new(),
            links: HashMap::new(),
            processes: HashMap::new(),
            timers: BTreeMap::new(),
            connections: 0,
            refusals: Refusals::default(),
            tied: false,
            ended: BTreeMap::new(),
            arriving: HashMap::new(),
            finishing: HashMap::new(),
            watches_stagings: false,
            sockets: HashMap::new(),
            kept: HashMap::new(),
            next: WAKE + 1,
            buffer: Vec::new(),
            pace: Pace::within(SPIN),
            was_asked: false,
        }
    }

    pub(super) fn run(mut self) {
        let mut events = Vec::with_capacity(64);
        loop {
            if let Err(error) = self.wait(&mut events) {
                tracing::error!(%error, "the device-ipc poller stops");
                return;
            }
            for event in &events {
                self.handle(event);
            }
            self.run_timers();
        }
    }

    /// Waits until there is something to do, or it is time for a timer. Where importers ask one thing after the other it looks
    /// again and again before it sleeps.
    fn wait(&mut self, events: &mut Vec<Event>) -> rustix::io::Result<()> {
        events.clear();
        let next_timer = self.timers.first_key_value().map(|((at, _), _)| *at);
        let left = || next_timer.map(|at| at.saturating_duration_since(Instant::now()));
        let epoll = &self.shared.epoll;
        if !std::mem::take(&mut self.was_asked) {
            return poll(epoll, events, left());
        }
        self.pace.wait(next_timer, |look| match look {
            PollMode::Now => {
                poll(epoll, events, Some(Duration::ZERO)).map(|()| (!events.is_empty()).then_some(()))
            }
            PollMode::Sleep => poll(epoll, events, left()).map(Some),
        })
    }

    fn handle(&mut self, event: &Event) {
        let id = event.data.u64();
        let flags = event.flags;
        if id == WAKE {
            self.run_commands();
        } else if id & LINK_BIT != 0 {
            if let Some((link, _)) = self.links.get(&id) {
                let link = Arc::clone(link);
                // A caller that reads just now lets us look again when it is done.
                if link.on_readable() && !link.is_gone() {
                    self.shared.arm(&link, true);
                }
            }
        } else if id & SOCKET_BIT != 0 {
            self.hung_up(id);
        } else {
            match self.sources.get(&id) {
                Some(Source::Listener(_)) => self.accept(id),
                Some(Source::Served(_)) => self.serve(id, flags),
                Some(Source::ServedProcess(connection, _)) => self.close(*connection),
                Some(Source::LinkProcess(link, _)) => {
                    link.mark_gone();
                    self.sources.remove(&id);
                }
                Some(Source::SocketProcess(socket, _)) => self.hung_up(*socket),
                None => {}
            }
        }
    }

    fn run_commands(&mut self) {
        for command in self.shared.take_commands() {
            match command {
                Command::Listen { listener, refuses_fds, file } => {
                    let id = self.take_id();
                    if self.add(listener.as_fd(), id, EventFlags::IN) {
                        let listener = Listener {
                            _closed_by_fork: ClosedByFork::new(listener.as_fd()),
                            socket: listener,
                            refuses_fds,
                            file,
                        };
                        self.sources.insert(id, Source::Listener(listener));
                    }
                }
                Command::Watch(link, process) => self.watch(link, process),
                Command::Unwatch(id) => {
                    if let Some((_, Some(process))) = self.links.remove(&id) {
                        self.sources.remove(&process);
                    }
                }
                Command::Checked(ConnectionId(id), check, result) => {
                    let Ok(runtime) = Runtime::get() else { continue };
                    if let Some(Source::Served(served)) = self.sources.get_mut(&id) {
                        let next = served.checked(check, result, &runtime.exports);
                        self.after(id, next);
                    }
                }
                Command::Answer(ConnectionId(id), reply, file) => {
                    if let Some(Source::Served(served)) = self.sources.get_mut(&id) {
                        let next = served.send(&reply, &file.iter().map(AsFd::as_fd).collect::<Vec<_>>());
                        self.after(id, next);
                    }
                }
                Command::StagingRefused(ConnectionId(id), refused) => {
                    let Ok(runtime) = Runtime::get() else { continue };
                    if let Some(Source::Served(served)) = self.sources.get_mut(&id) {
                        let next = served.staging_refused(refused, &runtime.exports);
                        self.after(id, next);
                    }
                }
                Command::WatchStagings => {
                    if !std::mem::replace(&mut self.watches_stagings, true) {
                        let id = self.take_id();
                        self.timers.insert((Instant::now() + STAGINGS, id), Timer::Stagings);
                    }
                }
                Command::Notify(notice, export, connections) => self.notify(notice, export, connections),
                Command::EndOnceArrived(near, far) => {
                    let id = self.take_id();
                    self.arriving.insert(id, (near, far));
                    self.look_for_arrival(Instant::now(), id);
                }
                Command::FinishOnceArrived(finish) => {
                    let id = self.take_id();
                    self.finishing.insert(id, finish);
                    self.look_for_finish(Instant::now(), id);
                }
                Command::WatchSocket(id, socket, process) => self.watch_socket(id, socket, process),
                Command::UnwatchSocket(id) => {
                    if let Some((_, Some(process))) = self.sockets.remove(&id) {
                        self.sources.remove(&process);
                    }
                }
                Command::KeepUntilArrived(order, kept) => {
                    let id = self.take_id();
                    self.kept.insert(id, (order, kept));
                    self.look_for_arrival(Instant::now(), id);
                }
                Command::Poison(words) => self.begin_poison(words),
            }
        }
    }

    fn notify(&mut self, notice: Notice, export: ExportId, connections: Vec<ConnectionId>) {
        let message = match notice {
            Notice::Dropped => Reply::Dropped { export },
            Notice::Recall => Reply::Recall { export },
        };
        for ConnectionId(id) in connections {
            if let Some(Source::Served(served)) = self.sources.get_mut(&id) {
                let next = served.send(&message, &[]);
                self.after(id, next);
            }
        }
    }

    fn watch(&mut self, link: Arc<Link>, process: Option<OwnedFd>) {
        let data = EventData::new_u64(link.watch_id());
        let added = epoll::add(&self.shared.epoll, link.socket(), data, EventFlags::IN | EventFlags::ONESHOT);
        if let Err(error) = added {
            tracing::error!(%error, "an exporter's socket cannot be watched");
            link.mark_gone();
            return;
        }
        let process = process.and_then(|process| {
            let id = self.take_id();
            let added = self.add(process.as_fd(), id, EventFlags::IN | EventFlags::ONESHOT);
            added
                .then(|| self.sources.insert(id, Source::LinkProcess(Arc::clone(&link), process)))
                .map(|_| id)
        });
        self.links.insert(link.watch_id(), (link, process));
    }

    fn watch_socket(&mut self, id: u64, socket: Arc<dyn WatchedSocket>, process: Option<OwnedFd>) {
        // Nothing but its end: its owner reads.
        let data = EventData::new_u64(id);
        if let Err(error) = epoll::add(&self.shared.epoll, socket.socket(), data, EventFlags::ONESHOT) {
            tracing::error!(%error, "the socket of a channel cannot be watched");
            socket.hung_up();
            return;
        }
        let process = process.and_then(|process| {
            let source = self.take_id();
            let added = self.add(process.as_fd(), source, EventFlags::IN | EventFlags::ONESHOT);
            added.then(|| self.sources.insert(source, Source::SocketProcess(id, process))).map(|_| source)
        });
        self.sockets.insert(id, (Arc::downgrade(&socket), process));
        if Arc::strong_count(&socket) == 1 {
            drop_elsewhere(socket);
        }
    }

    fn hung_up(&mut self, id: u64) {
        if let Some(socket) = self.sockets.get(&id).and_then(|(socket, _)| socket.upgrade()) {
            socket.hung_up();
            drop_elsewhere(socket);
        }
    }

    /// Before the first importer is told of the page.
    fn tie_page(&mut self) {
        if std::mem::replace(&mut self.tied, true) {
            return;
        }
        if let Some(page) = Runtime::existing().and_then(|runtime| runtime.exports.epoch()) {
            page.tie_to_this_thread();
        }
    }

    fn serve(&mut self, id: u64, flags: EventFlags) {
        let Ok(runtime) = Runtime::get() else { return };
        let Some(Source::Served(served)) = self.sources.get_mut(&id) else { return };
        let mut next = Next::Keep;
        if flags.intersects(EventFlags::OUT) {
            next = served.flush();
        }
        // The end of a connection from which nothing is read just now is reported again and again.
        if flags.intersects(EventFlags::HUP | EventFlags::ERR) && !served.is_read() {
            next = Next::Close;
        }
        if next == Next::Keep && flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
            next = served.read(&mut self.buffer, &runtime.exports, &runtime.identity);
            self.was_asked = true;
        }
        self.after(id, next);
    }

    fn after(&mut self, id: u64, next: Next) {
        match next {
            Next::Close => return self.close(id),
            Next::Pause(until) => drop(self.timers.insert((until, id), Timer::Resume)),
            Next::Keep => {}
        }
        if let Some(Source::Served(served)) = self.sources.get_mut(&id)
            && let Some(interest) = served.take_change_of_interest(matches!(next, Next::Pause(_)))
        {
            let data = EventData::new_u64(id);
            let _ = epoll::modify(&self.shared.epoll, served.socket(), data, interest);
        }
    }

    fn close(&mut self, id: u64) {
        if let Some(process) = self.processes.remove(&id) {
            self.sources.remove(&process);
        }
        let Some(Source::Served(mut served)) = self.sources.remove(&id) else { return };
        self.connections -= 1;
        let pid = served.peer().pid;
        let slots = served.take_slots();
        let leases = served.into_leases();
        tracing::debug!(pid, leases = leases.len(), "an importer's connection has ended");
        let Ok(runtime) = Runtime::get() else { return };
        for (lease, export) in leases {
            runtime.exports.release(export, lease, End::Died);
        }
        for page in slots.awaited_pages() {
            page.poison(Side::Exporter);
            self.begin_poison(Poison::Page(page, Side::Exporter));
        }
        drop_elsewhere(slots);
    }

    fn run_timers(&mut self) {
        let now = Instant::now();
        while let Some(entry) = self.timers.first_entry().filter(|entry| entry.key().0 <= now) {
            let id = entry.key().1;
            let timer = entry.remove();
            match (timer, self.sources.get(&id)) {
                (Timer::Hello, Some(Source::Served(served))) if !served.has_said_hello() => self.close(id),
                (Timer::Resume, Some(Source::Served(_))) => self.after(id, Next::Keep),
                (Timer::Listen, Some(Source::Listener(Listener { socket, .. }))) => {
                    self.modify(socket.as_fd(), id, EventFlags::IN);
                }
                (Timer::Poison(times), _) => self.poison_again(now, id, times),
                (Timer::Arrival, _) => self.look_for_arrival(now, id),
                (Timer::Finish, _) => self.look_for_finish(now, id),
                (Timer::Stagings, _) => self.look_at_stagings(now, id),
                _ => {}
            }
        }
    }

    fn look_at_stagings(&mut self, now: Instant, id: u64) {
        let waited_for = Runtime::get().is_ok_and(|runtime| runtime.stagings.somebody_waits());
        self.watches_stagings = waited_for;
        if waited_for {
            self.served().for_each(|(_, served)| served.end_silent_stagings());
            self.timers.insert((now + STAGINGS, id), Timer::Stagings);
        }
    }

    fn look_for_arrival(&mut self, now: Instant, id: u64) {
        let arriving = self.arriving.get(&id).map(|(near, _)| near);
        let kept = || self.kept.get(&id).map(|(order, _)| &***order);
        let Some(near) = arriving.or_else(kept) else { return };
        if !near.has_arrived() {
            self.timers.insert((now + ARRIVAL, id), Timer::Arrival);
            return;
        }
        if let Some(kept) = self.kept.remove(&id) {
            return drop_elsewhere(kept);
        }
        let Some((near, far)) = self.arriving.remove(&id) else { return };
        near.ends().end(End::Released);
        if let Some(far) = far {
            far.ends().end(End::Released);
            return_own_slot(&far, &near);
        }
    }

    fn look_for_finish(&mut self, now: Instant, id: u64) {
        let Some(Finish { timeline, least, order }) = self.finishing.get(&id) else { return };
        if timeline.finish_if_arrived(*least, order.as_deref()) {
            if let Some(finished) = self.finishing.remove(&id) {
                drop_elsewhere(finished);
            }
        } else {
            self.timers.insert((now + ARRIVAL, id), Timer::Finish);
        }
    }

    fn begin_poison(&mut self, words: Poison) {
        let id = self.take_id();
        // The oldest has been ended most often.
        if self.ended.len() >= MAX_POISONED
            && let Some((_, oldest)) = self.ended.pop_first()
        {
            drop_elsewhere(oldest);
        }
        self.ended.insert(id, words);
        self.poison_after_pause(Instant::now(), id, 0);
    }

    /// After each time the pause is twice as long.
    fn poison_after_pause(&mut self, now: Instant, id: u64, times: u32) {
        self.timers.insert((now + POISON_AGAIN * (1 << times), id), Timer::Poison(times + 1));
    }

    fn poison_again(&mut self, now: Instant, id: u64, times: u32) {
        let goes_on = match self.ended.get(&id) {
            None => return,
            Some(Poison::Timeline(ends)) => {
                ends.poison();
                let is_used = times < POISON_UNUSED_TIMES || Arc::strong_count(ends) > 1;
                is_used && ends.needs_poison() && !ends.is_sealed()
            }
            Some(Poison::Page(page, side)) => {
                page.poison(*side);
                times < POISON_UNUSED_TIMES || Arc::strong_count(page) > 1
            }
        };
        if times < POISON_TIMES && goes_on {
            self.poison_after_pause(now, id, times);
        } else if let Some(words) = self.ended.remove(&id) {
            drop_elsewhere(words);
        }
    }

    fn served(&self) -> impl Iterator<Item = (u64, &Served)> {
        self.sources.iter().filter_map(|(id, source)| match source {
            Source::Served(served) => Some((*id, &**served)),
            _ => None,
        })
    }

    fn add(&self, fd: BorrowedFd<'_>, id: u64, flags: EventFlags) -> bool {
        let added = epoll::add(&self.shared.epoll, fd, EventData::new_u64(id), flags);
        if let Err(error) = &added {
            tracing::error!(%error, "a descriptor cannot be watched");
        }
        added.is_ok()
    }

    fn modify(&self, fd: BorrowedFd<'_>, id: u64, flags: EventFlags) {
        if let Err(error) = epoll::modify(&self.shared.epoll, fd, EventData::new_u64(id), flags) {
            tracing::error!(%error, "a descriptor cannot be watched");
        }
    }

    fn take_id(&mut self) -> u64 {
        let id = self.next;
        self.next += 1;
        id
    }
}

/// Asks the kernel what there is to do, and sleeps so long where there is nothing.
fn poll(epoll: &OwnedFd, events: &mut Vec<Event>, longest: Option<Duration>) -> rustix::io::Result<()> {
    let timeout = longest.map(timespec);
    match epoll::wait(epoll, rustix::buffer::spare_capacity(events), timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error),
    }
}

/// What may be the last to hold the caller's backend is not for the poller to drop.
fn drop_elsewhere(thing: impl Send + 'static) {
    if let Ok(runtime) = Runtime::get() {
        runtime.worker.submit(move || drop(thing));
    }
}
