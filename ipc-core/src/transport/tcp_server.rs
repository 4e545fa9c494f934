//! A TCP listener, and the threads that serve its connections.
//!
//! Each connection has a thread that may block, since registering memory and waiting for streams blocks. The number of threads
//! is limited. If there are as many, a connection is closed for a new one: the one that has been idle for the longest time, as its
//! client connects again when it needs to, or else one whose client has not proved itself yet. If all connections are in use,
//! further ones wait in the system's queue.
//!
//! A peer uses up its own share only. Of the connections that have not proved themselves, which have a limit of their own, the
//! oldest one of the host that has the most is closed for a further one. Those in use are limited for each host and for each key,
//! and more strictly for a host with one key.

use std::collections::VecDeque;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use super::fairness::greediest;
use crate::model::error::{Error, Result};
use crate::os::log::{self, Throttle};
use crate::os::{ClosedByFork, Readiness, clock, spawn_without_signals};

/// Maximum number of connections that are served at the same time.
const MAX_CONNECTIONS: usize = 256;

/// Maximum number of connections whose clients have not proved themselves.
const MAX_UNPROVED: usize = 64;

/// Maximum number of connections in use of one host with one key, such as the token of an export.
const MAX_OF_HOST_AND_KEY: usize = MAX_CONNECTIONS / 4;

/// Maximum number of connections in use of one host, and with one key.
const MAX_OF_EITHER: usize = MAX_CONNECTIONS / 2;

/// Maximum length in bytes of a request, and of the greeting of a channel.
pub(crate) const MAX_REQUEST_BYTES: usize = 64 << 10;

/// The pause after an error of the system, such as no free file descriptor; the connection remains in the queue.
const PAUSE: Duration = Duration::from_millis(50);

/// A listener. Dropping it closes the socket and idle connections; others continue until they are idle.
#[derive(Debug)]
pub(crate) struct TcpServer {
    id: ServerId,
    address: SocketAddr,
    shared: Arc<ServerState>,
}

#[derive(Debug)]
struct ServerState {
    state: Mutex<ServedConnections>,
    /// Set when the server is dropped, a connection has ended, or one of the maximum number of connections has become idle.
    changed: Readiness,
}

#[derive(Debug, Default)]
struct ServedConnections {
    is_closed: bool,
    /// The number of connections that are being served.
    connections: usize,
    /// The idle connections, the one that has been idle for the longest time first.
    idle: VecDeque<ServedConnection>,
    /// The connections whose clients have not proved themselves, the oldest first.
    unproved: VecDeque<ServedConnection>,
    in_use: Vec<UsedConnection>,
}

/// A connection that is being served.
#[derive(Clone, Debug)]
struct ServedConnection {
    number: u64,
    host: IpAddr,
    stream: Arc<TcpStream>,
}

/// A connection in use.
#[derive(Debug)]
struct UsedConnection {
    number: u64,
    host: IpAddr,
    key: u64,
}

/// Whether a client may use its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    Granted,
    /// The share of the host or of the key is exhausted. The connection counts as idle.
    Exhausted,
    /// The connection has been closed for another one.
    Closed,
}

/// Identifies a server within the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ServerId(u64);

/// The permit of a connection, which counts until this is dropped. The server may shut the connection down for another one before
/// it is [in use](Self::mark_in_use), and while it is [idle](Self::mark_idle).
pub(crate) struct ConnectionPermit {
    shared: Arc<ServerState>,
    connection: ServedConnection,
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
        let shared = Arc::new(ServerState { state: Mutex::default(), changed });
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
        state.idle.drain(..).for_each(|idle| shut_down(&idle.stream));
        drop(state);
        self.shared.changed.set();
    }
}

impl ServerState {
    fn state(&self) -> MutexGuard<'_, ServedConnections> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ServedConnections {
    /// Removes a connection that may be closed for another one. Returns whether there was one of this number.
    fn remove(&mut self, number: u64) -> bool {
        let before = self.idle.len() + self.unproved.len();
        self.idle.retain(|known| known.number != number);
        self.unproved.retain(|known| known.number != number);
        self.idle.len() + self.unproved.len() < before
    }

    /// Removes a connection, also one in use.
    fn end_use(&mut self, number: u64) {
        self.remove(number);
        self.in_use.retain(|used| used.number != number);
    }

    /// Returns whether a connection of this host with this key may be used.
    fn has_share(&self, host: IpAddr, key: u64) -> bool {
        let of_host = self.in_use.iter().filter(|used| used.host == host);
        let with_key = self.in_use.iter().filter(|used| used.key == key).count();
        let of_both = of_host.clone().filter(|used| used.key == key).count();
        of_both < MAX_OF_HOST_AND_KEY && of_host.count() < MAX_OF_EITHER && with_key < MAX_OF_EITHER
    }

    /// Removes the oldest unproved connection of the host that has the most.
    fn take_unproved(&mut self) -> Option<ServedConnection> {
        let hosts: Vec<_> = self.unproved.iter().map(|unproved| ((), unproved.host)).collect();
        greediest(&hosts).and_then(|index| self.unproved.remove(index))
    }
}

type Serve = dyn Fn(ConnectionPermit, Arc<TcpStream>, SocketAddr) + Send + Sync;

