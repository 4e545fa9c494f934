//! The poller's thread. Nothing here calls a driver, runs the user's code or blocks on a send.

mod admission;
#[cfg(feature = "kill-points")]
mod idle;

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::io::Errno;

use super::commands::{CommandQueue, PollerCommand};
use super::connection::Next;

use super::served::Served;
use super::service::{ConnectionId, Service, Session};
use super::socket_file::SocketFile;
use super::watch::{CLIENT_BIT, SOCKET_BIT, WAKE, WatchedClient, WatchedSocket};
use super::{Metrics, Worker};
use crate::os::log::Throttle;
use crate::os::{ClosedByFork, Pace, PollMode, Timers, clock};

/// The time for which the loop looks for the next request before it sleeps, while importers send one request after the other: a driver's
/// open in between is no reason to sleep and be woken.
const SPIN: Duration = Duration::from_micros(100);

/// A descriptor that the loop waits on, beside those of clients and watched sockets.
enum Source<S: Service> {
    Listener(ListeningSource),
    Served(Box<Served<S::Session>>),
    /// The process of a connection's peer.
    ServedProcess(u64, #[allow(dead_code, reason = "keeps the descriptor open")] OwnedFd),
    /// The process that a client is connected to.
    ClientProcess(Arc<dyn WatchedClient>, #[allow(dead_code, reason = "keeps the descriptor open")] OwnedFd),
    /// The process of a watched socket's peer.
    SocketProcess(u64, #[allow(dead_code, reason = "keeps the descriptor open")] OwnedFd),
}

struct ListeningSource {
    _closed_by_fork: ClosedByFork,
    socket: OwnedFd,
    /// The kernel refuses descriptors that peers send to it.
    refuses_fds: bool,
    file: Option<SocketFile>,
}

impl Drop for ListeningSource {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            file.remove();
        }
    }
}

/// An action at a certain time, for a source that still exists then.
#[derive(Clone, Copy, Debug)]
enum Timer {
    /// Closes a connection whose peer has not said hello.
    Hello,
    /// Reads again from a connection whose peer had sent too much.
    Resume,
    /// Accepts connections again.
    Listen,
}

/// A client or a socket that is watched.
struct Watched<T> {
    item: T,
    /// The source that is its process.
    process: Option<u64>,
}

/// The state of the poller's thread.
pub(super) struct EventLoop<S: Service> {
    service: S,
    queue: Arc<CommandQueue<S>>,
    worker: Worker,
    metrics: Arc<Metrics>,
    sources: HashMap<u64, Source<S>>,
    /// Clients by their watch id.
    clients: HashMap<u64, Watched<Arc<dyn WatchedClient>>>,
    /// Sockets that are only watched.
    sockets: HashMap<u64, Watched<Weak<dyn WatchedSocket>>>,
    /// The source that is the process of a connection's peer, by the connection.
    processes: HashMap<u64, u64>,
    timers: Timers<(u64, Timer)>,
    connections: usize,
    /// Limits the warnings about refused connections, which another user can cause at will.
    refusals: Throttle,
    next: u64,
    buffer: Vec<u8>,
    /// The rhythm of recent requests.
    pace: Pace,
    /// A request has been read since the loop last waited.
    was_asked: bool,
    #[cfg(feature = "kill-points")]
    idle: idle::Idle,
}

impl<S: Service> EventLoop<S> {
    pub(super) fn new(
        service: S,
        queue: Arc<CommandQueue<S>>,
        worker: Worker,
        metrics: Arc<Metrics>,
    ) -> Self {
        Self {
            service,
            queue,
            worker,
            metrics,
            sources: HashMap::new(),
            clients: HashMap::new(),
            sockets: HashMap::new(),
            processes: HashMap::new(),
            timers: Timers::default(),
            connections: 0,
            refusals: Throttle::new(),
            next: WAKE + 1,
            buffer: Vec::new(),
            pace: Pace::within(SPIN),
            was_asked: false,
            #[cfg(feature = "kill-points")]
            idle: idle::Idle::default(),
        }
    }

    pub(super) fn run(mut self) {
        let mut events = Vec::with_capacity(64);
        loop {
            if let Err(error) = self.wait(&mut events) {
                tracing::error!(target: crate::os::log::TRANSPORT, %error, "the device-ipc poller stops");
                return;
            }
            for event in &events {
                self.handle(event);
            }
            self.run_timers();
            #[cfg(feature = "kill-points")]
            self.note_turn(&events);
        }
    }

