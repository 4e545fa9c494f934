//! The thread that waits on all sockets of the process, as exporter and as importer.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::link::Link;
use super::protocol::Reply;
use super::served::{Next, Served};
use super::socket::{self, timespec};
use super::token::random_bytes;
use super::{BrokerAddress, MAX_ADDRESS_BYTES};
use crate::descriptor::ExportId;
use crate::error::{Error, Result};
use crate::runtime::{ClosedByFork, Runtime, spawn_without_signals};

/// Pending connections that the kernel keeps for us.
const BACKLOG: i32 = 128;

/// Connections served at a time.
const MAX_CONNECTIONS: usize = 4096;

/// Tells connections apart; never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ConnectionId(u64);

/// What importers are told unasked.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Notice {
    /// The export has been dropped.
    Dropped,
    /// The exporter waits until nobody holds the export.
    Recall,
}

/// The poller, seen from the other threads.
#[derive(Default)]
pub(crate) struct Poller {
    started: Mutex<Option<Started>>,
}

struct Started {
    shared: Arc<Shared>,
    listening: HashMap<Option<PathBuf>, BrokerAddress>,
}

/// What other threads use to talk to the poller's.
struct Shared {
    epoll: OwnedFd,
    wake: OwnedFd,
    commands: Mutex<Vec<Command>>,
}

enum Command {
    Listen(OwnedFd, Option<PathBuf>),
    Watch(Arc<Link>, Option<OwnedFd>),
    Unwatch(u64),
    Notify(Notice, ExportId, Vec<ConnectionId>),
}

impl Poller {
    /// Listens in the abstract namespace, or in `directory`; once for each.
    pub(crate) fn listen(&self, directory: Option<PathBuf>) -> Result<BrokerAddress> {
        let mut started = self.start()?;
        let started = started.as_mut().expect("start() has filled it");
        if let Some(address) = started.listening.get(&directory) {
            return Ok(address.clone());
        }
        let (listener, address) = listen(directory.as_ref())?;
        let file = match &address {
            BrokerAddress::Path(path) => Some(path.clone()),
            BrokerAddress::Abstract(_) => None,
        };
        started.shared.command(Command::Listen(listener, file));
        started.listening.insert(directory, address.clone());
        Ok(address)
    }

    /// Watches an importer's link for the exporter's end and its notices.
    pub(crate) fn watch(&self, link: &Arc<Link>) -> Result<()> {
        let mut started = self.start()?;
        let started = started.as_mut().expect("start() has filled it");
        let pid = link.exporter_pid().and_then(|pid| Pid::from_raw(pid as i32));
        let process = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        started.shared.command(Command::Watch(Arc::clone(link), process));
        Ok(())
    }

    /// Forgets a link.
    pub(crate) fn unwatch(&self, link: &Link) {
        if let Some(started) = self.lock().as_ref() {
            started.shared.command(Command::Unwatch(link.watch_id()));
        }
    }

    /// Lets the poller read the link's notices, or keeps it away while a caller reads its answer.
    pub(crate) fn arm(&self, link: &Link, armed: bool) {
        if let Some(started) = self.lock().as_ref() {
            started.shared.arm(link, armed);
        }
    }

    /// Tells importers something about an export.
    pub(crate) fn notify(&self, notice: Notice, export: ExportId, connections: Vec<ConnectionId>) {
        if let Some(started) = self.lock().as_ref().filter(|_| !connections.is_empty()) {
            started.shared.command(Command::Notify(notice, export, connections));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Started>> {
        self.started.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self) -> Result<MutexGuard<'_, Option<Started>>> {
        let mut started = self.lock();
        if started.is_some() {
            return Ok(started);
        }
        let failed = |what: &str| {
            let what = what.to_owned();
            move |error: Errno| Error::io(what, error)
        };
        let shared = Arc::new(Shared {
            epoll: epoll::create(CreateFlags::CLOEXEC).map_err(failed("creating an epoll instance"))?,
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(failed("creating an eventfd"))?,
            commands: Mutex::default(),
        });
        epoll::add(&shared.epoll, &shared.wake, EventData::new_u64(WAKE), EventFlags::IN)
            .map_err(failed("watching an eventfd"))?;
        let in_thread = Arc::clone(&shared);
        spawn_without_signals("device-ipc-poll", move || Loop::new(in_thread).run())
            .map_err(|error| Error::io("starting the device-ipc poller", error))?;
        *started = Some(Started { shared, listening: HashMap::new() });
        Ok(started)
    }
}

impl fmt::Debug for Poller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poller").finish_non_exhaustive()
    }
}

