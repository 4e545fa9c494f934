//! The connecting end.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::connection::{Agreement, Connection};
use super::handshake::{Greeting, Hello, check_identity};
use super::limits::Limits;
use super::{Channel, DEFAULT_MESSAGE_LIMIT, name};
use crate::model::error::{Error, Result};
use crate::model::placement::DeviceMap;
use crate::os::kill::kill_point;
use crate::sharing::Runtime;
use crate::sharing::Session;
use crate::sharing::timeline::{Side, WordPage};
use crate::transport::socket::{Packet, PeerSocket, peer_credentials};
use crate::transport::{Deadline, PeerCredentials, UserName, socket};
use crate::wire::{BrokerAddress, SOCKET_DIR_VARIABLE};

/// The pause before the second attempt to connect, doubled for each later one. The start of a listener wakes no process.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
/// Maximum pause between attempts to connect.
const MAX_PAUSE: Duration = Duration::from_millis(32);

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
#[must_use = "nothing is connected before ConnectBuilder::start"]
#[derive(Debug)]
pub struct ConnectBuilder<'a> {
    ipc: &'a Session,
    name: &'a str,
    map: DeviceMap,
    limit: u64,
    limits: Limits,
    timeout: Duration,
    user: Option<u32>,
}

impl<'a> ConnectBuilder<'a> {
    pub(crate) const fn new(ipc: &'a Session, name: &'a str, timeout: Duration) -> Self {
        Self {
            ipc,
            name,
            map: DeviceMap::new(),
            limit: DEFAULT_MESSAGE_LIMIT,
            limits: Limits::DEFAULT,
            timeout,
            user: None,
        }
    }

    /// Sets the devices on which the listener opens memory of this process.
    ///
    /// Memory from the listener uses the listener's map, or the inverse of this map if the listener has none.
    pub fn device_map(mut self, map: DeviceMap) -> Self {
        self.map = map;
        self
    }

    /// Sets the maximum size of a message in bytes, by default 64 MiB. A channel uses the smaller limit of its two ends.
    pub const fn message_limit(mut self, bytes: u64) -> Self {
        self.limit = bytes;
        self
    }

    /// Sets the maximum number of messages that this process has sent and the peer has not received, by default 128.
    ///
    /// At the limit, [`Channel::send`] waits and [`Channel::try_send`] returns the message. At least one message can always be
    /// sent.
    pub const fn max_messages_in_flight(mut self, messages: u64) -> Self {
        self.limits.messages = messages;
        self
    }

    /// Sets the maximum number of bytes of the messages that this process has sent and the peer has not received, by default
    /// 256 MiB.
    ///
    /// The bytes of a message are its payload and the memory of its exports, which stays allocated until the peer has received
    /// the message and opened or discarded it. A message larger than the limit is sent when no other message is in flight.
    pub const fn max_bytes_in_flight(mut self, bytes: u64) -> Self {
        self.limits.bytes = bytes;
        self
    }

    /// Sets the timeout for a listener to exist and accept, by default the timeout of the [`Ipc`](crate::Ipc).
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the user of the listener's process, by default the user of this process.
    ///
    /// Another user must be allowed with [`IpcBuilder::allow`](crate::IpcBuilder::allow).
    pub const fn user(mut self, uid: u32) -> Self {
        self.user = Some(uid);
        self
    }

