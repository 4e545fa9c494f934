//! Setup of channels between hosts: a listener at a TCP address, and a connection to it.
//!
//! Both processes prove that they know the same key (`docs/spec/tcp.md`), and exchange the greetings of a channel. A listener's
//! connections are served by a [`TcpServer`] until their greeting has arrived, and then wait, without a thread, to be accepted.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use device_ipc_tcp::{AuthenticatedConnection, Key, MAX_MESSAGE_BYTES, TcpError};
use rustix::event::PollFlags;

use super::Channel;
use super::builder::{LocalEnd, RETRY};
use super::connection::{Agreement, ChannelConnection};
use super::handshake::{Greeting, Hello, refused};
use super::link::ChannelLink;
use super::relay;
use super::relay_handle::Relay;
use crate::model::error::{Error, Remedy, Result};
use crate::os::log::{self, Throttle};
use crate::os::{ClosedByFork, Readiness, clock};
use crate::transport::{Admission, Deadline, MAX_REQUEST_BYTES, TcpServer, greediest, socket};

/// The id of the key of a channel, which distinguishes it from keys of other uses.
const KEY_ID: u64 = 1;

/// The time limit of the handshake, and of the greeting after it.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// The time limit for the answer to a greeting, which the buffer of a new connection takes at once.
const ANSWER: Duration = Duration::from_secs(1);

/// Maximum number of connections that wait to be accepted. The oldest one of the host that has the most is closed for a further one.
const MAX_WAITING: usize = 64;

/// A TCP listener, and its connections that wait to be accepted.
#[derive(Debug)]
pub(super) struct TcpListening {
    server: TcpServer,
    waiting: Arc<GreetedQueue>,
}

#[derive(Debug)]
struct GreetedQueue {
    connections: Mutex<VecDeque<Greeted>>,
    /// Readable while there are connections.
    readiness: Readiness,
}

/// A connection whose client knows the key and has sent its greeting.
#[derive(Debug)]
struct Greeted {
    _closed_by_fork: ClosedByFork,
    connection: AuthenticatedConnection,
    greeting: Vec<u8>,
}

impl TcpListening {
    /// Listens at an address of this host.
    pub(super) fn start(address: &str, key: Key) -> Result<Self> {
        let resolved =
            resolve(address).map_err(|error| Error::io(format!("listening at {address:?}"), error))?;
        let readiness = Readiness::new().map_err(|error| Error::io("creating an eventfd", error))?;
        let waiting = Arc::new(GreetedQueue { connections: Mutex::default(), readiness });
        let served = Arc::clone(&waiting);
        let server = TcpServer::start(resolved[0], move |_, permit, stream, peer| {
            match greet(stream, &key, || permit.mark_in_use(KEY_ID)) {
                Ok(greeted) => served.push(greeted),
                Err(why) => {
                    static WARNINGS: Throttle = Throttle::new();
                    if let Some(count) = WARNINGS.count() {
                        tracing::warn!(target: log::CHANNEL, %peer, %why, count, "a channel of another host was not begun");
                    }
                }
            }
        })?;
        Ok(Self { server, waiting })
    }

    pub(super) const fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Accepts the next process. `None` after the deadline.
    pub(super) fn accept(&self, end: &LocalEnd, deadline: Deadline) -> Result<Option<Channel>> {
        loop {
            let accepted = self.try_accept(end)?;
            if accepted.is_some() || deadline.left().is_zero() {
                return Ok(accepted);
            }
            let waited = socket::wait_until(self.as_fd(), PollFlags::IN, deadline.at);
            waited.map_err(|error| Error::io("waiting for a channel", error))?;
        }
    }

    /// Accepts the next process if one has sent its greeting.
    pub(super) fn try_accept(&self, end: &LocalEnd) -> Result<Option<Channel>> {
        while let Some(greeted) = self.take() {
            let peer = greeted.address();
            match accept(greeted, end) {
                Ok(Some(channel)) => return Ok(Some(channel)),
                Ok(None) => {}
                Err(error) => refused(error, format_args!("the process at {peer}"))?,
            }
        }
        Ok(None)
    }

    /// Returns the next connection that waits to be accepted.
    fn take(&self) -> Option<Greeted> {
        let mut connections = self.waiting.lock();
        let next = connections.pop_front();
        if connections.is_empty() {
            self.waiting.readiness.clear();
        }
        next
    }
}

impl AsFd for TcpListening {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.waiting.readiness.as_fd()
    }
}

impl GreetedQueue {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Greeted>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, greeted: Greeted) {
        let mut connections = self.lock();
        let oldest = (connections.len() >= MAX_WAITING).then(|| {
            let peer = |greeted: &Greeted| greeted.connection.socket().peer_addr().ok().map(|peer| peer.ip());
            let hosts: Vec<_> = connections.iter().map(|greeted| ((), peer(greeted))).collect();
            greediest(&hosts).and_then(|index| connections.remove(index))
        });
        connections.push_back(greeted);
        self.readiness.set();
        drop(connections);
        drop(oldest);
    }
}

impl Greeted {
    /// Returns the peer's address, for messages.
    fn address(&self) -> String {
        self.connection
            .socket()
            .peer_addr()
            .map_or_else(|_| "an unknown address".into(), |peer| peer.to_string())
    }
}

