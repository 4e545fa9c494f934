//! The listening end.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::builder::{ChannelBuilder, LocalEnd};
use super::connection::{Agreement, Connection};
use super::handshake::{Greeting, check_identity};
use super::name::{self, ListeningSocket};
use super::readiness::PollSet;
use super::tcp::TcpListening;
use super::{Channel, tcp};
use crate::model::error::{Error, Result};
use crate::os::clock;
use crate::os::kill::kill_point;
use crate::os::log::{self, Throttle};
use crate::sharing::Session;
use crate::sharing::timeline::{Side, WordPage};
use crate::sharing::{Runtime, RuntimeRef};
use crate::transport::check_may_wait;
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

/// A builder for [`Listener`]s; see [`Ipc::listen`](crate::Ipc::listen).
///
/// # Examples
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let ipc = device_ipc_core::Ipc::with_backend(device_ipc_mock::MockBackend::from_spec("devices=2")?);
/// use device_ipc_core::DeviceMap;
///
/// // Memory on device 0 of this process is opened on device 1 of the peer.
/// let map = DeviceMap::new().insert(0, 1)?;
/// let listener = ipc.listen("example-builder").device_map(map).message_limit(1 << 20).start()?;
/// assert_eq!(listener.name(), "example-builder");
/// # Ok(())
/// # }
/// ```
pub type ListenBuilder<'a> = ChannelBuilder<'a, Listen>;

/// The options of a listening end.
#[derive(Debug)]
pub struct Listen(());

impl<'a> ListenBuilder<'a> {
    pub(crate) const fn new(ipc: &'a Session, name: &'a str) -> Self {
        Self::of(ipc, name, Listen(()))
    }

    /// Starts to listen.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidChannelName`]; [`Error::ChannelNameInUse`], which names the process that listens;
    /// [`Error::InvalidDeviceMap`] for a map from a device that this process does not see; [`Error::Forked`]. Of
    /// [`Ipc::listen_tcp`](crate::Ipc::listen_tcp) also [`Error::Io`] for an address that is not one of this host, or is in use.
    pub fn start(self) -> Result<Listener> {
        self.begin(None)
    }

    /// Takes over the name from the process at the other end of a channel, which hands it over by [`Listener::hand_over`].
    ///
    /// The name is never free, so that no other process can take it. Waits until the listening socket has arrived, for at most
    /// the timeout of the [`Ipc`](crate::Ipc). Connections that the former listener has not accepted are closed; their
    /// [`ConnectBuilder::start`](crate::ConnectBuilder::start) connects again.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]; [`Error::ChannelClosed`], [`Error::PeerGone`]; [`Error::Io`] if the socket is that of another name or
    /// directory; [`Error::Protocol`] if the process sends a message instead; [`Error::InvalidChannelName`]; [`Error::Forked`].
    pub fn take_over(self, channel: &Channel) -> Result<Listener> {
        check_may_wait("taking a listener over", self.ipc.patience())?;
        self.begin(Some(channel))
    }

    fn begin(self, former: Option<&Channel>) -> Result<Listener> {
        let runtime = Runtime::get()?;
        let own = self.local_end(runtime)?;
        let watched = |error: Errno| Error::io("creating an epoll instance", error);
        let readiness = PollSet::new().map_err(watched)?;
        let source = match self.key {
            None => {
                let directory = self.ipc.socket_directory();
                let uid = rustix::process::geteuid().as_raw();
                let address = name::address(self.name, uid, directory.as_deref())?;
                let (listening, file) = match former {
                    None => name::listen(self.name, &address)?,
                    Some(channel) => {
                        let deadline = Deadline::after(self.ipc.patience());
                        name::take_over(&address, channel.connection().take_socket(deadline)?)?
                    }
                };
                readiness.add(listening.socket.fd()).map_err(watched)?;
                Source::Local { address, listening, file, is_handed_over: AtomicBool::new(false) }
            }
            Some(key) => {
                let listening = TcpListening::start(self.name, key.clone())?;
                readiness.add(listening.as_fd()).map_err(watched)?;
                Source::Network(listening)
            }
        };
        Ok(Listener {
            name: self.name.to_owned(),
            own,
            readiness,
            source,
            pending: TimedMutex::new(Vec::new()),
            runtime: runtime.for_guard(),
        })
    }
}

