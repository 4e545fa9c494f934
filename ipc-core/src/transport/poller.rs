//! The other threads' handle of the poller: commands to its thread, and the start of it.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::client::{Client, Subscriber};
use super::event_loop::EventLoop;
use super::service::{ConnectionId, Service, Session};
use super::socket;
use super::socket_file::{self, SocketFile, SocketName};
use super::{Metrics, Worker};
use crate::model::error::{Error, Result};
use crate::os::{ClosedByFork, spawn_without_signals};
use crate::wire::{BrokerAddress, Reply};

/// Maximum number of pending connections that the kernel queues.
const BACKLOG: i32 = 128;

/// The other threads' handle of the poller. Its thread starts when it is first needed.
pub(crate) struct Poller<S: Service> {
    worker: Worker,
    metrics: Arc<Metrics>,
    /// Makes the service when the thread starts.
    service: fn() -> Result<S>,
    started: Mutex<Option<Started<S>>>,
}

struct Started<S: Service> {
    queue: Arc<Queue<S>>,
    listening: HashMap<Option<PathBuf>, BrokerAddress>,
}

/// The commands of other threads to the poller's.
pub(super) struct Queue<S: Service> {
    pub(super) epoll: Arc<Epoll>,
    wake: OwnedFd,
    commands: Mutex<Vec<PollerCommand<S>>>,
    _closed_by_fork: ClosedByFork,
}

/// The kernel's list of descriptors that the poller's thread waits on.
pub(super) struct Epoll {
    fd: OwnedFd,
    _closed_by_fork: ClosedByFork,
}

pub(super) enum PollerCommand<S: Service> {
    Listen {
        listener: OwnedFd,
        refuses_fds: bool,
        file: Option<SocketFile>,
    },
    Watch(Arc<dyn WatchedClient>, Option<OwnedFd>),
    Unwatch(u64),
    WatchSocket(u64, Arc<dyn WatchedSocket>, Option<OwnedFd>),
    UnwatchSocket(u64),
    Send(Vec<ConnectionId>, Reply),
    Event(ConnectionId, <S::Session as Session>::Event),
    Service(S::Command),
    /// Answers once there is nothing left to handle, with the number of what was handled.
    #[cfg(feature = "kill-points")]
    WhenIdle(std::sync::mpsc::Sender<u64>),
}

/// A client whose messages the poller reads while no caller waits for a reply.
pub(super) trait WatchedClient: Send + Sync {
    /// Returns the client's id, with [`CLIENT_BIT`].
    fn watch_id(&self) -> u64;
    /// Returns the socket.
    fn socket(&self) -> BorrowedFd<'_>;
    /// Reads the messages that have arrived. Returns false where a caller is reading.
    fn on_readable(&self) -> bool;
    /// Returns whether the connection is known to have closed.
    fn is_gone(&self) -> bool;
    /// Notes that the peer has terminated.
    fn mark_gone(&self);
}

/// A socket that its owner reads from, and that the poller only watches: for a hang-up, or for data.
pub(crate) trait WatchedSocket: Send + Sync {
    /// Returns the socket.
    fn socket(&self) -> BorrowedFd<'_>;
    /// Returns whether the poller watches for data too.
    fn awaits_data(&self) -> bool {
        false
    }
    /// Handles the hang-up of the peer, the termination of its process, or data: once for the socket, until
    /// [`Poller::arm_socket`], and once for the process. Called on the poller's thread: it may not block.
    fn ready(self: Arc<Self>);
}

