//! A connection to a broker whose user has been checked and whose identity is known.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::epoch::EpochView;
use super::socket::{self, PeerCredentials, PeerSocket, ReceivedFds, ReceivedMessage};
use super::{AllowList, UserName};
use crate::model::error::{Error, Remedy, Result};
use crate::os::kill::kill_point;
use crate::os::process::ProcessIdentity;
use crate::os::{Pace, PollMode, clock};
use crate::wire::protocol::{PROTOCOL_VERSION, Reply, Request, decode, encode};
use crate::wire::short_name;
use crate::wire::{BrokerAddress, Refusal};

/// Pause before another attempt to connect to an exporter with a full queue: connect(2) offers nothing to wait on.
pub(super) const CONNECT_RETRY: Duration = Duration::from_millis(1);

/// Maximum sleep of a receiver between two looks at its deadline.
const LONGEST_SLEEP: Duration = Duration::from_millis(500);

/// The state of a receiver between two messages.
#[derive(Debug, Default)]
pub(super) struct ReceiveBuffer {
    pub(super) buffer: Vec<u8>,
    pace: Pace,
}

/// A connected socket. A closed connection gives [`Error::ExporterGone`].
#[derive(Debug)]
pub(super) struct Conversation {
    server: PeerCredentials,
    /// The exporter's process id for error texts, in its own pid namespace where that is known.
    pid: u32,
    socket: PeerSocket,
    epoch: Option<EpochView>,
    /// The page of lease states, until it is taken.
    lease_page: Option<OwnedFd>,
}

impl Conversation {
    /// Connects. Verifies that the server's user is allowed before anything is sent, and that the server is the expected process,
    /// where there is one, before anything secret is sent.
    pub(super) fn connect(
        address: &BrokerAddress,
        expected: Option<&ProcessIdentity>,
        allow: &AllowList,
        deadline: Deadline,
    ) -> Result<(Self, ProcessIdentity)> {
        let pid = expected.map_or(0, |exporter| exporter.pid);
        let socket = connect(address, pid, deadline)?;
        Self::over(socket, address, expected, allow, deadline)
    }

    /// Begins a conversation, as [`connect`](Self::connect), over a socket that is connected to the address.
    pub(super) fn over(
        socket: OwnedFd,
        address: &BrokerAddress,
        expected: Option<&ProcessIdentity>,
        allow: &AllowList,
        deadline: Deadline,
    ) -> Result<(Self, ProcessIdentity)> {
        let pid = expected.map_or(0, |exporter| exporter.pid);
        kill_point!("importer:connected");
        socket::limit_receive_time(socket.as_fd(), LONGEST_SLEEP)
            .map_err(|error| Error::io("setting up the socket to the exporter", error))?;
        let server = socket::peer_credentials(&socket)
            .map_err(|error| Error::io(format!("asking who listens at {address}"), error))?;
        if !allow.permits(&server) {
            return Err(not_permitted(address, &server));
        }
        if expected.is_some_and(|expected| is_somebody_else(expected, &server)) {
            return Err(Error::ExporterGone { pid });
        }
        let pid = if pid == 0 { server.pid } else { pid };
        // An exporter's answers bring descriptors.
        let socket = PeerSocket::new(socket, true);
        let mut conversation = Self { server, pid, socket, epoch: None, lease_page: None };
        let exporter = conversation.say_hello(deadline)?;
        kill_point!("importer:said-hello");
        if expected.is_some_and(|expected| *expected != exporter) {
            return Err(conversation.ended());
        }
        Ok((conversation, exporter))
    }

    fn say_hello(&mut self, deadline: Deadline) -> Result<ProcessIdentity> {
        let hello = Request::Hello { protocol: PROTOCOL_VERSION, program: program_name() };
        match self.send(&hello, deadline) {
            // An exporter that refuses this user sends the refusal before it closes.
            Ok(()) | Err(Error::ExporterGone { .. }) => {}
            Err(error) => return Err(error),
        }
        let (reply, fds) = self.receive(&mut ReceiveBuffer::default(), deadline)?;
        self.epoch = fds.first().and_then(EpochView::open);
        self.lease_page = fds.take_second();
        match reply {
            Reply::Hello { protocol, .. } if protocol != PROTOCOL_VERSION => Err(Error::Protocol(format!(
                "it speaks version {protocol} of the protocol and this process version {PROTOCOL_VERSION}; update \
                 device-ipc in the {} process",
                if protocol > PROTOCOL_VERSION { "importing" } else { "exporting" }
            ))),
            Reply::Hello { exporter, .. } => Ok(exporter),
            Reply::Refused { refusal: Refusal::UserNotAllowed { uid }, .. } => {
                Err(user_not_allowed(self.pid, uid))
            }
            _ => Err(Error::Protocol("its first message is no hello".into())),
        }
    }