/// A listener that accepts [`Channel`]s from other processes of this machine under a name, or of other hosts at an address.
///
/// Dropping it frees the name or the address; accepted channels stay open.
///
/// # Examples
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let ipc = device_ipc_core::Ipc::with_backend(device_ipc_mock::MockBackend::from_spec("devices=1")?);
/// use std::time::Duration;
///
/// let listener = ipc.listen("example-listener").start()?;
/// # let peer = ipc.clone();
/// # let connecting = std::thread::spawn(move || peer.connect("example-listener").start());
/// let channel = listener.accept(Duration::from_secs(10))?;
/// println!("process {} ({}) has connected", channel.peer().pid, channel.program());
/// # drop(connecting.join());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Listener {
    name: String,
    own: LocalEnd,
    /// The listening socket, and the connections that have not sent hello.
    readiness: PollSet,
    source: Source,
    /// The connections that have not sent hello.
    pending: TimedMutex<Vec<PendingConnection>>,
    runtime: RuntimeRef,
}

/// The origin of connections.
#[derive(Debug)]
enum Source {
    /// A Unix socket.
    Local {
        address: BrokerAddress,
        listening: ListeningSocket,
        file: Option<SocketFile>,
        /// Whether another process has the socket, and its file.
        is_handed_over: AtomicBool,
    },
    /// A TCP socket.
    Network(TcpListening),
}

/// A connection that has not sent hello.
#[derive(Debug)]
struct PendingConnection {
    socket: PeerSocket,
    credentials: PeerCredentials,
    allotment: Allotment,
    until: Instant,
}

impl Listener {
    /// Returns the name, or the address that was passed to [`Ipc::listen_tcp`](crate::Ipc::listen_tcp).
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the socket address, for messages to users; of a listener for other hosts, the address with its port, to which
    /// they connect.
    pub fn address(&self) -> String {
        match &self.source {
            Source::Local { address, .. } => address.to_string(),
            Source::Network(listening) => listening.address().to_string(),
        }
    }

    /// Accepts the next process that connects.
    ///
    /// A process that connects without sending hello does not delay others, and is disconnected after 5 s. A process of a
    /// user who is not [allowed](crate::IpcBuilder::allow) is refused.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]; [`Error::OnWorkerThread`] in a callback; [`Error::Io`], for example if this process has no file
    /// descriptors left, after which a later call may succeed. A process with another protocol version, an invalid hello, another
    /// backend or a device map that does not match is refused and logged, and receives the reason: it is no error of this call.
    pub fn accept(&self, timeout: Duration) -> Result<Channel> {
        self.runtime.check()?;
        check_may_wait("accepting a channel", timeout)?;
        let deadline = Deadline::after(timeout);
        let pending = self.pending.lock(deadline);
        let mut pending = pending.ok_or_else(|| self.timed_out(deadline))?;
        loop {
            if let Some(channel) = self.accept_now(&mut pending)? {
                return Ok(channel);
            }
            if !self.wait(&pending, deadline)? {
                return Err(self.timed_out(deadline));
            }
        }
    }

    /// Accepts the next process if one has connected and sent hello, and else returns `None`.
    ///
    /// The listener's descriptor ([`AsFd`]) is readable while there is something to accept or to refuse; call this method until
    /// it returns `None`. While another thread waits in [`accept`](Self::accept), that thread accepts.
    ///
    /// # Errors
    ///
    /// As [`accept`](Self::accept), except for the timeout.
    pub fn try_accept(&self) -> Result<Option<Channel>> {
        self.runtime.check()?;
        match self.pending.lock(Deadline::after(MAX_CONTENTION)) {
            Some(mut pending) => self.accept_now(&mut pending),
            None => Ok(None),
        }
    }