impl Shared {
    fn command(&self, command: Command) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push(command);
        // The counter cannot overflow: the poller reads it to zero at every turn.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// One-shot, so that a link that a caller reads from costs the poller no wake-up.
    fn arm(&self, link: &Link, armed: bool) {
        let wanted = if armed { EventFlags::IN | EventFlags::ONESHOT } else { EventFlags::ONESHOT };
        let data = EventData::new_u64(link.watch_id());
        let _ = epoll::modify(&self.epoll, link.socket(), data, wanted);
    }
}

/// A socket to be connected to by importers.
fn listen(directory: Option<&PathBuf>) -> Result<(OwnedFd, BrokerAddress)> {
    let name = format!(
        "device-ipc-{}-{}",
        std::process::id(),
        data_encoding::HEXLOWER.encode(&random_bytes::<8>()?)
    );
    let address = match directory {
        None => BrokerAddress::Abstract(name.into_bytes()),
        Some(directory) => {
            let path = std::path::absolute(directory)
                .map_err(|error| Error::io("finding the socket directory", error))?;
            BrokerAddress::Path(path.join(name))
        }
    };
    let failed = |error: Errno| Error::io(format!("listening at {address}"), error);
    if address.bytes().len() > MAX_ADDRESS_BYTES {
        return Err(Error::io(format!("listening at {address}"), Errno::NAMETOOLONG));
    }
    let socket = socket::new_socket().map_err(failed)?;
    rustix::net::bind(&socket, &address.to_socket_address()?).map_err(failed)?;
    rustix::net::listen(&socket, BACKLOG).map_err(failed)?;
    Ok((socket, address))
}

const WAKE: u64 = 0;

/// The ids of links have this bit, so that they cannot be mistaken for those of the poller's own sources.
pub(super) const LINK_BIT: u64 = 1 << 63;

enum Source {
    Listener(Listener),
    Served(Served),
    /// The process behind a connection.
    ServedProcess(u64, #[allow(dead_code, reason = "keeps the descriptor open")] OwnedFd),
    /// The process behind a link.
    LinkProcess(Arc<Link>, #[allow(dead_code, reason = "keeps the descriptor open")] OwnedFd),
}

struct Listener {
    _closed_by_fork: ClosedByFork,
    socket: OwnedFd,
    _file: Option<SocketFile>,
}

/// Removes the socket's file when its listener goes.
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The state of the poller's thread.
struct Loop {
    shared: Arc<Shared>,
    sources: HashMap<u64, Source>,
    /// Links by their watch id, with the id of the source that is their process.
    links: HashMap<u64, (Arc<Link>, Option<u64>)>,
    /// The process of a connection, by the connection.
    processes: HashMap<u64, u64>,
    next: u64,
    buffer: Vec<u8>,
}

impl Loop {
    fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            sources: HashMap::new(),
            links: HashMap::new(),
            processes: HashMap::new(),
            next: WAKE + 1,
            buffer: Vec::new(),
        }
    }

