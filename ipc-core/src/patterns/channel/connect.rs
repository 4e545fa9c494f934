//! The connecting end.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::builder::{ChannelBuilder, LocalEnd, RETRY};
use super::connection::{Agreement, ChannelConnection};
use super::handshake::{Greeting, check_identity};
use super::link::{ChannelLink, PeerFiles};
use super::{Channel, name, tcp};
use crate::model::error::{Error, Remedy, Result};
use crate::os::clock;
use crate::os::kill::kill_point;
use crate::sharing::Ipc;
use crate::transport::socket::{Packet, PeerSocket, peer_credentials};
use crate::transport::{Deadline, PeerCredentials, UserName, socket};
use crate::wire::{BrokerAddress, SOCKET_DIR_VARIABLE};

/// A builder for the connecting end of a [`Channel`]; see [`Ipc::connect`](crate::Ipc::connect).
///
/// # Examples
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let ipc = device_ipc_core::Ipc::with_backend(device_ipc_mock::MockBackend::from_spec("devices=1")?);
/// use std::time::Duration;
///
/// # let listener = ipc.listen("example-connect").start()?;
/// # let accepting = std::thread::spawn(move || listener.accept(Duration::from_secs(10)));
/// let channel = ipc.connect("example-connect").timeout(Duration::from_secs(10)).start()?;
/// assert_eq!(channel.message_limit(), 64 << 20);
/// # drop(accepting.join());
/// # Ok(())
/// # }
/// ```
pub type ConnectBuilder<'a> = ChannelBuilder<'a, Connect>;

/// The options of a connecting end.
#[derive(Debug)]
pub struct Connect {
    timeout: Duration,
    user: Option<u32>,
    /// Whether a listener has to exist now.
    exists: bool,
}

impl<'a> ConnectBuilder<'a> {
    pub(crate) const fn new(ipc: &'a Ipc, name: &'a str, timeout: Duration) -> Self {
        Self::of(ipc, name, Connect { timeout, user: None, exists: false })
    }

    /// Fails at once with [`Error::NoListener`] if there is no listener now: for one whose name says that it was started.
    ///
    /// Without effect for another host.
    pub const fn existing(mut self) -> Self {
        self.end.exists = true;
        self
    }