    /// Connects and waits until the listener has accepted.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidChannelName`]; [`Error::NoListener`]; [`Error::Timeout`] if a listener exists but does not
    /// accept; [`Error::NotPermitted`] if the listener belongs to another user, or does not allow this user;
    /// [`Error::InvalidDeviceMap`]; [`Error::WrongBackend`]; [`Error::Protocol`] for another protocol version;
    /// [`Error::Forked`].
    pub fn start(self) -> Result<Channel> {
        let runtime = Runtime::get()?;
        let own = Hello::own(self.ipc, runtime.identity, &self.map, self.limit)?;
        let uid = self.user.unwrap_or_else(|| rustix::process::geteuid().as_raw());
        let directory = self.ipc.socket_directory();
        let address = name::address(self.name, uid, directory.as_deref())?;
        let deadline = Deadline::after(self.timeout);
        let mut pause = FIRST_PAUSE;
        loop {
            if let Some(socket) = self.try_connect(&address)? {
                // A listener that closes before it accepts may be followed by another one.
                if let Some(channel) = self.exchange_hello(runtime, socket, &address, &own, deadline)? {
                    return Ok(channel);
                }
            }
            let left = deadline.left();
            if left.is_zero() {
                return Err(self.no_listener(&address));
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    /// Returns a connected socket, or `None` if there is no listener or its queue is full.
    fn try_connect(&self, address: &BrokerAddress) -> Result<Option<PeerSocket>> {
        let socket = socket::new_socket().map_err(|error| Error::io("creating a socket", error))?;
        loop {
            return match rustix::net::connect(&socket, &address.to_socket_address()?) {
                Ok(()) => Ok(Some(PeerSocket::new(socket, true))),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN | Errno::CONNREFUSED | Errno::NOENT) => Ok(None),
                Err(error) => Err(Error::io(format!("connecting to {:?} at {address}", self.name), error)),
            };
        }
    }

    fn no_listener(&self, address: &BrokerAddress) -> Error {
        let detail = match address {
            BrokerAddress::Path(path) if path.parent().is_some_and(|directory| !directory.is_dir()) => {
                format!(
                    "the directory of {address} does not exist; mount it at the same path in this process"
                )
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
        Error::NoListener { name: self.name.to_owned(), after: self.timeout, detail }
    }

    /// Exchanges the first packets with a listener. `None` if it has closed meanwhile.
    fn exchange_hello(
        &self,
        runtime: &Runtime,
        socket: PeerSocket,
        address: &BrokerAddress,
        own: &Hello,
        deadline: Deadline,
    ) -> Result<Option<Channel>> {
        kill_point!("connector:channel-connected");
        let credentials = peer_credentials(socket.owned()).map_err(|error| {
            Error::io(format!("reading the credentials of the listener at {address}"), error)
        })?;
        if !self.ipc.allow_list().permits(&credentials) {
            return Err(Error::NotPermitted(format!(
                "the listener at {address} belongs to {} (process {}), not to the user of this process; allow that user with \
                 IpcBuilder::allow",
                UserName(credentials.uid),
                credentials.pid
            )));
        }
        let hello = Greeting::Hello(own.clone()).encode()?;
        match socket::send(socket.fd(), &hello, &[]) {
            // A listener that refuses this process has sent its refusal before it closed.
            Ok(()) | Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {}
            Err(error) => return Err(Error::io(format!("sending hello to {:?}", self.name), error)),
        }
        kill_point!("connector:channel-said-hello");
        let Some(packet) = receive_answer(&socket, &credentials, deadline)? else { return Ok(None) };
        let peer = match Greeting::decode(&packet.bytes)? {
            Greeting::Hello(peer) => peer,
            Greeting::NotAllowed { uid } => {
                return Err(Error::NotPermitted(format!(
                    "process {}, which listens as {:?}, does not allow {}; allow that user there with IpcBuilder::allow",
                    credentials.pid,
                    self.name,
                    UserName(uid)
                )));
            }
        };
        check_identity(&peer, &runtime.identity, &credentials)?;
        let maps = own.agree_with(&peer)?;
        let sent = packet.fds.len();
        let fds: Result<[OwnedFd; 2], _> = packet.fds.take().try_into();
        let Ok([page, control]) = fds else {
            return Err(Error::Protocol(format!(
                "its hello contained {sent} file descriptors instead of 2; this process may have reached its limit of open files \
                 (ulimit -n)"
            )));
        };
        let control = PeerSocket::new(control, true);
        socket::check_seqpacket(control.fd())?;
        let page = WordPage::open(page)?;
        kill_point!("connector:channel-welcomed");
        let agreement = Agreement {
            own: own.clone(),
            peer,
            maps,
            page,
            side: Side::Importer,
            control,
            limits: self.limits,
        };
        let connection = Connection::begin(self.ipc, socket, credentials.pid, agreement)?;
        Ok(Some(Channel::new(connection)))
    }
}

/// Receives the listener's answer. `None` if it has closed the connection.
fn receive_answer(
    socket: &PeerSocket,
    listener: &PeerCredentials,
    deadline: Deadline,
) -> Result<Option<Packet>> {
    loop {
        match socket::receive(socket.fd(), &mut Vec::new()) {
            Ok(packet) => return Ok(packet),
            // It has closed without reading the hello. Its earlier packets can still be received.
            Err(Errno::CONNRESET) => {}
            Err(Errno::AGAIN) => {
                let waited = socket::wait_until(socket.fd(), PollFlags::IN, deadline.at);
                if !waited.map_err(|error| Error::io("waiting for the listener", error))? {
                    let detail = format!("; process {} listens but has not called accept", listener.pid);
                    return Err(deadline.passed("the accepting of the channel", &detail));
                }
            }
            Err(error) => return Err(Error::io("receiving the listener's hello", error)),
        }
    }
}