    fn run(mut self) {
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            let timeout =
                self.next_deadline().map(|at| timespec(at.saturating_duration_since(Instant::now())));
            match epoll::wait(
                &self.shared.epoll,
                rustix::buffer::spare_capacity(&mut events),
                timeout.as_ref(),
            ) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "the device-ipc poller stops");
                    return;
                }
            }
            for event in &events {
                self.handle(event);
            }
            self.close_the_silent();
        }
    }

    fn handle(&mut self, event: &Event) {
        let id = event.data.u64();
        let flags = event.flags;
        if id == WAKE {
            self.run_commands();
        } else if id & LINK_BIT != 0 {
            if let Some((link, _)) = self.links.get(&id) {
                let link = Arc::clone(link);
                link.on_readable();
                if !link.is_gone() {
                    self.shared.arm(&link, true);
                }
            }
        } else {
            match self.sources.get_mut(&id) {
                Some(Source::Listener(..)) => self.accept(id),
                Some(Source::Served(_)) => self.serve(id, flags),
                Some(Source::ServedProcess(connection, _)) => {
                    let connection = *connection;
                    self.close(connection);
                }
                Some(Source::LinkProcess(link, _)) => {
                    link.mark_gone();
                    self.sources.remove(&id);
                }
                None => {}
            }
        }
    }

    fn run_commands(&mut self) {
        let _ = rustix::io::read(&self.shared.wake, &mut [0_u8; 8]);
        let commands =
            std::mem::take(&mut *self.shared.commands.lock().unwrap_or_else(PoisonError::into_inner));
        for command in commands {
            match command {
                Command::Listen(listener, file) => {
                    let id = self.take_id();
                    if self.add(listener.as_fd(), id, EventFlags::IN) {
                        let listener = Listener {
                            _closed_by_fork: ClosedByFork::new(listener.as_fd()),
                            socket: listener,
                            _file: file.map(SocketFile),
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
                Command::Notify(notice, export, connections) => {
                    for ConnectionId(id) in connections {
                        if let Some(Source::Served(served)) = self.sources.get_mut(&id) {
                            let message = match notice {
                                Notice::Dropped => Reply::Dropped { export },
                                Notice::Recall => Reply::Recall { export },
                            };
                            let next = served.send(&message, &[]);
                            self.after(id, next);
                        }
                    }
                }
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

    fn accept(&mut self, listener: u64) {
        let Some(Source::Listener(Listener { socket, .. })) = self.sources.get(&listener) else { return };
        let accepted = rustix::net::accept_with(socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        let Ok(accepted) = accepted else { return };
        let connections = self.sources.values().filter(|source| matches!(source, Source::Served(_))).count();
        let Ok(peer) = socket::peer_credentials(&accepted) else { return };
        if connections >= MAX_CONNECTIONS {
            tracing::warn!(pid = peer.pid, "too many importers are connected; one is turned away");
            return;
        }
        let id = self.take_id();
        if !self.add(accepted.as_fd(), id, EventFlags::IN) {
            return;
        }
        let process =
            Pid::from_raw(peer.pid as i32).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        if let Some(process) = process {
            let process_id = self.take_id();
            if self.add(process.as_fd(), process_id, EventFlags::IN | EventFlags::ONESHOT) {
                self.sources.insert(process_id, Source::ServedProcess(id, process));
                self.processes.insert(id, process_id);
            }
        }
        self.sources.insert(id, Source::Served(Served::new(ConnectionId(id), accepted, peer)));
    }

    fn serve(&mut self, id: u64, flags: EventFlags) {
        let Ok(runtime) = Runtime::get() else { return };
        let Some(Source::Served(served)) = self.sources.get_mut(&id) else { return };
        let mut next = Next::Keep;
        if flags.intersects(EventFlags::OUT) {
            next = served.flush();
        }
        if next == Next::Keep && flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
            next = served.read(&mut self.buffer, &runtime.exports, &runtime.identity);
        }
        self.after(id, next);
    }

    fn after(&mut self, id: u64, next: Next) {
        if next == Next::Close {
            self.close(id);
        } else if let Some(Source::Served(served)) = self.sources.get_mut(&id)
            && let Some(wants_to_write) = served.take_change_of_interest()
        {
            let out = if wants_to_write { EventFlags::OUT } else { EventFlags::empty() };
            let data = EventData::new_u64(id);
            let _ = epoll::modify(&self.shared.epoll, served.socket(), data, EventFlags::IN | out);
        }
    }

    fn close(&mut self, id: u64) {
        if let Some(process) = self.processes.remove(&id) {
            self.sources.remove(&process);
        }
        let Some(Source::Served(served)) = self.sources.remove(&id) else { return };
        let pid = served.peer().pid;
        let leases = served.into_leases();
        tracing::debug!(pid, leases = leases.len(), "an importer's connection has ended");
        let Ok(runtime) = Runtime::get() else { return };
        for (lease, export) in leases {
            runtime.exports.release(export, lease);
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.served().filter_map(|(_, served)| served.hello_deadline()).min()
    }

    fn close_the_silent(&mut self) {
        let now = Instant::now();
        let late = |served: &Served| served.hello_deadline().is_some_and(|at| at <= now);
        let silent: Vec<u64> = self.served().filter(|(_, served)| late(served)).map(|(id, _)| id).collect();
        for id in silent {
            self.close(id);
        }
    }

    fn served(&self) -> impl Iterator<Item = (u64, &Served)> {
        self.sources.iter().filter_map(|(id, source)| match source {
            Source::Served(served) => Some((*id, served)),
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

    fn take_id(&mut self) -> u64 {
        let id = self.next;
        self.next += 1;
        id
    }
}