    /// Sets the timeout for a listener to exist and accept, by default the timeout of the [`Ipc`](crate::Ipc).
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.end.timeout = timeout;
        self
    }

    /// Sets the user of the listener's process, by default the user of this process.
    ///
    /// Another user must be allowed with [`IpcBuilder::allow`](crate::IpcBuilder::allow). Without effect for another host, whose
    /// users this host does not know.
    pub const fn user(mut self, uid: u32) -> Self {
        self.end.user = Some(uid);
        self
    }

    /// Connects and waits until the listener has accepted.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidInput`]; [`Error::NoListener`]; [`Error::Timeout`] if a listener exists but does not
    /// accept; [`Error::NotPermitted`] if the listener belongs to another user, or does not allow this user;
    /// [`Error::InvalidDeviceMap`]; [`Error::WrongBackend`]; [`Error::Protocol`] for another protocol version;
    /// [`Error::Forked`]. Of [`Ipc::connect_tcp`](crate::Ipc::connect_tcp) also [`Error::NotPermitted`] if the two processes
    /// have different keys, and [`Error::Io`] for an invalid address.
    pub fn start(self) -> Result<Channel> {
        if let Some(key) = self.key {
            let own = self.local_end()?;
            return tcp::connect(&own, self.name, key, self.end.timeout);
        }
        let (own, address) = self.target()?;
        let deadline = Deadline::after(self.end.timeout);
        let begun = clock::now();
        loop {
            if let Some(connecting) = self.begin(&own, &address)? {
                // A listener that closes before it accepts may be followed by another one.
                if let Some(channel) = connecting.wait(deadline)? {
                    return Ok(channel);
                }
            }
            let left = deadline.left();
            if left.is_zero() {
                return Err(no_listener(self.name, &address, self.end.timeout));
            }
            clock::sleep(RETRY.interval(clock::elapsed(begun)).min(left));
        }
    }

    /// Begins to connect, and does not wait: for event loops, which wait for the [`Connecting`] meanwhile. The
    /// [`timeout`](Self::timeout) has no effect.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start), except [`Error::Timeout`]. [`Error::NoListener`] if there is no listener now, or too many
    /// processes connect to it: the start of a listener can be awaited only by trying again. [`Error::Unsupported`] for
    /// [`Ipc::connect_tcp`](crate::Ipc::connect_tcp): call [`start`](Self::start) on a thread.
    pub fn try_start(self) -> Result<Connecting> {
        if self.key.is_some() {
            return Err(Error::Unsupported {
                backend: self.ipc.backend().info().name,
                what: format!("connect to {} without waiting", self.name),
                why: format!("the handshake by TCP waits; {}", Remedy::ConnectOnThread),
            });
        }
        let (own, address) = self.target()?;
        self.begin(&own, &address)?.ok_or_else(|| no_listener(self.name, &address, Duration::ZERO))
    }

    /// Returns the description of this process, and the address of the listener.
    fn target(&self) -> Result<(LocalEnd, BrokerAddress)> {
        let own = self.local_end()?;
        let uid = self.end.user.unwrap_or_else(|| rustix::process::geteuid().as_raw());
        let address = name::address(self.name, uid, self.ipc.socket_directory().as_deref())?;
        Ok((own, address))
    }

    /// Returns a connected socket, or `None` if there is no listener or its queue is full.
    fn try_connect(&self, address: &BrokerAddress) -> Result<Option<PeerSocket>> {
        let socket = socket::new_socket().map_err(|error| Error::io("creating a socket", error))?;
        loop {
            return match rustix::net::connect(&socket, &address.to_socket_address()?) {
                Ok(()) => Ok(Some(PeerSocket::new(socket, true))),
                Err(Errno::INTR) => continue,
                Err(Errno::CONNREFUSED | Errno::NOENT) if self.end.exists => {
                    Err(no_listener(self.name, address, Duration::ZERO))
                }
                Err(Errno::AGAIN | Errno::CONNREFUSED | Errno::NOENT) => Ok(None),
                Err(error) => Err(Error::io(format!("connecting to {:?} at {address}", self.name), error)),
            };
        }
    }

    /// Connects to a listener and says hello. `None` if there is none, or its queue is full.
    fn begin(&self, own: &LocalEnd, address: &BrokerAddress) -> Result<Option<Connecting>> {
        let Some(socket) = self.try_connect(address)? else { return Ok(None) };
        kill_point!("connector:channel-connected");
        let credentials = peer_credentials(socket.owned()).map_err(|error| {
            Error::io(format!("reading the credentials of the listener at {address}"), error)
        })?;
        if !self.ipc.allow_list().permits(&credentials) {
            return Err(Error::NotPermitted(format!(
                "the listener at {address} belongs to {} (process {}), not to the user of this process; {}",
                UserName(credentials.uid),
                credentials.pid,
                Remedy::AllowUserHere
            )));
        }
        let hello = Greeting::Hello(own.hello.clone()).encode()?;
        match socket::send(socket.fd(), &hello, &[]) {
            // A listener that refuses this process has sent its refusal before it closed.
            Ok(()) | Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {}
            Err(error) => return Err(Error::io(format!("sending hello to {:?}", self.name), error)),
        }
        kill_point!("connector:channel-said-hello");
        Ok(Some(Connecting {
            name: self.name.to_owned(),
            address: address.clone(),
            own: own.clone(),
            listener: credentials,
            socket,
        }))
    }
}

/// A connection that a listener has not accepted yet; see [`ConnectBuilder::try_start`].
///
/// The descriptor ([`AsFd`]) is readable when [`try_finish`](Self::try_finish) has a result. Dropping it abandons the
/// connection.
///
/// # Examples
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let ipc = device_ipc_core::Ipc::with_backend(device_ipc_mock::MockBackend::from_spec("devices=1")?);
/// let listener = ipc.listen("example-try-start").start()?;
/// let connecting = ipc.connect("example-try-start").try_start()?;
/// let connecting = connecting.try_finish()?.expect_err("the listener has not accepted yet");
/// // An event loop waits until the descriptor of `connecting` is readable.
/// # let accepted = listener.accept(std::time::Duration::from_secs(10))?;
/// let channel = connecting.try_finish()?.expect("the listener has accepted");
/// # drop(accepted);
/// # drop(channel);
/// # Ok(())
/// # }
/// ```
#[must_use = "the channel is that of Connecting::try_finish"]
pub struct Connecting {
    name: String,
    address: BrokerAddress,
    own: LocalEnd,
    listener: PeerCredentials,
    socket: PeerSocket,
}

impl Connecting {
    /// Returns the channel if the listener has accepted it, and else this connection again. Does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::NoListener`] if the listener was closed; the errors of [`ConnectBuilder::start`], except [`Error::Timeout`].
    pub fn try_finish(self) -> Result<Result<Channel, Self>> {
        self.own.runtime.check()?;
        match receive_now(&self.socket)? {
            Answer::Nothing => Ok(Err(self)),
            Answer::Closed => Err(no_listener(&self.name, &self.address, Duration::ZERO)),
            Answer::Packet(packet) => self.finish(packet).map(Ok),
        }
    }