    /// Waits for the next event or timer. While importers send one request after the other, the loop polls repeatedly before it
    /// sleeps.
    fn wait(&mut self, events: &mut Vec<Event>) -> rustix::io::Result<()> {
        events.clear();
        let next_timer = self.timers.next().into_iter().chain(self.service.next_timer()).min();
        let left = || next_timer.map(clock::left);
        let epoll = self.queue.epoll.fd();
        #[cfg(feature = "kill-points")]
        if self.idle.is_awaited() {
            return poll(epoll, events, Some(Duration::ZERO));
        }
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
        } else if id & CLIENT_BIT != 0 {
            if let Some(watched) = self.clients.get(&id) {
                let client = Arc::clone(&watched.item);
                // A caller that is reading lets the poller look again when it has finished.
                if client.on_readable() && !client.is_gone() {
                    self.queue.epoll.arm(id, client.socket(), true);
                }
            }
        } else if id & SOCKET_BIT != 0 {
            self.notify_socket(id);
        } else {
            match self.sources.get(&id) {
                Some(Source::Listener(_)) => self.accept(id),
                Some(Source::Served(_)) => self.serve(id, flags),
                Some(Source::ServedProcess(connection, _)) => self.close(*connection),
                Some(Source::ClientProcess(client, _)) => {
                    client.mark_gone();
                    self.sources.remove(&id);
                }
                Some(Source::SocketProcess(socket, _)) => self.notify_socket(*socket),
                None => {}
            }
        }
    }

    fn run_commands(&mut self) {
        for command in self.queue.take_commands() {
            #[cfg(feature = "kill-points")]
            self.idle.note_command();
            match command {
                PollerCommand::Listen { listener, refuses_fds, file } => {
                    let id = self.take_id();
                    if self.add(listener.as_fd(), id, EventFlags::IN) {
                        let listener = ListeningSource {
                            _closed_by_fork: ClosedByFork::new(listener.as_fd()),
                            socket: listener,
                            refuses_fds,
                            file,
                        };
                        self.sources.insert(id, Source::Listener(listener));
                    }
                }
                PollerCommand::Watch(client, process) => self.watch(client, process),
                PollerCommand::Unwatch(id) => {
                    if let Some(Watched { item: client, process }) = self.clients.remove(&id) {
                        self.queue.epoll.remove(client.socket());
                        process.map(|process| self.sources.remove(&process));
                    }
                }
                PollerCommand::WatchSocket(id, socket, process) => self.watch_socket(id, socket, process),
                PollerCommand::UnwatchSocket(id) => {
                    if let Some(Watched { process: Some(process), .. }) = self.sockets.remove(&id) {
                        self.sources.remove(&process);
                    }
                }
                PollerCommand::Send(connections, message) => {
                    for ConnectionId(id) in connections {
                        self.step(id, |served| served.connection.send(&message, &[]));
                    }
                }
                PollerCommand::Event(ConnectionId(id), event) => {
                    self.step(id, |served| served.session.handle(event, &mut served.connection));
                }
                PollerCommand::Service(command) => self.service.run(command),
                #[cfg(feature = "kill-points")]
                PollerCommand::WhenIdle(answer) => self.idle.await_by(answer),
            }
        }
    }

    /// Does something with a connection, unless it has closed.
    fn step(&mut self, id: u64, act: impl FnOnce(&mut Served<S::Session>) -> Next) {
        if let Some(Source::Served(served)) = self.sources.get_mut(&id) {
            let next = act(served);
            self.after(id, next);
        }
    }

    fn watch(&mut self, client: Arc<dyn WatchedClient>, process: Option<OwnedFd>) {
        let data = EventData::new_u64(client.watch_id());
        let added =
            epoll::add(self.queue.epoll.fd(), client.socket(), data, EventFlags::IN | EventFlags::ONESHOT);
        if let Err(error) = added {
            tracing::error!(target: crate::os::log::TRANSPORT, %error, "an exporter's socket cannot be watched");
            client.mark_gone();
            return;
        }
        let process = process.and_then(|process| {
            let id = self.take_id();
            let added = self.add(process.as_fd(), id, EventFlags::IN | EventFlags::ONESHOT);
            added
                .then(|| self.sources.insert(id, Source::ClientProcess(Arc::clone(&client), process)))
                .map(|_| id)
        });
        self.clients.insert(client.watch_id(), Watched { item: client, process });
    }

    fn watch_socket(&mut self, id: u64, socket: Arc<dyn WatchedSocket>, process: Option<OwnedFd>) {
        let data = EventData::new_u64(id);
        // Without data, only its hang-up is waited for.
        let mut interest = EventFlags::ONESHOT;
        interest.set(EventFlags::IN, socket.awaits_data());
        if let Err(error) = epoll::add(self.queue.epoll.fd(), socket.socket(), data, interest) {
            tracing::error!(target: crate::os::log::TRANSPORT, %error, "the socket of a channel cannot be watched");
            socket.ready();
            return;
        }
        let process = process.and_then(|process| {
            let source = self.take_id();
            let added = self.add(process.as_fd(), source, EventFlags::IN | EventFlags::ONESHOT);
            added.then(|| self.sources.insert(source, Source::SocketProcess(id, process))).map(|_| source)
        });
        self.sockets.insert(id, Watched { item: Arc::downgrade(&socket), process });
        if Arc::strong_count(&socket) == 1 {
            self.drop_elsewhere(socket);
        }
    }

