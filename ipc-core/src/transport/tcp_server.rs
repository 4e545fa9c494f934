//! A TCP listener, and the threads that serve its connections.
//!
//! Each connection has a thread that may block, since registering memory and waiting for streams blocks. The number of threads
//! is limited. If there are as many, a connection is closed for a new one: the one that has been idle for the longest time, as its
//! client connects again when it needs to, or else the oldest one whose client has not proved itself yet, so that clients without a
//! key keep out no others. If all connections are in use, further ones wait in the system's queue.

use std::collections::VecDeque;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::model::error::{Error, Result};
use crate::os::log::{self, Throttle};
use crate::os::{ClosedByFork, Readiness, spawn_without_signals};

/// Maximum number of connections that are served at the same time.
const MAX_CONNECTIONS: usize = 64;

/// The pause after an error of the system, such as no free file descriptor; the connection remains in the queue.
const PAUSE: Duration = Duration::from_millis(50);

/// A listener. Dropping it closes the socket and idle connections; others continue until they are idle.
#[derive(Debug)]
pub(crate) struct TcpServer {
    id: ServerId,
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Set when the server is dropped, a connection has ended, or one of the maximum number of connections has become idle.
    changed: Readiness,
}

#[derive(Debug, Default)]
struct State {
    is_closed: bool,
    /// The number of connections that are being served.
    connections: usize,
    /// The idle connections, with their numbers, the one that has been idle for the longest time first.
    idle: VecDeque<(u64, Arc<TcpStream>)>,
    /// The connections whose clients have not proved themselves, with their numbers, the oldest first.
    unproved: VecDeque<(u64, Arc<TcpStream>)>,
}

/// Identifies a server within the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ServerId(u64);

/// The permit of a connection, which counts until this is dropped. The server may shut the connection down for another one before
/// it is [in use](Self::mark_in_use), and while it is [idle](Self::mark_idle).
pub(crate) struct ConnectionPermit {
    shared: Arc<Shared>,
    number: u64,
    stream: Arc<TcpStream>,
}

impl TcpServer {
    /// Listens at an address; port 0 takes a free one. `serve` is called on a thread of its own for each connection, and marks it as
    /// in use when the client has proved itself.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the address cannot be used, or the system cannot start a thread.
    pub(crate) fn start(
        address: SocketAddr,
        serve: impl Fn(ServerId, ConnectionPermit, Arc<TcpStream>, SocketAddr) + Send + Sync + 'static,
    ) -> Result<Self> {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let failed = |error| Error::io(format!("listening at {address}"), error);
        let listener = TcpListener::bind(address).map_err(failed)?;
        // A client may be gone before its connection is accepted.
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let changed = Readiness::new().map_err(|error| Error::io("creating an eventfd", error))?;
        let shared = Arc::new(Shared { state: Mutex::default(), changed });
        let id = ServerId(LAST.fetch_add(1, Ordering::Relaxed));
        let server = Self { id, address, shared: Arc::clone(&shared) };
        let serve: Arc<Serve> = Arc::new(move |permit, stream, peer| serve(id, permit, stream, peer));
        spawn_without_signals("device-ipc-tcp", move || accept_all(&listener, &shared, &serve))?;
        Ok(server)
    }

    pub(crate) const fn id(&self) -> ServerId {
        self.id
    }

    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.is_closed = true;
        state.idle.drain(..).for_each(|(_, stream)| shut_down(&stream));
        drop(state);
        self.shared.changed.set();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Removes a connection that may be closed for another one. Returns whether there was one of this number.
    fn remove(&mut self, number: u64) -> bool {
        let before = self.idle.len() + self.unproved.len();
        self.idle.retain(|(known, _)| *known != number);
        self.unproved.retain(|(known, _)| *known != number);
        self.idle.len() + self.unproved.len() < before
    }
}

type Serve = dyn Fn(ConnectionPermit, Arc<TcpStream>, SocketAddr) + Send + Sync;

