//! The other threads' handle of the poller: commands to its thread, and the start of it.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::client::{Client, Subscriber};
use super::commands::{CommandQueue, PollerCommand};
use super::event_loop::EventLoop;
use super::service::{ConnectionId, Service, Session};
use super::socket;
use super::socket_file::{self, SocketFile, SocketName};
use super::watch::{SOCKET_BIT, WatchedClient, WatchedSocket};
use super::{Metrics, Worker};
use crate::model::error::{Error, Result};
use crate::os::spawn_without_signals;
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
    queue: Arc<CommandQueue<S>>,
    listening: HashMap<Option<PathBuf>, BrokerAddress>,
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

    /// Watches a socket by a [new number](super::new_socket_number), and the peer's process, where it has an id here.
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
        let service = (self.service)()?;
        let queue = Arc::new(CommandQueue::new()?);
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