fn accept_all(listener: &TcpListener, shared: &Arc<ServerState>, serve: &Arc<Serve>) {
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
        let _ = clock::poll(&mut files, None);
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
                clock::sleep(PAUSE);
            }
        }
    }
}

/// Shuts down the connection that has been idle for the longest time, or else one whose client has not proved itself, and
/// waits until its thread has ended, or for a pause.
fn close_oldest(shared: &ServerState) {
    let oldest = {
        let mut state = shared.state();
        state.idle.pop_front().or_else(|| state.take_unproved())
    };
    let Some(oldest) = oldest else { return };
    shut_down(&oldest.stream);
    let _ = clock::poll(&mut [PollFd::new(&shared.changed, PollFlags::IN)], clock::now() + PAUSE);
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

fn spawn(shared: &Arc<ServerState>, serve: &Arc<Serve>, number: u64, stream: TcpStream, peer: SocketAddr) {
    let stream = Arc::new(stream);
    let connection = ServedConnection { number, host: peer.ip(), stream: Arc::clone(&stream) };
    let permit = ConnectionPermit::new(shared, connection);
    let serve = Arc::clone(serve);
    let begun = spawn_without_signals("device-ipc-tcp", move || serve(permit, stream, peer));
    if let Err(error) = begun {
        tracing::warn!(target: log::EXPORT, %error, %peer, "a connection by TCP is not served");
    }
}

impl ConnectionPermit {
    fn new(shared: &Arc<ServerState>, connection: ServedConnection) -> Self {
        let mut state = shared.state();
        state.connections += 1;
        if state.unproved.len() >= MAX_UNPROVED
            && let Some(oldest) = state.take_unproved()
        {
            shut_down(&oldest.stream);
        }
        state.unproved.push_back(connection.clone());
        drop(state);
        Self { shared: Arc::clone(shared), connection }
    }

    /// Keeps the connection until it is idle, if the shares of its host and of its key permit it.
    pub(crate) fn mark_in_use(&self, key: u64) -> Admission {
        let mut state = self.shared.state();
        let ServedConnection { number, host, .. } = self.connection;
        if !state.remove(number) {
            return Admission::Closed;
        }
        if !state.has_share(host, key) {
            state.idle.push_back(self.connection.clone());
            return Admission::Exhausted;
        }
        state.in_use.push(UsedConnection { number, host, key });
        Admission::Granted
    }

    /// Lets the connection, which is in use, be closed for another one.
    pub(crate) fn mark_idle(&self) {
        let mut state = self.shared.state();
        if state.is_closed {
            shut_down(&self.connection.stream);
        }
        state.end_use(self.connection.number);
        state.idle.push_back(self.connection.clone());
        if state.connections >= MAX_CONNECTIONS {
            self.shared.changed.set();
        }
    }
}

impl Drop for ConnectionPermit {
    /// The peer sees the end of the connection when the last reference to its stream has been dropped, so none remains here.
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.end_use(self.connection.number);
        state.connections -= 1;
        drop(state);
        self.shared.changed.set();
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::time::Duration;

    use super::*;

    /// A host with one key, a host with many keys, and a key of many hosts leave room for others.
    #[test]
    fn share_of_a_host_or_key_is_limited() {
        let host = |index: u32| IpAddr::V4(Ipv4Addr::from_bits(index));
        for (share, of) in [
            (MAX_OF_HOST_AND_KEY, (|_| (0, 0)) as fn(u32) -> (u32, u64)),
            (MAX_OF_EITHER, |index| (0, index.into())),
            (MAX_OF_EITHER, |index| (index, 0)),
        ] {
            let mut state = ServedConnections::default();
            for index in 0..share as u32 {
                let (of_host, key) = of(index);
                assert!(state.has_share(host(of_host), key));
                state.in_use.push(UsedConnection { number: u64::from(index), host: host(of_host), key });
            }
            let (of_host, key) = of(share as u32);
            assert!(!state.has_share(host(of_host), key), "the share has an end");
            assert!(state.has_share(host(1 << 20), 1 << 20), "others have theirs");
        }
    }

    /// Connections that hold all that one host may use of one key do not keep out another key.
    #[test]
    fn connections_beyond_the_share_are_not_admitted() {
        let (admitted, admissions) = std::sync::mpsc::channel();
        let server = TcpServer::start("127.0.0.1:0".parse().unwrap(), move |_, permit, stream, _| {
            let mut key = [0];
            std::io::Read::read_exact(&mut &*stream, &mut key).unwrap();
            admitted.send(permit.mark_in_use(key[0].into())).unwrap();
            // Until the client closes the connection.
            let _ = std::io::Read::read(&mut &*stream, &mut key);
        });
        let address = server.as_ref().unwrap().address();
        let connect = |key: u8| {
            let mut stream = TcpStream::connect(address).unwrap();
            std::io::Write::write_all(&mut stream, &[key]).unwrap();
            (stream, admissions.recv_timeout(Duration::from_secs(60)).unwrap())
        };
        let held: Vec<_> = (0..MAX_OF_HOST_AND_KEY).map(|_| connect(1)).collect();
        assert!(held.iter().all(|(_, admission)| *admission == Admission::Granted));
        assert_eq!(connect(1).1, Admission::Exhausted);
        assert_eq!(connect(2).1, Admission::Granted);
    }
}
