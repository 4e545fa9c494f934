//! The end that waits under a name.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::connection::{Agreed, Connection};
use super::handshake::{Greeting, Hello, check_identity};
use super::name::{self, Listening};
use super::{Channel, DEFAULT_MESSAGE_LIMIT};
use crate::model::error::{Error, Result};
use crate::model::placement::DeviceMap;
use crate::os::kill::kill_point;
use crate::os::process::Owner;
use crate::sharing::Runtime;
use crate::sharing::Session;
use crate::sharing::timeline::{Side, WordPage};
use crate::transport::check_may_wait;
use crate::transport::socket::PeerSocket;
use crate::transport::socket_file::SocketFile;
use crate::transport::{Deadline, Gate, PeerCredentials, socket};
use crate::wire::BrokerAddress;

/// How long a process may stay connected without having said hello, and how many may.
const HELLO_DEADLINE: Duration = Duration::from_secs(5);
const MAX_SILENT: usize = 64;

/// Maximum number of connections accepted before those that have spoken are answered.
const ACCEPTED_PER_TURN: usize = 16;

/// A listener in the making; see [`Ipc::listen`](crate::Ipc::listen).
#[must_use = "nobody listens before ListenBuilder::start"]
#[derive(Debug)]
pub struct ListenBuilder<'a> {
    ipc: &'a Session,
    name: &'a str,
    map: DeviceMap,
    limit: u64,
}

impl<'a> ListenBuilder<'a> {
    pub(crate) const fn new(ipc: &'a Session, name: &'a str) -> Self {
        Self { ipc, name, map: DeviceMap::new(), limit: DEFAULT_MESSAGE_LIMIT }
    }

    /// On which devices of a peer memory is opened that this process sends. What comes from the peer takes the peer's map,
    /// or the inverse of this one where it has none.
    pub fn device_map(mut self, map: DeviceMap) -> Self {
        self.map = map;
        self
    }

    /// The largest message in bytes, 64 MiB unless said otherwise. A channel takes the smaller limit of its two ends.
    pub const fn message_limit(mut self, bytes: u64) -> Self {
        self.limit = bytes;
        self
    }

    /// Listens.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidChannelName`]; [`Error::ChannelNameInUse`], which says who listens; [`Error::Forked`].
    pub fn start(self) -> Result<Listener> {
        let runtime = Runtime::get()?;
        let own = Hello::own(self.ipc, runtime.identity, &self.map, self.limit)?;
        let directory = self.ipc.socket_directory();
        let uid = rustix::process::geteuid().as_raw();
        let address = name::address(self.name, uid, directory.as_deref())?;
        let (listening, file) = name::listen(self.name, &address)?;
        Ok(Listener {
            ipc: self.ipc.clone(),
            name: self.name.to_owned(),
            own,
            address,
            listening,
            file,
            silent: Gate::new(Vec::new()),
            owner: Owner::current(),
        })
    }
}

/// Where other processes of this machine connect to, by a name. Each of them gets a [`Channel`] of its own. Dropping it gives
/// the name free; channels that were accepted go on.
#[derive(Debug)]
pub struct Listener {
    ipc: Session,
    name: String,
    own: Hello,
    address: BrokerAddress,
    listening: Listening,
    file: Option<SocketFile>,
    /// Those that are connected and have not said hello.
    silent: Gate<Vec<Silent>>,
    owner: Owner,
}

#[derive(Debug)]
struct Silent {
    socket: PeerSocket,
    credentials: PeerCredentials,
    until: Instant,
}

impl Listener {
    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it listens, for messages to people.
    pub const fn address(&self) -> &BrokerAddress {
        &self.address
    }

    /// The next process that connects. One that does not speak is waited for beside the others, for five seconds, and a user
    /// who is not allowed ([`IpcBuilder::allow`](crate::IpcBuilder::allow)) is told so and not let in.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]; [`Error::OnWorkerThread`] in a callback. And where one of them cannot be accepted, which concerns no other one:
    /// [`Error::InvalidDeviceMap`], [`Error::WrongBackend`], [`Error::Protocol`] for another version or no hello at all.
    pub fn accept(&self, timeout: Duration) -> Result<Channel> {
        self.owner.check()?;
        check_may_wait("Listener::accept", timeout)?;
        Runtime::get()?;
        let deadline = Deadline::after(timeout);
        let silent = self.silent.enter(deadline);
        let mut silent = silent.ok_or_else(|| self.nobody(deadline))?;
        loop {
            self.let_in(&mut silent)?;
            let spoken = silent.iter().position(Silent::can_be_read);
            if let Some(index) = spoken {
                if let Some(channel) = self.welcome(silent.remove(index))? {
                    return Ok(channel);
                }
                if deadline.left().is_zero() {
                    return Err(self.nobody(deadline));
                }
                continue;
            }
            let now = Instant::now();
            silent.retain(|one| one.until > now);
            if !self.wait(&silent, deadline)? {
                return Err(self.nobody(deadline));
            }
        }
    }