    /// Hands the name over to the process at the other end of a channel, which takes it by [`ListenBuilder::take_over`].
    ///
    /// Both processes have the listening socket then: this one accepts no further channel, and drops the listener when the other
    /// process has confirmed, or [takes the name back](Self::take_back). The name is never free meanwhile, and dropping the
    /// listener does not free it.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the socket cannot be sent, or the listener or the channel is one of another host;
    /// [`Error::ChannelClosed`], [`Error::PeerGone`]; [`Error::Forked`].
    pub fn hand_over(&self, channel: &Channel) -> Result<()> {
        self.runtime.check()?;
        let Source::Local { listening, file, is_handed_over, .. } = &self.source else {
            return Err(Error::io("handing a TCP listener over", Errno::OPNOTSUPP));
        };
        channel.connection().send_socket(listening.socket.fd())?;
        is_handed_over.store(true, Ordering::Release);
        if let Some(file) = file {
            file.leave();
        }
        Ok(())
    }

    /// Accepts channels again because the process that the name was handed over to has not taken it, or has terminated.
    ///
    /// # Errors
    ///
    /// [`Error::ChannelNameInUse`] if the other process has removed the socket's file and a third one listens there; a later call
    /// tries again. [`Error::Io`]; [`Error::Forked`].
    pub fn take_back(&mut self) -> Result<()> {
        self.runtime.check()?;
        let Source::Local { address, listening, file, is_handed_over } = &mut self.source else {
            return Ok(());
        };
        if file.as_ref().is_none_or(SocketFile::is_in_place) {
            *file = listening.become_listener(address)?;
        } else {
            let again = name::listen(&self.name, address)?;
            let watched = |error: Errno| Error::io("watching a socket", error);
            self.readiness.add(again.0.socket.fd()).map_err(watched)?;
            self.readiness.remove(listening.socket.fd());
            (*listening, *file) = again;
        }
        is_handed_over.store(false, Ordering::Release);
        Ok(())
    }

