//! The poller, seen from the other threads: what they ask of it, and how it is woken.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::event_loop::EventLoop;
use super::link::Link;
use super::socket;
use super::socket_file::{self, SocketFile, SocketName};
use crate::model::error::{Error, Result};
use crate::os::{ClosedByFork, spawn_without_signals};
use crate::sharing::staging::Refused;
use crate::sharing::timeline::{Ends, OwnCounter, Side, Timeline, WordPage};
use crate::wire::descriptor::ExportId;
use crate::wire::{BrokerAddress, Refusal, Reply};

/// Pending connections that the kernel keeps for us.
const BACKLOG: i32 = 128;

/// Tells connections apart; never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ConnectionId(pub(super) u64);

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
pub(super) struct Shared {
    pub(super) epoll: OwnedFd,
    pub(super) wake: OwnedFd,
    commands: Mutex<Vec<Command>>,
    _closed_by_fork: [ClosedByFork; 2],
}

pub(super) enum Command {
    Listen { listener: OwnedFd, refuses_fds: bool, file: Option<SocketFile> },
    Watch(Arc<Link>, Option<OwnedFd>),
    Unwatch(u64),
    Notify(Notice, ExportId, Vec<ConnectionId>),
    Poison(Poison),
    EndOnceArrived(Timeline, Option<Timeline>),
    Checked(ConnectionId, u64, Result<(), Refusal>),
    FinishOnceArrived(Finish),
    Answer(ConnectionId, Reply, Option<OwnedFd>),
    StagingRefused(ConnectionId, Refused),
    WatchStagings,
    WatchSocket(u64, Arc<dyn WatchedSocket>, Option<OwnedFd>),
    UnwatchSocket(u64),
    KeepUntilArrived(Arc<OwnCounter>, Arc<dyn Any + Send + Sync>),
}

/// Words that are ended repeatedly for a while, as device work that a peer had submitted may still overwrite them.
#[derive(Debug)]
pub(crate) enum Poison {
    /// The words of a timeline whose peer is still there.
    Timeline(Arc<Ends>),
    /// All counters of a page whose peer has gone that this side waits for.
    Page(Arc<WordPage>, Side),
}

/// A timeline whose own counter is ended when `least` has been signalled and has arrived, as `order` counts it.
pub(crate) struct Finish {
    pub(crate) timeline: Timeline,
    pub(crate) least: u64,
    pub(crate) order: Option<Arc<OwnCounter>>,
}

/// A socket that its owner reads from, and the poller only watches for its end.
pub(crate) trait WatchedSocket: Send + Sync {
    /// The socket.
    fn socket(&self) -> BorrowedFd<'_>;
    /// The other end, or its process, has gone. Called once or twice, on the poller's thread: it may not block.
    fn hung_up(&self);
}

impl Poller {
    /// Listens in the abstract namespace, or in `directory`; once for each.
    pub(crate) fn listen(&self, directory: Option<PathBuf>) -> Result<BrokerAddress> {
        let mut started = self.start()?;
        let started = started.as_mut().expect("start() has filled it");
        if let Some(address) = started.listening.get(&directory) {
            return Ok(address.clone());
        }
        let (listener, refuses_fds, address, file) = listen(directory.as_ref())?;
        started.shared.command(Command::Listen { listener, refuses_fds, file });
        started.listening.insert(directory, address.clone());
        Ok(address)
    }