    fn nobody(&self, deadline: Deadline) -> Error {
        let detail = format!("; nobody has connected to {:?} at {}", self.name, self.address);
        deadline.passed("the accepting of a channel", &detail)
    }

    /// Accepts a number of connections at most: there may always be one more.
    fn let_in(&self, silent: &mut Vec<Silent>) -> Result<()> {
        for _ in 0..ACCEPTED_PER_TURN {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let accepted = match rustix::net::accept_with(self.listening.socket.fd(), flags) {
                Ok(accepted) => PeerSocket::new(accepted, !self.listening.refuses_fds),
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(error) => {
                    return Err(Error::io(format!("accepting a channel at {}", self.address), error));
                }
            };
            kill_point!("acceptor:channel-accepted");
            let credentials = socket::peer_credentials(accepted.owned())
                .map_err(|error| Error::io("asking who connects", error))?;
            if !self.ipc.allow_list().permits(&credentials) {
                tracing::warn!(
                    pid = credentials.pid,
                    uid = credentials.uid,
                    "a channel is refused to this user"
                );
                let refusal = Greeting::NotAllowed { uid: credentials.uid }.encode()?;
                let _ = socket::send(accepted.fd(), &refusal, &[]);
                continue;
            }
            if silent.len() >= MAX_SILENT {
                silent.remove(0);
            }
            silent.push(Silent { socket: accepted, credentials, until: Instant::now() + HELLO_DEADLINE });
        }
        Ok(())
    }

    /// Waits for somebody to connect or to speak. False when the time is over.
    fn wait(&self, silent: &[Silent], deadline: Deadline) -> Result<bool> {
        let sockets =
            std::iter::once(self.listening.socket.fd()).chain(silent.iter().map(|one| one.socket.fd()));
        let mut fds: Vec<_> = sockets.map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN)).collect();
        let left = deadline.left();
        if left.is_zero() {
            return Ok(false);
        }
        let next = silent.iter().map(|one| one.until.saturating_duration_since(Instant::now())).min();
        let wait = next.map_or(left, |next| next.min(left));
        match poll(&mut fds, Some(&socket::timespec(wait))) {
            Ok(_) | Err(Errno::INTR) => Ok(true),
            Err(error) => Err(Error::io("waiting for a channel", error)),
        }
    }

    /// Answers a hello. `None` for who has gone without one: somebody who only looks who listens here.
    fn welcome(&self, mut silent: Silent) -> Result<Option<Channel>> {
        if silent.socket.next_brings_fds() {
            return Err(Error::Protocol("its first packet brings descriptors".into()));
        }
        let mut buffer = Vec::new();
        let hello = match socket::take_bytes(silent.socket.fd(), &mut buffer) {
            Ok(Some(len)) => &buffer[..len],
            Ok(None) | Err(_) => return Ok(None),
        };
        let runtime = Runtime::get()?;
        let own = self.own.clone();
        // Also where it is of another version, which it learns from this.
        let answer = Greeting::Hello(own.clone()).encode()?;
        let peer = match Greeting::decode(hello) {
            Ok(Greeting::Hello(peer)) => peer,
            Ok(Greeting::NotAllowed { .. }) => {
                return Err(Error::Protocol("its first packet is no hello".into()));
            }
            Err(error) => {
                let _ = socket::send(silent.socket.fd(), &answer, &[]);
                return Err(error);
            }
        };
        check_identity(&peer, &runtime.identity, &silent.credentials)?;
        // A message that is too long for a packet travels in a memory file.
        silent.socket.accept_fds();
        let (page, file) = WordPage::create()?;
        let sent = send_answer(silent.socket.fd(), &answer, file.as_fd());
        let maps = own.agree_with(&peer)?;
        if sent.is_err() {
            return Ok(None);
        }
        kill_point!("acceptor:channel-welcomed");
        let agreed = Agreed { own, peer, maps, page, side: Side::Exporter };
        let connection = Connection::begin(&self.ipc, silent.socket, silent.credentials.pid, agreed)?;
        Ok(Some(Channel::new(connection)))
    }
}

fn send_answer(to: BorrowedFd<'_>, answer: &[u8], page: BorrowedFd<'_>) -> rustix::io::Result<()> {
    socket::send(to, answer, &[page])
}

impl Silent {
    fn can_be_read(&self) -> bool {
        socket::wait_until(self.socket.fd(), PollFlags::IN, Instant::now()).unwrap_or(true)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(file) = self.file.as_ref().filter(|_| self.owner.is_here()) {
            file.remove();
        }
    }
}