    /// Waits for the listener's answer. `None` if it has closed the connection.
    fn wait(self, deadline: Deadline) -> Result<Option<Channel>> {
        loop {
            match receive_now(&self.socket)? {
                Answer::Packet(packet) => return self.finish(packet).map(Some),
                Answer::Closed => return Ok(None),
                Answer::Nothing => {
                    let waited = socket::wait_until(self.socket.fd(), PollFlags::IN, deadline.at);
                    if !waited.map_err(|error| Error::io("waiting for the listener", error))? {
                        let detail =
                            format!("; process {} listens but has not called accept", self.listener.pid);
                        return Err(deadline.passed("the accepting of the channel", &detail));
                    }
                }
            }
        }
    }

    /// Makes the channel of the listener's answer.
    fn finish(self, packet: Packet) -> Result<Channel> {
        let peer = match Greeting::decode(&packet.bytes)? {
            Greeting::Hello(peer) => peer,
            Greeting::NotAllowed { uid } => {
                return Err(Error::NotPermitted(format!(
                    "process {}, which listens as {:?}, does not allow {}; {}",
                    self.listener.pid,
                    self.name,
                    UserName(uid),
                    Remedy::AllowUser
                )));
            }
            Greeting::TooManyChannels => {
                return Err(Error::QuotaExceeded(format!(
                    "process {}, which listens as {:?}, accepts no further channel of this process or its user; close channels, \
                     or open or discard the memory that was received by closed ones (channels count against the listener's \
                     limit of open files, ulimit -n)",
                    self.listener.pid, self.name,
                )));
            }
        };
        check_identity(&peer, &self.own.runtime.check()?.identity, &self.listener)?;
        let maps = self.own.hello.agree_with(&peer)?;
        let sent = packet.fds.len();
        let fds: Result<[OwnedFd; 2], _> = packet.fds.take().try_into();
        let Ok([page, wakes]) = fds else {
            return Err(Error::Protocol(format!(
                "its hello contained {sent} file descriptors instead of 2; this process may have reached its limit of open files \
                 (ulimit -n)"
            )));
        };
        let link = ChannelLink::open(self.socket, PeerFiles { page, wakes })?;
        kill_point!("connector:channel-welcomed");
        let (own, pid) = (self.own, self.listener.pid);
        let agreement = Agreement { own, peer, pid, maps, link, relay: None, allotment: None };
        ChannelConnection::begin(agreement).map(Channel::new)
    }
}

impl AsFd for Connecting {
    /// Returns a descriptor that is readable when [`try_finish`](Self::try_finish) has a result; that of the connection. Nothing
    /// may read from it or write to it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.fd()
    }
}

impl AsRawFd for Connecting {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl fmt::Debug for Connecting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connecting").field("name", &self.name).finish_non_exhaustive()
    }
}

fn no_listener(name: &str, address: &BrokerAddress, after: Duration) -> Error {
    let detail = match address {
        BrokerAddress::Path(path) if path.parent().is_some_and(|directory| !directory.is_dir()) => {
            format!("the directory of {address} does not exist; mount it at the same path in this process")
        }
        BrokerAddress::Path(_) => format!(
            "tried {address}; a listener without {SOCKET_DIR_VARIABLE}, of another user or with another name has another \
             address"
        ),
        BrokerAddress::Abstract(_) => format!(
            "tried {address}; a listener with {SOCKET_DIR_VARIABLE}, of another user, in another network namespace or with \
             another name has another address"
        ),
    };
    Error::NoListener { name: name.to_owned(), after, detail }
}

/// The answer of a listener.
enum Answer {
    Packet(Packet),
    /// It has closed the connection.
    Closed,
    /// None yet.
    Nothing,
}

fn receive_now(socket: &PeerSocket) -> Result<Answer> {
    loop {
        return match socket::receive(socket.fd(), &mut Vec::new()) {
            Ok(Some(packet)) => Ok(Answer::Packet(packet)),
            Ok(None) => Ok(Answer::Closed),
            // It has closed without reading the hello. Its earlier packets can still be received.
            Err(Errno::CONNRESET) => continue,
            Err(Errno::AGAIN) => Ok(Answer::Nothing),
            Err(error) => Err(Error::io("receiving the listener's hello", error)),
        };
    }
}