    fn notify_socket(&mut self, id: u64) {
        if let Some(socket) = self.sockets.get(&id).and_then(|watched| watched.item.upgrade()) {
            Arc::clone(&socket).ready();
            self.drop_elsewhere(socket);
        }
    }

    /// Drops a value on the worker: it may be the last reference to the caller's backend, whose drop calls a driver.
    fn drop_elsewhere(&self, value: impl Send + 'static) {
        self.worker.submit(move || drop(value));
    }

    fn serve(&mut self, id: u64, flags: EventFlags) {
        let Some(Source::Served(served)) = self.sources.get_mut(&id) else { return };
        let mut next = Next::Keep;
        if flags.intersects(EventFlags::OUT) {
            next = served.connection.flush();
        }
        // The kernel reports the hang-up of a connection that is not read at the moment repeatedly.
        if flags.intersects(EventFlags::HUP | EventFlags::ERR) && !served.connection.is_read() {
            next = Next::Close;
        }
        if next == Next::Keep && flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
            next = served.read(&mut self.buffer, &self.metrics);
            self.was_asked = true;
        }
        self.after(id, next);
    }

    fn after(&mut self, id: u64, next: Next) {
        match next {
            Next::Close => return self.close(id),
            Next::Pause(until) => drop(self.timers.insert(until, (id, Timer::Resume))),
            Next::Keep => {}
        }
        if let Some(Source::Served(served)) = self.sources.get_mut(&id)
            && let Some(interest) = served.take_change_of_interest(matches!(next, Next::Pause(_)))
        {
            let data = EventData::new_u64(id);
            let _ = epoll::modify(self.queue.epoll.fd(), served.connection.socket(), data, interest);
        }
    }

    fn close(&mut self, id: u64) {
        if let Some(process) = self.processes.remove(&id) {
            self.sources.remove(&process);
        }
        let Some(Source::Served(served)) = self.sources.remove(&id) else { return };
        self.connections -= 1;
        let Served { connection, session } = *served;
        self.queue.epoll.remove(connection.socket());
        self.service.closed(session, connection.peer());
    }

    fn run_timers(&mut self) {
        let now = clock::now();
        while let Some((id, timer)) = self.timers.take_due(now) {
            match (timer, self.sources.get(&id)) {
                (Timer::Hello, Some(Source::Served(served))) if !served.session.has_said_hello() => {
                    self.close(id);
                }
                (Timer::Resume, Some(Source::Served(_))) => self.after(id, Next::Keep),
                (Timer::Listen, Some(Source::Listener(ListeningSource { socket, .. }))) => {
                    self.modify(socket.as_fd(), id, EventFlags::IN);
                }
                _ => {}
            }
        }
        if self.service.next_timer().is_some_and(|at| at <= now) {
            let sessions = self.sources.values().filter_map(|source| match source {
                Source::Served(served) => Some(&served.session),
                _ => None,
            });
            self.service.run_timers(now, sessions);
        }
    }

    fn served(&self) -> impl Iterator<Item = (u64, &Served<S::Session>)> {
        self.sources.iter().filter_map(|(id, source)| match source {
            Source::Served(served) => Some((*id, &**served)),
            _ => None,
        })
    }

    fn add(&self, fd: BorrowedFd<'_>, id: u64, flags: EventFlags) -> bool {
        let added = epoll::add(self.queue.epoll.fd(), fd, EventData::new_u64(id), flags);
        if let Err(error) = &added {
            tracing::error!(target: crate::os::log::TRANSPORT, %error, "a descriptor cannot be watched");
        }
        added.is_ok()
    }

    fn modify(&self, fd: BorrowedFd<'_>, id: u64, flags: EventFlags) {
        if let Err(error) = epoll::modify(self.queue.epoll.fd(), fd, EventData::new_u64(id), flags) {
            tracing::error!(target: crate::os::log::TRANSPORT, %error, "a descriptor cannot be watched");
        }
    }

    fn take_id(&mut self) -> u64 {
        let id = self.next;
        self.next += 1;
        id
    }
}

/// Waits for events of the kernel, no longer than `longest`.
#[allow(clippy::disallowed_methods, reason = "the clock determines the duration")]
fn poll(epoll: BorrowedFd<'_>, events: &mut Vec<Event>, longest: Option<Duration>) -> rustix::io::Result<()> {
    let timeout = longest.map(|left| clock::timespec(clock::slice(left)));
    match epoll::wait(epoll, rustix::buffer::spare_capacity(events), timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error),
    }
}