    /// Is this an address of ours?
    pub(crate) fn listens_at(&self, address: &BrokerAddress) -> bool {
        self.lock().as_ref().is_some_and(|started| started.listening.values().any(|one| one == address))
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

    /// The driver has been asked what an answer waits for.
    pub(crate) fn checked(&self, connection: ConnectionId, check: u64, result: Result<(), Refusal>) {
        if let Some(started) = self.lock().as_ref() {
            started.shared.command(Command::Checked(connection, check, result));
        }
    }

    /// Answers an importer, with a descriptor or without.
    pub(crate) fn answer(&self, connection: ConnectionId, reply: Reply, file: Option<OwnedFd>) {
        if let Some(started) = self.lock().as_ref() {
            started.shared.command(Command::Answer(connection, reply, file));
        }
    }

    /// A copy could not begin.
    pub(crate) fn staging_refused(&self, connection: ConnectionId, refused: Refused) {
        if let Some(started) = self.lock().as_ref() {
            started.shared.command(Command::StagingRefused(connection, refused));
        }
    }

    /// A copy waits for others: from now on it is looked at whether their importers are still at work.
    pub(crate) fn watch_stagings(&self) {
        if let Some(started) = self.lock().as_ref() {
            started.shared.command(Command::WatchStagings);
        }
    }

    /// Ends words again, for a while.
    pub(crate) fn poison_again(&self, words: Poison) {
        if let Some(started) = self.lock().as_ref() {
            started.shared.command(Command::Poison(words));
        }
    }

    /// Ends both sides of a timeline within this process, once what the near side has submitted has arrived.
    pub(crate) fn end_once_arrived(&self, near: Timeline, far: Option<Timeline>) {
        if let Some(started) = self.lock().as_ref() {
            started.shared.command(Command::EndOnceArrived(near, far));
        }
    }

    /// Ends this side's counter for good, once what was submitted has arrived.
    pub(crate) fn finish_once_arrived(&self, finish: Finish) {
        if let Some(started) = self.lock().as_ref() {
            started.shared.command(Command::FinishOnceArrived(finish));
        }
    }

    /// Watches a socket for the end of the other side, by a number that is never given twice; and that process, where it has
    /// an id here.
    pub(crate) fn watch_socket(&self, number: u64, socket: Arc<dyn WatchedSocket>, pid: u32) -> Result<()> {
        let mut started = self.start()?;
        let started = started.as_mut().expect("start() has filled it");
        let process = Pid::from_raw(pid as i32).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        started.shared.command(Command::WatchSocket(number | SOCKET_BIT, socket, process));
        Ok(())
    }

    /// Forgets a socket that was watched.
    pub(crate) fn unwatch_socket(&self, number: u64) {
        if let Some(started) = self.lock().as_ref() {
            started.shared.command(Command::UnwatchSocket(number | SOCKET_BIT));
        }
    }

    /// Keeps something until what was submitted in this order has arrived.
    pub(crate) fn keep_until_arrived(&self, order: Arc<OwnCounter>, kept: Arc<dyn Any + Send + Sync>) {
        if let Some(started) = self.lock().as_ref() {
            started.shared.command(Command::KeepUntilArrived(order, kept));
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
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(failed("creating an epoll instance"))?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(failed("creating an eventfd"))?;
        let shared = Arc::new(Shared {
            _closed_by_fork: [ClosedByFork::new(epoll.as_fd()), ClosedByFork::new(wake.as_fd())],
            epoll,
            wake,
            commands: Mutex::default(),
        });
        epoll::add(&shared.epoll, &shared.wake, EventData::new_u64(WAKE), EventFlags::IN)
            .map_err(failed("watching an eventfd"))?;
        let in_thread = Arc::clone(&shared);
        spawn_without_signals("device-ipc-poll", move || EventLoop::new(in_thread).run())?;
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
    /// Takes what was asked since the last time.
    pub(super) fn take_commands(&self) -> Vec<Command> {
        let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
        std::mem::take(&mut *self.commands.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn command(&self, command: Command) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push(command);
        // The counter cannot overflow: the poller reads it to zero at every turn.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// One-shot, so that a link that a caller reads from costs the poller no wake-up.
    pub(super) fn arm(&self, link: &Link, armed: bool) {
        let wanted = if armed { EventFlags::IN | EventFlags::ONESHOT } else { EventFlags::ONESHOT };
        let data = EventData::new_u64(link.watch_id());
        let _ = epoll::modify(&self.epoll, link.socket(), data, wanted);
    }
}

/// Creates the socket that importers connect to, and returns whether the kernel refuses descriptors that others send to it.
fn listen(directory: Option<&PathBuf>) -> Result<(OwnedFd, bool, BrokerAddress, Option<SocketFile>)> {
    let Some(directory) = directory else {
        let address = BrokerAddress::Abstract(SocketName::new()?.published().into_bytes());
        let failed = |error: Errno| Error::io(format!("listening at {address}"), error);
        let socket = socket::new_socket().map_err(failed)?;
        rustix::net::bind(&socket, &address.to_socket_address()?).map_err(failed)?;
        let refuses_fds = socket::listen(socket.as_fd(), BACKLOG).map_err(failed)?;
        return Ok((socket, refuses_fds, address, None));
    };
    let directory =
        std::path::absolute(directory).map_err(|error| Error::io("finding the socket directory", error))?;
    socket_file::sweep(&directory);
    let (socket, refuses_fds, file) = socket_file::listen_in(&directory, BACKLOG)?;
    Ok((socket, refuses_fds, BrokerAddress::Path(file.path().to_owned()), Some(file)))
}

/// The wake-up in the poller's own numbering of what it waits on.
pub(super) const WAKE: u64 = 0;

/// The ids of links have this bit, so that they cannot be mistaken for those of the poller's own sources.
pub(super) const LINK_BIT: u64 = 1 << 63;

/// And those of sockets that are only watched this one.
pub(super) const SOCKET_BIT: u64 = 1 << 62;
