//! The listening socket of a name, and the processes that connect to it.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::Channel;
use super::builder::LocalEnd;
use super::connection::{Agreement, ChannelConnection};
use super::handshake::{Greeting, check_identity, refused};
use super::link::ChannelLink;
use super::name::{self, ListeningSocket};
use super::readiness::PollSet;
use crate::model::error::{Error, Result};
use crate::os::clock;
use crate::os::kill::kill_point;
use crate::os::log::{self, Throttle};
use crate::transport::socket::{PeerSocket, PlainMessage};
use crate::transport::socket_file::SocketFile;
use crate::transport::{
    Allotment, Budget, Deadline, PeerCredentials, TimedMutex, descriptor_limit, greediest, socket,
};
use crate::wire::BrokerAddress;

/// Maximum time for which a process may stay connected without sending hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of connections that have not sent hello.
const MAX_PENDING: usize = 64;

/// The channels that this process has accepted, with up to five descriptors each, and connections that have not sent hello. A
/// channel counts until its guard is dropped and its peer has opened or discarded what was sent.
static CHANNELS: Budget = Budget::new("channels", || (descriptor_limit() / 8).max(8));

/// Maximum number of connections accepted before received hellos are answered.
const MAX_ACCEPTS: usize = 16;

/// Maximum number of times that one call accepts connections without success.
const MAX_TURNS: usize = 16;

/// Maximum time for which a call that does not wait waits for another thread's call.
const MAX_CONTENTION: Duration = Duration::from_millis(10);

/// A Unix socket that listens at the address of a name.
#[derive(Debug)]
pub(super) struct LocalListening {
    address: BrokerAddress,
    listening: ListeningSocket,
    file: Option<SocketFile>,
    /// Whether another process has the socket, and its file.
    is_handed_over: AtomicBool,
    /// The listening socket, and the connections that have not sent hello.
    readiness: PollSet,
    pending: TimedMutex<Pending>,
}

/// The connections that have not sent hello.
type Pending = Vec<PendingConnection>;

#[derive(Debug)]
struct PendingConnection {
    socket: PeerSocket,
    credentials: PeerCredentials,
    allotment: Allotment,
    until: Instant,
}

impl LocalListening {
    /// Listens at the address of a name, which is free, or takes the socket over from the peer of a channel.
    pub(super) fn start(end: &LocalEnd, name: &str, former: Option<&Channel>) -> Result<Self> {
        let readiness = PollSet::new().map_err(|error| Error::io("creating an epoll instance", error))?;
        let uid = rustix::process::geteuid().as_raw();
        let address = name::address(name, uid, end.ipc.socket_directory().as_deref())?;
        let (listening, file) = match former {
            None => name::listen(name, &address)?,
            Some(channel) => {
                let deadline = Deadline::after(end.ipc.timeout());
                name::take_over(&address, channel.take_file(deadline)?)?
            }
        };
        readiness.add(listening.socket.fd()).map_err(watching)?;
        let (is_handed_over, pending) = (AtomicBool::new(false), TimedMutex::new(Vec::new()));
        Ok(Self { address, listening, file, is_handed_over, readiness, pending })
    }

    pub(super) const fn address(&self) -> &BrokerAddress {
        &self.address
    }

    /// Accepts the next process. `None` after the deadline.
    pub(super) fn accept(&self, end: &LocalEnd, deadline: Deadline) -> Result<Option<Channel>> {
        let Some(mut pending) = self.pending.lock(deadline) else { return Ok(None) };
        loop {
            let accepted = self.accept_now(end, &mut pending)?;
            if accepted.is_some() || !self.wait(&pending, deadline)? {
                return Ok(accepted);
            }
        }
    }

    /// Accepts the next process if one has connected and sent hello.
    pub(super) fn try_accept(&self, end: &LocalEnd) -> Result<Option<Channel>> {
        match self.pending.lock(Deadline::after(MAX_CONTENTION)) {
            Some(mut pending) => self.accept_now(end, &mut pending),
            None => Ok(None),
        }
    }