/// Returns the addresses of `HOST:PORT`, at least one.
fn resolve(address: &str) -> std::io::Result<Vec<SocketAddr>> {
    let form = |error: std::io::Error| match error.kind() {
        ErrorKind::InvalidInput => {
            std::io::Error::new(ErrorKind::InvalidInput, "expected HOST:PORT, such as 10.0.0.1:29531")
        }
        _ => error,
    };
    let resolved: Vec<_> = address.to_socket_addrs().map_err(form)?.collect();
    if resolved.is_empty() {
        return Err(std::io::Error::new(ErrorKind::NotFound, "the host has no address"));
    }
    Ok(resolved)
}

/// Lets a client prove that it knows the key, and receives its greeting.
fn greet(stream: Arc<TcpStream>, key: &Key, proved: impl FnOnce() -> Admission) -> Result<Greeted, TcpError> {
    let closed_by_fork = ClosedByFork::new(stream.as_fd());
    let find = |id| (id == KEY_ID).then(|| key.clone());
    let mut connection = device_ipc_tcp::accept(stream, find, clock::to_system(clock::now() + HANDSHAKE))?;
    // If it has been closed, the receive fails. The number of greeted connections has a limit of its own.
    proved();
    connection.limit_received(MAX_REQUEST_BYTES);
    let greeting = connection.receive(Some(clock::to_system(clock::now() + HANDSHAKE)))?;
    connection.limit_received(MAX_MESSAGE_BYTES);
    Ok(Greeted { _closed_by_fork: closed_by_fork, connection, greeting })
}

/// Answers the greeting of a connection, and begins the channel. `None` if the process has closed the connection.
fn accept(greeted: Greeted, own: &LocalEnd) -> Result<Option<Channel>> {
    let Greeted { _closed_by_fork, mut connection, greeting } = greeted;
    // A peer of another protocol version learns this version from the answer.
    let answer = Greeting::Hello(own.hello.clone()).encode()?;
    let answered = connection.send(&answer, Some(clock::to_system(clock::now() + ANSWER)));
    let peer = hello(&greeting)?;
    if answered.is_err() {
        return Ok(None);
    }
    begin(own, peer, connection).map(Some)
}

fn hello(greeting: &[u8]) -> Result<Hello> {
    match Greeting::decode(greeting)? {
        Greeting::Hello(peer) => Ok(peer),
        Greeting::NotAllowed { .. } | Greeting::TooManyChannels => {
            Err(Error::Protocol("its first packet is not a hello".into()))
        }
    }
}

/// Connects to a listener, and waits until it has accepted.
pub(super) fn connect(own: &LocalEnd, address: &str, key: &Key, timeout: Duration) -> Result<Channel> {
    let resolved =
        resolve(address).map_err(|error| Error::io(format!("looking up the address {address:?}"), error))?;
    let deadline = Deadline::after(timeout);
    let begun = clock::now();
    let mut detail = String::new();
    loop {
        for target in &resolved {
            match try_connect(*target, address, key, &own.hello, deadline)? {
                Ok((connection, peer)) => return begin(own, peer, connection),
                Err(why) => detail = format!("tried {target}: {why}"),
            }
        }
        let left = deadline.left();
        if left.is_zero() {
            return Err(Error::NoListener { name: address.to_owned(), after: timeout, detail });
        }
        clock::sleep(RETRY.interval(clock::elapsed(begun)).min(left));
    }
}

/// Tries to connect. The inner error is the reason for which another try may succeed.
fn try_connect(
    target: SocketAddr,
    address: &str,
    key: &Key,
    own: &Hello,
    deadline: Deadline,
) -> Result<Result<(AuthenticatedConnection, Hello), String>> {
    let left = deadline.left().max(Duration::from_millis(1));
    let stream = match TcpStream::connect_timeout(&target, left) {
        Ok(stream) => stream,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let failed = |step: &str, error: TcpError| match error {
        // A listener that closes before it accepts may be followed by another one.
        TcpError::Closed { .. } | TcpError::Io { .. } => Ok(Err(error.to_string())),
        TcpError::TimedOut { .. } => {
            Err(deadline.passed(step, &format!("; {address} listens but has not called accept")))
        }
        TcpError::Refused | TcpError::ServerWithoutKey => Err(Error::NotPermitted(format!(
            "the listener at {address} has another key; {}",
            Remedy::UseOneKey
        ))),
        TcpError::Random { cause } => Err(Error::io(step, cause)),
        error => Err(Error::Protocol(format!("the listener at {address}: {error}"))),
    };
    let mut connection = match device_ipc_tcp::connect(stream, KEY_ID, key, clock::to_system(deadline.at)) {
        Ok(connection) => connection,
        Err(error) => return failed("the handshake of the channel", error),
    };
    let until = Some(clock::to_system(deadline.at));
    let answer = connection
        .send(&Greeting::Hello(own.clone()).encode()?, until)
        .and_then(|()| connection.receive(until));
    match answer {
        Ok(greeting) => Ok(Ok((connection, hello(&greeting)?))),
        Err(error) => failed("the accepting of the channel", error),
    }
}

/// Begins the channel after both greetings.
fn begin(own: &LocalEnd, mut peer: Hello, tcp: AuthenticatedConnection) -> Result<Channel> {
    let maps = own.hello.agree_with(&peer)?;
    if let Ok(address) = tcp.socket().peer_addr() {
        peer.program = format!("{} on {}", peer.program, address.ip());
    }
    let [link, relays] = ChannelLink::within_process()?;
    let relay = Relay::new()?;
    let connection = ChannelConnection::begin(Agreement {
        own: own.clone(),
        peer,
        // The peer's process id is one of its host.
        pid: 0,
        maps,
        link,
        relay: Some(Arc::clone(&relay)),
        allotment: None,
    })?;
    relay::start(&connection, relay, relays, tcp)?;
    Ok(Channel::new(connection))
}
