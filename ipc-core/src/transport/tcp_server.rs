//! A TCP listener, and the threads that serve its connections.
//!
//! Each connection has a thread that may block, since registering memory and waiting for streams blocks. The number of threads
//! is limited. If there are as many, the oldest connection whose client has not proved itself yet is closed for a new one, so
//! that clients without a key keep out no others. If all have, further connections wait in the system's queue.

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

/// A listener. Dropping it closes the socket; connections that are being served continue.
#[derive(Debug)]
pub(crate) struct TcpServer {
    id: ServerId,
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Set when the server is dropped, or a connection has ended.
    changed: Readiness,
}

#[derive(Debug, Default)]
struct State {
    is_closed: bool,
    /// The number of connections that are being served.
    connections: usize,
    /// The connections whose clients have not proved themselves, with their numbers, the oldest first.
    unproved: VecDeque<(u64, TcpStream)>,
}

/// Identifies a server within the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ServerId(u64);

/// A connection of a client that has not proved itself. It may be shut down for another one until this is dropped.
pub(crate) struct Unproved {
    shared: Arc<Shared>,
    number: u64,
}

impl TcpServer {
    /// Listens at an address; port 0 takes a free one. `serve` is called on a thread of its own for each connection, and drops
    /// [`Unproved`] when the client has proved itself.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the address cannot be used, or the system cannot start a thread.
    pub(crate) fn start(
        address: SocketAddr,
        serve: impl Fn(ServerId, Unproved, TcpStream, SocketAddr) + Send + Sync + 'static,
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
        let serve: Arc<Serve> = Arc::new(move |unproved, stream, peer| serve(id, unproved, stream, peer));
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
        self.shared.state().is_closed = true;
        self.shared.changed.set();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type Serve = dyn Fn(Unproved, TcpStream, SocketAddr) + Send + Sync;

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
            (is_full, !is_full || !state.unproved.is_empty())
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

/// Shuts down the oldest connection whose client has not proved itself, and waits until its thread has ended, or for a pause.
fn close_oldest(shared: &Shared) {
    let Some((_, oldest)) = shared.state().unproved.pop_front() else { return };
    let _ = oldest.shutdown(Shutdown::Both);
    let pause = Timespec { tv_sec: 0, tv_nsec: PAUSE.subsec_nanos().into() };
    let _ = poll(&mut [PollFd::new(&shared.changed, PollFlags::IN)], Some(&pause));
}

fn is_transient(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
    matches!(error.kind(), WouldBlock | Interrupted | ConnectionAborted)
}

fn spawn(shared: &Arc<Shared>, serve: &Arc<Serve>, number: u64, stream: TcpStream, peer: SocketAddr) {
    let begun =
        stream.try_clone().map_err(|error| Error::io("duplicating a socket", error)).and_then(|clone| {
            let served = Served::begin(shared, number, clone);
            let unproved = Unproved { shared: Arc::clone(shared), number };
            let serve = Arc::clone(serve);
            spawn_without_signals("device-ipc-tcp", move || {
                let _served = served;
                serve(unproved, stream, peer);
            })
        });
    if let Err(error) = begun {
        tracing::warn!(target: log::EXPORT, %error, %peer, "a connection by TCP is not served");
    }
}

/// A connection that counts until this is dropped.
struct Served(Arc<Shared>);

impl Served {
    fn begin(shared: &Arc<Shared>, number: u64, stream: TcpStream) -> Self {
        let mut state = shared.state();
        state.connections += 1;
        state.unproved.push_back((number, stream));
        drop(state);
        Self(Arc::clone(shared))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.0.state().connections -= 1;
        self.0.changed.set();
    }
}

impl Drop for Unproved {
    fn drop(&mut self) {
        // The peer sees the end of the connection only when this copy of the socket is closed, too.
        self.shared.state().unproved.retain(|(number, _)| *number != self.number);
    }
}