    /// Returns the time at which the first connection without a hello is removed.
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        let pending = self.pending.lock(Deadline::after(MAX_CONTENTION))?;
        pending.iter().map(|one| one.until).min()
    }

    /// Hands the socket over to the peer of a channel.
    pub(super) fn hand_over(&self, channel: &Channel) -> Result<()> {
        channel.send_file(self.listening.socket.fd())?;
        self.is_handed_over.store(true, Ordering::Release);
        if let Some(file) = &self.file {
            file.leave();
        }
        Ok(())
    }

    /// Listens again after the socket was handed over.
    pub(super) fn take_back(&mut self, name: &str) -> Result<()> {
        if self.file.as_ref().is_none_or(SocketFile::is_in_place) {
            self.file = self.listening.become_listener(&self.address)?;
        } else {
            let (listening, file) = name::listen(name, &self.address)?;
            self.readiness.add(listening.socket.fd()).map_err(watching)?;
            self.readiness.remove(self.listening.socket.fd());
            (self.listening, self.file) = (listening, file);
        }
        self.is_handed_over.store(false, Ordering::Release);
        Ok(())
    }

    /// Removes the file of the socket, unless another process has it.
    pub(super) fn remove_file(&self) {
        if let Some(file) = self.file.as_ref().filter(|_| !self.is_handed_over.load(Ordering::Acquire)) {
            file.remove();
        }
    }

    fn accept_now(&self, end: &LocalEnd, pending: &mut Pending) -> Result<Option<Channel>> {
        let now = clock::now();
        while let Some(index) = pending.iter().position(|one| one.until <= now) {
            drop(self.take_pending(pending, index));
        }
        // Processes that connect all the time do not keep the thread here.
        for _ in 0..MAX_TURNS {
            let has_more = self.accept_pending(end, pending)?;
            while let Some(index) = pending.iter().position(PendingConnection::is_readable) {
                let one = self.take_pending(pending, index);
                let peer = one.credentials;
                match one.answer_hello(end) {
                    Ok(Some(channel)) => return Ok(Some(channel)),
                    Ok(None) => {}
                    Err(error) => refused(error, format_args!("process {} of uid {}", peer.pid, peer.uid))?,
                }
            }
            if !has_more {
                break;
            }
        }
        Ok(None)
    }

    /// Takes a pending connection out of the listener's descriptor, also because another thread may close its socket later.
    fn take_pending(&self, pending: &mut Pending, index: usize) -> PendingConnection {
        let one = pending.remove(index);
        self.readiness.remove(one.socket.fd());
        one
    }

    /// Accepts at most [`MAX_ACCEPTS`] connections, because further ones may arrive all the time. Returns whether there may be more.
    fn accept_pending(&self, end: &LocalEnd, pending: &mut Pending) -> Result<bool> {
        for _ in 0..MAX_ACCEPTS {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = match rustix::net::accept_with(self.listening.socket.fd(), flags) {
                Ok(accepted) => PeerSocket::new(accepted, !self.listening.refuses_fds),
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(error) => {
                    return Err(Error::io(format!("accepting a channel at {}", self.address), error));
                }
            };
            kill_point!("acceptor:channel-accepted");
            let credentials = socket::peer_credentials(socket.owned())
                .map_err(|error| Error::io("reading the credentials of a connecting process", error))?;
            if !end.ipc.allow_list().permits(&credentials) {
                let greeting = Greeting::NotAllowed { uid: credentials.uid };
                refuse(&socket, &credentials, "this user is not allowed", &greeting)?;
                continue;
            }
            if pending.len() >= MAX_PENDING {
                let peers: Vec<_> =
                    pending.iter().map(|one| (one.credentials.uid, one.credentials.pid)).collect();
                drop(self.take_pending(pending, greediest(&peers).unwrap_or(0)));
            }
            let allotment = match CHANNELS.take(&credentials) {
                Ok(allotment) => allotment,
                Err(why) => {
                    refuse(&socket, &credentials, &why, &Greeting::TooManyChannels)?;
                    continue;
                }
            };
            let until = clock::now() + HELLO_TIMEOUT;
            self.readiness.add(socket.fd()).map_err(watching)?;
            pending.push(PendingConnection { socket, credentials, allotment, until });
        }
        Ok(true)
    }

    /// Waits for a new connection or a hello. Returns `false` after the deadline.
    fn wait(&self, pending: &Pending, deadline: Deadline) -> Result<bool> {
        if deadline.left().is_zero() {
            return Ok(false);
        }
        let next = pending.iter().map(|one| one.until).min();
        let until = next.map_or(deadline.at, |next| next.min(deadline.at));
        let waited = socket::wait_until(self.readiness.as_fd(), PollFlags::IN, until);
        waited.map(|_| true).map_err(|error| Error::io("waiting for a channel", error))
    }
}

