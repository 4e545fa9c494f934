//! The end that looks for a name.

use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::connection::{Agreed, Connection};
use super::handshake::{Greeting, Hello, check_identity};
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

/// How often it is looked whether somebody listens: a name that comes into being wakes nobody. From this, doubling.
const LOOK: Duration = Duration::from_millis(1);
const SELDOM: Duration = Duration::from_millis(32);

/// A channel in the making; see [`Ipc::connect`](crate::Ipc::connect).
#[must_use = "nothing is connected before ConnectBuilder::start"]
#[derive(Debug)]
pub struct ConnectBuilder<'a> {
    ipc: &'a Session,
    name: &'a str,
    map: DeviceMap,
    limit: u64,
    timeout: Duration,
    user: Option<u32>,
}

impl<'a> ConnectBuilder<'a> {
    pub(crate) const fn new(ipc: &'a Session, name: &'a str, timeout: Duration) -> Self {
        Self { ipc, name, map: DeviceMap::new(), limit: DEFAULT_MESSAGE_LIMIT, timeout, user: None }
    }

    /// On which devices of the listener memory is opened that this process sends. What comes from the listener takes the
    /// listener's map, or the inverse of this one where it has none.
    pub fn device_map(mut self, map: DeviceMap) -> Self {
        self.map = map;
        self
    }

    /// The largest message in bytes, 64 MiB unless said otherwise. A channel takes the smaller limit of its two ends.
    pub const fn message_limit(mut self, bytes: u64) -> Self {
        self.limit = bytes;
        self
    }

    /// How long to wait for somebody who listens and accepts; the timeout of the [`Ipc`] unless said otherwise.
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The listener is a process of this user, who has to be allowed ([`IpcBuilder::allow`](crate::IpcBuilder::allow)); this
    /// process's own user unless said otherwise.
    pub const fn user(mut self, uid: u32) -> Self {
        self.user = Some(uid);
        self
    }

    /// Connects, and waits until the listener has accepted.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidChannelName`]; [`Error::NobodyListens`]; [`Error::Timeout`] where somebody listens and does not
    /// accept; [`Error::NotPermitted`] where the listener is of another user, or does not allow this one;
    /// [`Error::InvalidDeviceMap`], [`Error::WrongBackend`], [`Error::Protocol`] for another version; [`Error::Forked`].
    pub fn start(self) -> Result<Channel> {
        let runtime = Runtime::get()?;
        let own = Hello::own(self.ipc, runtime.identity, &self.map, self.limit)?;
        let uid = self.user.unwrap_or_else(|| rustix::process::geteuid().as_raw());
        let directory = self.ipc.socket_directory();
        let address = name::address(self.name, uid, directory.as_deref())?;
        let deadline = Deadline::after(self.timeout);
        let mut pause = LOOK;
        loop {
            if let Some(socket) = self.reach(&address)? {
                // A listener that goes before it has accepted may be followed by another one.
                if let Some(channel) = self.greet(runtime, socket, &address, &own, deadline)? {
                    return Ok(channel);
                }
            }
            let left = deadline.left();
            if left.is_zero() {
                return Err(self.nobody(&address));
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(SELDOM);
        }
    }

    /// A connected socket, or `None` where nobody listens, or too many wait to be accepted.
    fn reach(&self, address: &BrokerAddress) -> Result<Option<PeerSocket>> {
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

    fn nobody(&self, address: &BrokerAddress) -> Error {
        let detail = match address {
            BrokerAddress::Path(path) if path.parent().is_some_and(|directory| !directory.is_dir()) => {
                format!("there is no directory for {address}; it must be mounted at the same path here")
            }
            BrokerAddress::Path(_) => format!(
                "{address} is where it was looked; a listener without {SOCKET_DIR_VARIABLE}, of another user or with another \
                 name is elsewhere"
            ),
            BrokerAddress::Abstract(_) => format!(
                "{address} is where it was looked; a listener with {SOCKET_DIR_VARIABLE}, of another user, in another \
                 network namespace or with another name is elsewhere"
            ),
        };
        Error::NobodyListens { name: self.name.to_owned(), after: self.timeout, detail }
    }

    /// Says hello. `None` where the listener has gone meanwhile.
    fn greet(
        &self,
        runtime: &Runtime,
        socket: PeerSocket,
        address: &BrokerAddress,
        own: &Hello,
        deadline: Deadline,
    ) -> Result<Option<Channel>> {
        kill_point!("connector:channel-connected");
        let credentials = peer_credentials(socket.owned())
            .map_err(|error| Error::io(format!("asking who listens at {address}"), error))?;
        if !self.ipc.allow_list().permits(&credentials) {
            return Err(Error::NotPermitted(format!(
                "{address} is listened at by {} (process {}), who is not this process's user; allow it with \
                 IpcBuilder::allow if that is meant",
                UserName(credentials.uid),
                credentials.pid
            )));
        }
        let hello = Greeting::Hello(own.clone()).encode()?;
        match socket::send(socket.fd(), &hello, &[]) {
            // A listener that refuses has said so before it closed.
            Ok(()) | Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {}
            Err(error) => return Err(Error::io(format!("saying hello to {:?}", self.name), error)),
        }
        kill_point!("connector:channel-said-hello");
        let Some(packet) = answer(&socket, &credentials, deadline)? else { return Ok(None) };
        let peer = match Greeting::decode(&packet.bytes)? {
            Greeting::Hello(peer) => peer,
            Greeting::NotAllowed { uid } => {
                return Err(Error::NotPermitted(format!(
                    "process {}, which listens as {:?}, does not allow {}; allow it there with IpcBuilder::allow",
                    credentials.pid,
                    self.name,
                    UserName(uid)
                )));
            }
        };
        check_identity(&peer, &runtime.identity, &credentials)?;
        let maps = own.agree_with(&peer)?;
        let sent = packet.fds.len();
        let page = packet.fds.take_first().filter(|_| sent == 1).ok_or_else(|| {
            Error::Protocol(format!(
                "its hello came with {sent} descriptors instead of a page (this process may have none left; raise its \
                 limit, ulimit -n)"
            ))
        })?;
        let page = WordPage::open(page)?;
        kill_point!("connector:channel-welcomed");
        let agreed = Agreed { own: own.clone(), peer, maps, page, side: Side::Importer };
        let connection = Connection::begin(self.ipc, socket, credentials.pid, agreed)?;
        Ok(Some(Channel::new(connection)))
    }
}

/// What the listener answers. `None` where it has gone.
fn answer(socket: &PeerSocket, listener: &PeerCredentials, deadline: Deadline) -> Result<Option<Packet>> {
    loop {
        match socket::receive(socket.fd(), &mut Vec::new()) {
            Ok(packet) => return Ok(packet),
            // It has closed over our hello. What it had said before is still there.
            Err(Errno::CONNRESET) => {}
            Err(Errno::AGAIN) => {
                let waited = socket::wait_until(socket.fd(), PollFlags::IN, deadline.at);
                if !waited.map_err(|error| Error::io("waiting for the listener", error))? {
                    let detail = format!("; process {} listens, and has not called accept", listener.pid);
                    return Err(deadline.passed("the accepting of the channel", &detail));
                }
            }
            Err(error) => return Err(Error::io("receiving the listener's hello", error)),
        }
    }
}