    /// Accepts the next process if one has connected and sent hello.
    fn accept_now(&self, pending: &mut Vec<PendingConnection>) -> Result<Option<Channel>> {
        let listening = match &self.source {
            Source::Local { listening, .. } => listening,
            Source::Network(listening) => {
                while let Some(greeted) = listening.take() {
                    let peer = greeted.address();
                    match tcp::accept(greeted, &self.own) {
                        Ok(Some(channel)) => return Ok(Some(channel)),
                        Ok(None) => {}
                        Err(error) => refused(error, format_args!("the process at {peer}"))?,
                    }
                }
                return Ok(None);
            }
        };
        let now = clock::now();
        while let Some(index) = pending.iter().position(|one| one.until <= now) {
            drop(self.take_pending(pending, index));
        }
        // Processes that connect all the time do not keep the thread here.
        for _ in 0..MAX_TURNS {
            let has_more = self.accept_pending(listening, pending)?;
            while let Some(index) = pending.iter().position(PendingConnection::is_readable) {
                let one = self.take_pending(pending, index);
                let peer = one.credentials;
                match self.answer_hello(one) {
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
    fn take_pending(&self, pending: &mut Vec<PendingConnection>, index: usize) -> PendingConnection {
        let one = pending.remove(index);
        self.readiness.remove(one.socket.fd());
        one
    }

    fn timed_out(&self, deadline: Deadline) -> Error {
        let detail = format!("; no process has connected to {:?} at {}", self.name, self.address());
        deadline.passed("the accepting of a channel", &detail)
    }

    /// Accepts at most [`MAX_ACCEPTS`] connections, because further ones may arrive all the time. Returns whether there may be more.
    fn accept_pending(
        &self,
        listening: &ListeningSocket,
        pending: &mut Vec<PendingConnection>,
    ) -> Result<bool> {
        for _ in 0..MAX_ACCEPTS {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let accepted = match rustix::net::accept_with(listening.socket.fd(), flags) {
                Ok(accepted) => PeerSocket::new(accepted, !listening.refuses_fds),
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(error) => {
                    return Err(Error::io(format!("accepting a channel at {}", self.address()), error));
                }
            };
            kill_point!("acceptor:channel-accepted");
            let credentials = socket::peer_credentials(accepted.owned())
                .map_err(|error| Error::io("reading the credentials of a connecting process", error))?;
            if !self.own.ipc.allow_list().permits(&credentials) {
                refuse(
                    &accepted,
                    &credentials,
                    "this user is not allowed",
                    &Greeting::NotAllowed { uid: credentials.uid },
                )?;
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
                    refuse(&accepted, &credentials, &why, &Greeting::TooManyChannels)?;
                    continue;
                }
            };
            let until = clock::now() + HELLO_TIMEOUT;
            self.readiness
                .add(accepted.fd())
                .map_err(|error| Error::io("watching a connecting process", error))?;
            pending.push(PendingConnection { socket: accepted, credentials, allotment, until });
        }
        Ok(true)
    }

    /// Waits for a new connection or a hello. Returns `false` after the deadline.
    fn wait(&self, pending: &[PendingConnection], deadline: Deadline) -> Result<bool> {
        if deadline.left().is_zero() {
            return Ok(false);
        }
        let next = pending.iter().map(|one| one.until).min();
        let until = next.map_or(deadline.at, |next| next.min(deadline.at));
        let waited = socket::wait_until(self.readiness.as_fd(), PollFlags::IN, until);
        waited.map(|_| true).map_err(|error| Error::io("waiting for a channel", error))
    }

    /// Answers a hello. `None` if the process has closed the connection without one, to query the listener's identity.
    fn answer_hello(&self, mut pending: PendingConnection) -> Result<Option<Channel>> {
        let mut buffer = Vec::new();
        let hello = match pending.socket.take_plain(&mut buffer) {
            Ok(PlainMessage::Bytes(len)) => &buffer[..len],
            Ok(PlainMessage::WithDescriptors) => {
                return Err(Error::Protocol("its first packet contains file descriptors".into()));
            }
            Ok(PlainMessage::Closed) | Err(_) => return Ok(None),
        };
        let runtime = self.runtime.check()?;
        let own = self.own.clone();
        // A peer of another protocol version learns this version from the answer.
        let answer = Greeting::Hello(own.hello.clone()).encode()?;
        let peer = match Greeting::decode(hello) {
            Ok(Greeting::Hello(peer)) => peer,
            Ok(Greeting::NotAllowed { .. } | Greeting::TooManyChannels) => {
                return Err(Error::Protocol("its first packet is not a hello".into()));
            }
            Err(error) => {
                let _ = socket::send(pending.socket.fd(), &answer, &[]);
                return Err(error);
            }
        };
        check_identity(&peer, &runtime.identity, &pending.credentials)?;
        // A message that is too long for a packet is sent in a memory file.
        pending.socket.accept_fds();
        let (page, file) = WordPage::create()?;
        let (control, peers) =
            socket::pair().map_err(|error| Error::io("creating a pair of sockets", error))?;
        let sent = socket::send(pending.socket.fd(), &answer, &[file.as_fd(), peers.as_fd()]);
        let maps = own.hello.agree_with(&peer)?;
        if sent.is_err() {
            return Ok(None);
        }
        kill_point!("acceptor:channel-welcomed");
        let control = PeerSocket::new(control, true);
        let agreement = Agreement {
            own,
            peer,
            maps,
            page,
            side: Side::Exporter,
            control,
            relay: None,
            allotment: Some(pending.allotment),
        };
        let connection = Connection::begin(pending.socket, pending.credentials.pid, agreement)?;
        Ok(Some(Channel::new(connection)))
    }
}

impl AsFd for Listener {
    /// Returns a descriptor that is readable while [`try_accept`](Self::try_accept) has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readiness.as_fd()
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
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

/// Logs that a connection was refused if its peer is the reason, and else returns the error.
fn refused(error: Error, peer: std::fmt::Arguments<'_>) -> Result<()> {
    if !matches!(error, Error::Protocol(_) | Error::WrongBackend { .. } | Error::InvalidDeviceMap(_))
        && !error.is_gone()
    {
        return Err(error);
    }
    static WARNINGS: Throttle = Throttle::new();
    if let Some(count) = WARNINGS.count() {
        tracing::warn!(target: log::CHANNEL, %peer, %error, count, "a process that connected was not accepted as a channel");
    }
    Ok(())
}

impl PendingConnection {
    fn is_readable(&self) -> bool {
        socket::wait_until(self.socket.fd(), PollFlags::IN, clock::now()).unwrap_or(true)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Source::Local { file: Some(file), is_handed_over, .. } = &self.source
            && !is_handed_over.load(Ordering::Acquire)
            && self.runtime.is_here()
        {
            file.remove();
        }
    }
}