    /// Sends a message, waiting for a peer that does not read.
    pub(super) fn send(&self, request: &Request, deadline: Deadline) -> Result<()> {
        let bytes = encode(request)?;
        loop {
            match socket::send(self.socket(), &bytes, &[]) {
                Ok(()) => return Ok(()),
                Err(Errno::AGAIN) if deadline.left().is_zero() => return Err(self.no_answer(deadline)),
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, deadline)?,
                Err(_) => return Err(self.ended()),
            }
        }
    }

    /// Receives a message, and waits for one: mostly a reply that has not arrived yet. Where replies arrive quickly it polls before
    /// it sleeps.
    pub(super) fn receive(
        &self,
        inbox: &mut ReceiveBuffer,
        deadline: Deadline,
    ) -> Result<(Reply, ReceivedFds)> {
        let ReceiveBuffer { buffer, pace } = inbox;
        pace.wait(Some(deadline.at), |look| match look {
            PollMode::Now => self.try_receive(buffer),
            PollMode::Sleep => self.receive_asleep(buffer, deadline),
        })
    }

    /// Receives a message where one has arrived.
    pub(super) fn try_receive(&self, buffer: &mut Vec<u8>) -> Result<Option<(Reply, ReceivedFds)>> {
        let taken = socket::take(self.socket(), buffer);
        self.read(taken, buffer)
    }

    /// Receives a message that arrives before the thread has to look at its deadline again.
    fn receive_asleep(
        &self,
        buffer: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<Option<(Reply, ReceivedFds)>> {
        // An interrupt ends the wait: the socket does not look for one.
        clock::slice(deadline.left());
        if deadline.left() > LONGEST_SLEEP {
            let taken = socket::take_asleep(self.socket(), buffer);
            return self.read(taken, buffer);
        }
        self.wait(PollFlags::IN, deadline)?;
        self.try_receive(buffer)
    }

    /// Decodes the message that was taken into the buffer, where there is one.
    fn read(
        &self,
        taken: rustix::io::Result<Option<ReceivedMessage>>,
        buffer: &[u8],
    ) -> Result<Option<(Reply, ReceivedFds)>> {
        match taken {
            Ok(Some(ReceivedMessage { len, fds })) => {
                let reply = decode(&buffer[..len]).map_err(|error| Error::Protocol(error.to_string()))?;
                Ok(Some((reply, fds)))
            }
            // The exporter closed with a message of ours unread: its earlier messages are still in the queue.
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNRESET) => Ok(None),
            Ok(None) | Err(_) => Err(self.ended()),
        }
    }

    fn wait(&self, interest: PollFlags, deadline: Deadline) -> Result<()> {
        match socket::wait_until(self.socket(), interest, deadline.at) {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.no_answer(deadline)),
            Err(error) => Err(Error::io("waiting for the exporting process", error)),
        }
    }

    /// Returns whether the peer has closed the connection.
    pub(super) fn has_hung_up(&self) -> bool {
        socket::has_hung_up(self.socket())
    }

    /// Takes the file of the page of lease states, where the exporter has sent one.
    pub(super) fn take_lease_page(&mut self) -> Option<OwnedFd> {
        self.lease_page.take()
    }

    /// Returns the exporter's count of drops, where it publishes one.
    pub(super) fn epoch(&self) -> Option<u64> {
        self.epoch.as_ref().map(EpochView::read)
    }

    /// Returns whether the exporter is alive, by its page. `None` where that is unknown.
    pub(super) fn exporter_lives(&self) -> Option<bool> {
        self.epoch.as_ref()?.exporter_lives()
    }

    pub(super) fn server(&self) -> &PeerCredentials {
        &self.server
    }

    pub(super) fn no_answer(&self, deadline: Deadline) -> Error {
        let detail = format!("; is process {} stopped or very busy?", self.pid);
        deadline.passed("the answer of the exporting process", &detail)
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.fd()
    }

    fn ended(&self) -> Error {
        Error::ExporterGone { pid: self.pid }
    }
}