fn accept_all(listener: &TcpListener, shared: &Arc<Shared>, serve: &Arc<Serve>) {
    let _closed_by_fork = ClosedByFork::new(listener.as_fd());
    let mut last = 0;
    loop {
        let (is_full, may_accept) = {
            let state = shared.state();
            if state.is_closed {
                return;
            }
            let is_full = state.connections >= MAX_CONNECTIONS;
            (is_full, !is_full || !state.idle.is_empty() || !state.unproved.is_empty())
        };
        let mut files = vec![PollFd::new(&shared.changed, PollFlags::IN)];
        if may_accept {
            files.push(PollFd::new(listener, PollFlags::IN));
        }
        let _ = poll(&mut files, None);
        let is_waiting = files.get(1).is_some_and(|file| !file.revents().is_empty());
        shared.changed.clear();
        if !is_waiting {
            continue;
        }
        if is_full {
            close_oldest(shared);
            continue;
        }
        match listener.accept() {
            Ok((stream, peer)) => {
                last += 1;
                spawn(shared, serve, last, stream, peer);
            }
            Err(error) if is_transient(&error) => {}
            Err(error) => {
                static WARNINGS: Throttle = Throttle::new();
                if let Some(count) = WARNINGS.count() {
                    tracing::warn!(target: log::EXPORT, %error, count, "a connection by TCP was not accepted");
                }
                std::thread::sleep(PAUSE);
            }
        }
    }
}

/// Shuts down the connection that has been idle for the longest time, or else the oldest one whose client has not proved itself, and
/// waits until its thread has ended, or for a pause.
fn close_oldest(shared: &Shared) {
    let oldest = {
        let mut state = shared.state();
        state.idle.pop_front().or_else(|| state.unproved.pop_front())
    };
    let Some((_, oldest)) = oldest else { return };
    shut_down(&oldest);
    let pause = Timespec { tv_sec: 0, tv_nsec: PAUSE.subsec_nanos().into() };
    let _ = poll(&mut [PollFd::new(&shared.changed, PollFlags::IN)], Some(&pause));
}

/// Ends the receive that the connection's thread is in.
fn shut_down(stream: &TcpStream) {
    // It fails if the client has closed the connection.
    let _ = stream.shutdown(Shutdown::Both);
}

fn is_transient(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
    matches!(error.kind(), WouldBlock | Interrupted | ConnectionAborted)
}

fn spawn(shared: &Arc<Shared>, serve: &Arc<Serve>, number: u64, stream: TcpStream, peer: SocketAddr) {
    let stream = Arc::new(stream);
    let permit = ConnectionPermit::new(shared, number, &stream);
    let serve = Arc::clone(serve);
    let begun = spawn_without_signals("device-ipc-tcp", move || serve(permit, stream, peer));
    if let Err(error) = begun {
        tracing::warn!(target: log::EXPORT, %error, %peer, "a connection by TCP is not served");
    }
}

impl ConnectionPermit {
    fn new(shared: &Arc<Shared>, number: u64, stream: &Arc<TcpStream>) -> Self {
        let mut state = shared.state();
        state.connections += 1;
        state.unproved.push_back((number, Arc::clone(stream)));
        drop(state);
        Self { shared: Arc::clone(shared), number, stream: Arc::clone(stream) }
    }

    /// Keeps the connection until it is idle. Returns false if it has been closed for another one.
    pub(crate) fn mark_in_use(&self) -> bool {
        self.shared.state().remove(self.number)
    }

    /// Lets the connection, which is in use, be closed for another one.
    pub(crate) fn mark_idle(&self) {
        let mut state = self.shared.state();
        if state.is_closed {
            shut_down(&self.stream);
        }
        state.idle.push_back((self.number, Arc::clone(&self.stream)));
        if state.connections >= MAX_CONNECTIONS {
            self.shared.changed.set();
        }
    }
}

impl Drop for ConnectionPermit {
    /// The peer sees the end of the connection when the last reference to its stream has been dropped, so none remains here.
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.remove(self.number);
        state.connections -= 1;
        drop(state);
        self.shared.changed.set();
    }
}