impl AsFd for LocalListening {
    /// Returns a descriptor that is readable while there is something to accept or to refuse.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readiness.as_fd()
    }
}

impl PendingConnection {
    fn is_readable(&self) -> bool {
        socket::wait_until(self.socket.fd(), PollFlags::IN, clock::now()).unwrap_or(true)
    }

    /// Answers the hello. `None` if the process has closed the connection without one, to query the listener's identity.
    fn answer_hello(mut self, end: &LocalEnd) -> Result<Option<Channel>> {
        let mut buffer = Vec::new();
        let hello = match self.socket.take_plain(&mut buffer) {
            Ok(PlainMessage::Bytes(len)) => &buffer[..len],
            Ok(PlainMessage::WithDescriptors) => {
                return Err(Error::Protocol("its first packet contains file descriptors".into()));
            }
            Ok(PlainMessage::Closed) | Err(_) => return Ok(None),
        };
        // A peer of another protocol version learns this version from the answer.
        let answer = Greeting::Hello(end.hello.clone()).encode()?;
        let peer = match Greeting::decode(hello) {
            Ok(Greeting::Hello(peer)) => peer,
            Ok(Greeting::NotAllowed { .. } | Greeting::TooManyChannels) => {
                return Err(Error::Protocol("its first packet is not a hello".into()));
            }
            Err(error) => {
                let _ = socket::send(self.socket.fd(), &answer, &[]);
                return Err(error);
            }
        };
        check_identity(&peer, &end.hello.process, &self.credentials)?;
        // A message that is too long for a packet is sent in a memory file.
        self.socket.accept_fds();
        let (link, files) = ChannelLink::create(self.socket)?;
        let sent = socket::send(link.messages.fd(), &answer, &[files.page.as_fd(), files.wakes.as_fd()]);
        let maps = end.hello.agree_with(&peer)?;
        if sent.is_err() {
            return Ok(None);
        }
        kill_point!("acceptor:channel-welcomed");
        let (pid, allotment) = (self.credentials.pid, Some(self.allotment));
        let agreement = Agreement { own: end.clone(), peer, pid, maps, link, relay: None, allotment };
        ChannelConnection::begin(agreement).map(Channel::new).map(Some)
    }
}

fn watching(error: Errno) -> Error {
    Error::io("watching the socket of a channel", error)
}

/// Refuses a connection: the greeting states the reason to its process.
fn refuse(socket: &PeerSocket, peer: &PeerCredentials, why: &str, refusal: &Greeting) -> Result<()> {
    static WARNINGS: Throttle = Throttle::new();
    if let Some(count) = WARNINGS.count() {
        tracing::warn!(target: log::CHANNEL, pid = peer.pid, uid = peer.uid, why, count, "refusing a channel");
    }
    let _ = socket::send(socket.fd(), &refusal.encode()?, &[]);
    Ok(())
}