/// The error for an exporter that does not allow this process's user.
pub(super) fn user_not_allowed(pid: u32, uid: u32) -> Error {
    Error::NotPermitted(format!(
        "process {pid} does not allow {} to open its exports; {}",
        UserName(uid),
        Remedy::AllowUser
    ))
}

/// The error for an exporter whose user the caller does not allow.
pub(super) fn not_permitted(address: &BrokerAddress, server: &PeerCredentials) -> Error {
    Error::NotPermitted(format!(
        "the exporter's socket {address} is served by {} (process {}), who is not this process's user; \
         {} if that is meant",
        UserName(server.uid),
        server.pid,
        Remedy::AllowUserHere
    ))
}

/// Returns whether the server is known to be another process than the expected one: the kernel reports its id, which is unique in
/// a pid namespace. Any process can claim the exporter's identity, which the descriptor shows.
fn is_somebody_else(expected: &ProcessIdentity, server: &PeerCredentials) -> bool {
    let same_namespace =
        ProcessIdentity::current().is_ok_and(|local| local.pid_namespace == expected.pid_namespace);
    same_namespace && server.pid != expected.pid
}

fn connect(address: &BrokerAddress, pid: u32, deadline: Deadline) -> Result<OwnedFd> {
    loop {
        if let Some(socket) = try_connect(address, pid)? {
            return Ok(socket);
        }
        if deadline.left().is_zero() {
            return Err(queue_is_full(address, deadline));
        }
        clock::sleep(CONNECT_RETRY);
    }
}

pub(super) fn queue_is_full(address: &BrokerAddress, deadline: Deadline) -> Error {
    deadline.passed("connecting to the exporting process", &format!("; the queue of {address} is full"))
}

/// Connects, without waiting. `None` where the queue of the exporter is full.
pub(super) fn try_connect(address: &BrokerAddress, pid: u32) -> Result<Option<OwnedFd>> {
    let socket = socket::new_socket().map_err(|error| Error::io("creating a socket", error))?;
    let target = address.to_socket_address()?;
    loop {
        return match rustix::net::connect(&socket, &target) {
            Ok(()) => Ok(Some(socket)),
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => Ok(None),
            Err(Errno::CONNREFUSED) => Err(Error::ExporterGone { pid }),
            Err(Errno::NOENT) => Err(missing_socket(address, pid)),
            Err(error) => Err(Error::io(format!("connecting to the exporter at {address}"), error)),
        };
    }
}

/// Returns the error for a socket that does not exist: the exporter has terminated, or its directory is not mounted here.
fn missing_socket(address: &BrokerAddress, pid: u32) -> Error {
    match address {
        BrokerAddress::Path(path) if path.parent().is_some_and(|directory| !directory.is_dir()) => Error::io(
            format!(
                "connecting to the exporter at {address} (its directory must be mounted at the same path here)"
            ),
            Errno::NOENT,
        ),
        _ => Error::ExporterGone { pid },
    }
}

/// Returns this program's name, for the exporter's list of holders.
pub(crate) fn program_name() -> String {
    let path = std::env::args_os().next().unwrap_or_default();
    let name = std::path::Path::new(&path).file_name().unwrap_or_default();
    short_name(&name.to_string_lossy())
}

/// The end of a timeout, and the timeout, for the error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    pub(crate) at: Instant,
    after: Duration,
}

impl Deadline {
    pub(crate) fn after(time: Duration) -> Self {
        let now = clock::now();
        // A time beyond the clock's range counts as no limit.
        let at = now.checked_add(time).unwrap_or(now + Duration::from_secs(u64::from(u32::MAX)));
        Self { at, after: time }
    }

    /// Returns the deadline, at most `time` from now.
    pub(crate) fn at_most(self, time: Duration) -> Self {
        if self.left() <= time { self } else { Self::after(time) }
    }

    pub(crate) fn left(&self) -> Duration {
        clock::left(self.at)
    }

    pub(crate) fn passed(&self, what: &str, detail: &str) -> Error {
        Error::Timeout { what: what.to_owned(), after: self.after, detail: detail.to_owned() }
    }
}