/// Returns a number for a watched socket, which is never given twice.
pub(crate) fn new_socket_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl<S: Service> Poller<S> {
    /// Creates the handle. No thread is started before one is needed.
    pub(crate) fn new(worker: Worker, metrics: Arc<Metrics>, service: fn() -> Result<S>) -> Self {
        Self { worker, metrics, service, started: Mutex::default() }
    }

    /// Listens in the abstract namespace, or in `directory`; once for each.
    pub(crate) fn listen(&self, directory: Option<PathBuf>) -> Result<BrokerAddress> {
        let mut started = self.start()?;
        let started = started.as_mut().expect("start() has filled it");
        if let Some(address) = started.listening.get(&directory) {
            return Ok(address.clone());
        }
        let (listener, refuses_fds, address, file) = listen(directory.as_ref())?;
        started.queue.push(PollerCommand::Listen { listener, refuses_fds, file });
        started.listening.insert(directory, address.clone());
        Ok(address)
    }

    /// Returns whether this process listens at the address.
    pub(crate) fn listens_at(&self, address: &BrokerAddress) -> bool {
        self.lock().as_ref().is_some_and(|started| started.listening.values().any(|one| one == address))
    }

    /// Watches a client for messages and for the termination of its peer.
    pub(crate) fn watch<T: Subscriber>(&self, client: &Arc<Client<T>>) -> Result<()> {
        let mut started = self.start()?;
        let started = started.as_mut().expect("start() has filled it");
        let pid = client.server_pid().and_then(|pid| Pid::from_raw(pid as i32));
        let process = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        client.set_watched(&started.queue.epoll);
        started.queue.push(PollerCommand::Watch(Arc::clone(client) as Arc<dyn WatchedClient>, process));
        Ok(())
    }

    /// Stops watching a client.
    pub(crate) fn unwatch<T: Subscriber>(&self, client: &Client<T>) {
        self.push(|| PollerCommand::Unwatch(client.watch_id()));
    }

    /// Watches a socket by a [new number](new_socket_number), and the peer's process, where it has an id here.
    pub(crate) fn watch_socket(&self, number: u64, socket: Arc<dyn WatchedSocket>, pid: u32) -> Result<()> {
        let mut started = self.start()?;
        let started = started.as_mut().expect("start() has filled it");
        let process = Pid::from_raw(pid as i32).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        started.queue.push(PollerCommand::WatchSocket(number | SOCKET_BIT, socket, process));
        Ok(())
    }

    /// Watches a socket for data again after it was reported.
    pub(crate) fn arm_socket(&self, number: u64, socket: BorrowedFd<'_>) {
        if let Some(started) = self.lock().as_ref() {
            started.queue.epoll.arm(number | SOCKET_BIT, socket, true);
        }
    }

    /// Stops watching a socket, which the caller closes next.
    pub(crate) fn unwatch_socket(&self, number: u64, socket: BorrowedFd<'_>) {
        if let Some(started) = self.lock().as_ref() {
            started.queue.epoll.remove(socket);
            started.queue.push(PollerCommand::UnwatchSocket(number | SOCKET_BIT));
        }
    }

    /// Sends a notification over connections.
    pub(crate) fn notify(&self, connections: Vec<ConnectionId>, message: Reply) {
        if !connections.is_empty() {
            self.push(|| PollerCommand::Send(connections, message));
        }
    }

    /// Hands an event to the session of a connection.
    pub(crate) fn send_event(&self, connection: ConnectionId, event: <S::Session as Session>::Event) {
        self.push(|| PollerCommand::Event(connection, event));
    }

    /// Hands a command to the service.
    pub(crate) fn send_command(&self, command: S::Command) {
        self.push(|| PollerCommand::Service(command));
    }

    /// Waits until the thread has handled every event and every command, and returns the number of these since its start; `None`
    /// after the timeout.
    #[cfg(feature = "kill-points")]
    pub(crate) fn wait_until_idle(&self, timeout: std::time::Duration) -> Option<u64> {
        let (idle, answer) = std::sync::mpsc::channel();
        match self.lock().as_ref() {
            Some(started) => started.queue.push(PollerCommand::WhenIdle(idle)),
            None => return Some(0),
        }
        crate::os::clock::receive(&answer, timeout).ok()
    }

    /// Queues a command, where the thread runs.
    fn push(&self, command: impl FnOnce() -> PollerCommand<S>) {
        if let Some(started) = self.lock().as_ref() {
            started.queue.push(command());
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Started<S>>> {
        self.started.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self) -> Result<MutexGuard<'_, Option<Started<S>>>> {
        let mut started = self.lock();
        if started.is_some() {
            return Ok(started);
        }
        let failed = |what: &str| {
            let what = what.to_owned();
            move |error: Errno| Error::io(what, error)
        };
        let service = (self.service)()?;
        let fd = epoll::create(CreateFlags::CLOEXEC).map_err(failed("creating an epoll instance"))?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(failed("creating an eventfd"))?;
        let epoll = Arc::new(Epoll { _closed_by_fork: ClosedByFork::new(fd.as_fd()), fd });
        let _closed_by_fork = ClosedByFork::new(wake.as_fd());
        let queue = Arc::new(Queue { epoll, wake, commands: Mutex::default(), _closed_by_fork });
        epoll::add(queue.epoll.fd(), &queue.wake, EventData::new_u64(WAKE), EventFlags::IN)
            .map_err(failed("watching an eventfd"))?;
        let (in_thread, worker, metrics) =
            (Arc::clone(&queue), self.worker.clone(), Arc::clone(&self.metrics));
        spawn_without_signals("device-ipc-poll", move || {
            EventLoop::new(service, in_thread, worker, metrics).run();
        })?;
        *started = Some(Started { queue, listening: HashMap::new() });
        Ok(started)
    }
}

impl<S: Service> fmt::Debug for Poller<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Poller").finish_non_exhaustive()
    }
}

impl<S: Service> Queue<S> {
    /// Takes the commands that have been queued since the last call.
    pub(super) fn take_commands(&self) -> Vec<PollerCommand<S>> {
        let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
        std::mem::take(&mut *self.commands.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn push(&self, command: PollerCommand<S>) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push(command);
        // The counter cannot overflow: the poller reads it to zero at every turn.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

impl Epoll {
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Lets the poller read a client's messages, or keeps it away while a caller reads its reply. One-shot, so that a socket that
    /// its owner reads from costs the poller no wake-up.
    pub(super) fn arm(&self, watch_id: u64, socket: BorrowedFd<'_>, armed: bool) {
        let interest = if armed { EventFlags::IN | EventFlags::ONESHOT } else { EventFlags::ONESHOT };
        let _ = epoll::modify(&self.fd, socket, EventData::new_u64(watch_id), interest);
    }

    /// Removes a socket before another thread closes it. While `epoll_wait` looks at a socket it holds a reference to the open
    /// file; a socket that is closed at that moment would be released on the poller's thread, which would then close the
    /// descriptors in its queue, for as long as their sender decides.
    pub(super) fn remove(&self, socket: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.fd, socket);
    }
}

/// Creates the socket that importers connect to, and returns whether the kernel refuses descriptors that others send to it.
fn listen(directory: Option<&PathBuf>) -> Result<(OwnedFd, bool, BrokerAddress, Option<SocketFile>)> {
    let Some(directory) = directory else {
        let address = BrokerAddress::Abstract(SocketName::new()?.published().into_bytes().into());
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
    Ok((socket, refuses_fds, BrokerAddress::Path(file.path().into()), Some(file)))
}

/// The id of the wake-up among the poller's sources.
pub(super) const WAKE: u64 = 0;

/// A bit of every client's id, which no id of the poller's own sources has.
pub(super) const CLIENT_BIT: u64 = 1 << 63;

/// A bit of every watched socket's id.
pub(super) const SOCKET_BIT: u64 = 1 << 62;
