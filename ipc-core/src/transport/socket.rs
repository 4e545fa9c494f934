//! Sequenced packets over Unix sockets: whole messages with file descriptors, and who is at the other end.
//!
//! `SOCK_SEQPACKET` keeps the bounds of messages and ties descriptors to the message they came with (unix(7)), so a
//! peer cannot get us out of step.

#![allow(
    unsafe_code,
    reason = "SO_PEERCRED with the process id 0, which rustix's type cannot hold, and SO_PASSRIGHTS, which it does not know"
)]

use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socket_with,
};

use super::closer::close_elsewhere;
use crate::os::log::Throttle;
use crate::os::process::Owner;
use crate::os::{ClosedByFork, clock};
use crate::wire::BrokerAddress;
use crate::wire::channel::PacketFiles;

/// The most file descriptors that the kernel takes in one message (`SCM_MAX_FD`).
pub(crate) const MAX_FDS: usize = 253;

/// The largest message in bytes. Below the default size of a socket's buffer.
pub(crate) const MAX_MESSAGE_BYTES: usize = 128 * 1024;

/// A message as it arrived. Not shown by `Debug`: it may hold a token or a handle.
pub(crate) struct Packet {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: ReceivedFds,
}

/// Descriptors that came with a message. Those that nobody claims are closed on another thread, as their sender decides how
/// long a close takes.
#[derive(Debug, Default)]
pub(crate) struct ReceivedFds(Vec<OwnedFd>);

impl ReceivedFds {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn first(&self) -> Option<&OwnedFd> {
        self.0.first()
    }

    pub(crate) fn append(&mut self, more: Self) {
        self.0.extend(more.take());
    }

    /// Claims all of them.
    pub(crate) fn take(mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.0)
    }

    /// Claims the second of them.
    pub(crate) fn take_second(mut self) -> Option<OwnedFd> {
        (self.0.len() > 1).then(|| self.0.remove(1))
    }

    /// Claims the first of them.
    pub(crate) fn take_first(mut self) -> Option<OwnedFd> {
        (!self.0.is_empty()).then(|| self.0.remove(0))
    }
}

impl PacketFiles for ReceivedFds {
    fn len(&self) -> usize {
        self.len()
    }

    fn first(&self) -> Option<&OwnedFd> {
        self.first()
    }

    fn take_first(self) -> Option<OwnedFd> {
        self.take_first()
    }
}

impl FromIterator<OwnedFd> for ReceivedFds {
    fn from_iter<I: IntoIterator<Item = OwnedFd>>(fds: I) -> Self {
        Self(fds.into_iter().collect())
    }
}

impl Drop for ReceivedFds {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            close_elsewhere(std::mem::take(&mut self.0));
        }
    }
}

/// A socket that is connected to another process. A forked child leaves it alone: its copy was closed when it was forked, and
/// the number may be another descriptor's by now.
#[derive(Debug)]
pub(crate) struct PeerSocket {
    owner: Owner,
    /// `None` once it has been handed to the closing thread.
    socket: Option<(ClosedByFork, OwnedFd)>,
    /// May there be descriptors in its queue?
    may_bring_fds: bool,
}

impl PeerSocket {
    /// `may_bring_fds` is false for a socket that refuses descriptors ([`listen`]).
    pub(crate) fn new(socket: OwnedFd, may_bring_fds: bool) -> Self {
        let guard = ClosedByFork::new(socket.as_fd());
        Self { owner: Owner::current(), socket: Some((guard, socket)), may_bring_fds }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.owned().as_fd()
    }

    pub(crate) fn owned(&self) -> &OwnedFd {
        self.socket.as_ref().map(|(_, socket)| socket).expect("taken by drop alone")
    }

    /// Takes descriptors from now on.
    pub(crate) fn accept_fds(&mut self) {
        if !std::mem::replace(&mut self.may_bring_fds, true) {
            set_pass_rights(self.fd(), true);
        }
    }

    /// Receives the next message into `buffer`, unless it brings descriptors: to receive them, or to discard them, would close
    /// them on this thread. `AGAIN` if no message has arrived, `MSGSIZE` for one that is larger than [`MAX_MESSAGE_BYTES`].
    pub(crate) fn take_plain(&self, buffer: &mut Vec<u8>) -> rustix::io::Result<PlainMessage> {
        // Nothing is received that has not been looked at: a message that arrives after the look stays for the next call.
        if self.may_bring_fds && self.next_brings_fds()? {
            return Ok(PlainMessage::WithDescriptors);
        }
        let len = take_bytes(self.fd(), buffer)?;
        Ok(len.map_or(PlainMessage::Closed, PlainMessage::Bytes))
    }

    /// Returns whether the first message of the queue brings descriptors. `AGAIN` if the queue is empty.
    fn next_brings_fds(&self) -> rustix::io::Result<bool> {
        let mut byte = [0];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        loop {
            let mut control = RecvAncillaryBuffer::default();
            match recvmsg(self.fd(), &mut [IoSliceMut::new(&mut byte)], &mut control, flags) {
                // The kernel reports control data that does not fit the buffer, which has no room for any.
                Ok(peeked) => return Ok(peeked.flags.contains(ReturnFlags::CTRUNC)),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// The next message of a connection on which the peer may not send descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlainMessage {
    /// A message of this many bytes, which the buffer begins with.
    Bytes(usize),
    /// A message with descriptors. It stays in the queue.
    WithDescriptors,
    /// The peer has closed the connection.
    Closed,
}

impl Drop for PeerSocket {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            std::mem::forget(self.socket.take());
        } else if self.may_bring_fds {
            close_elsewhere(self.socket.take());
        }
    }
}

/// Listens. The kernel refuses descriptors (`SCM_RIGHTS`) for this listener and for the connections that it accepts, also
/// those that are sent before they are accepted; the result is false where it cannot, before Linux 6.16.
pub(crate) fn listen(listener: BorrowedFd<'_>, backlog: i32) -> rustix::io::Result<bool> {
    let refuses_fds = refuse_fds(listener);
    rustix::net::listen(listener, backlog)?;
    Ok(refuses_fds)
}

fn refuse_fds(socket: BorrowedFd<'_>) -> bool {
    set_pass_rights(socket, false)
}

fn set_pass_rights(socket: BorrowedFd<'_>, pass: bool) -> bool {
    /// Of `asm-generic/socket.h`.
    const SO_PASSRIGHTS: libc::c_int = 83;
    let value = libc::c_int::from(pass);
    // SAFETY: the pointer and the size are those of `value`.
    let status = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    status == 0
}

/// A message that lies in the buffer it was received with.
#[derive(Debug)]
pub(crate) struct ReceivedMessage {
    /// In bytes, from the buffer's begin.
    pub(crate) len: usize,
    pub(crate) fds: ReceivedFds,
}

impl fmt::Debug for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Packet({} bytes, {} descriptors)", self.bytes.len(), self.fds.len())
    }
}

/// A new non-blocking socket.
pub(crate) fn new_socket() -> rustix::io::Result<OwnedFd> {
    socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
}

/// Creates two connected non-blocking sockets.
pub(crate) fn pair() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Checks that a descriptor of a peer is a socket that keeps the bounds of packets.
pub(crate) fn check_seqpacket(socket: BorrowedFd<'_>) -> crate::model::error::Result<()> {
    match rustix::net::sockopt::socket_type(socket) {
        Ok(SocketType::SEQPACKET) => Ok(()),
        _ => Err(crate::model::error::Error::Protocol(
            "its hello contained a descriptor that is not a packet socket".into(),
        )),
    }
}

/// Connects a new socket, which sends nothing.
pub(crate) fn connect_to(address: &BrokerAddress) -> rustix::io::Result<OwnedFd> {
    let target = address.to_socket_address().map_err(|_| Errno::INVAL)?;
    let socket = new_socket()?;
    rustix::net::connect(&socket, &target)?;
    Ok(socket)
}

/// Sends one message, or says `AGAIN` where the peer does not read.
pub(crate) fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    loop {
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
        {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Receives one message. `None` at the end of the connection, `AGAIN` where there is none yet, `MSGSIZE` for one that
/// is larger than any of ours. One that lost some of its descriptors, as this process may have no more of them, comes with
/// none.
pub(crate) fn receive(socket: BorrowedFd<'_>, buffer: &mut Vec<u8>) -> rustix::io::Result<Option<Packet>> {
    let taken = take(socket, buffer)?;
    Ok(taken.map(|taken| packet(taken, buffer)))
}

fn packet(taken: ReceivedMessage, buffer: &[u8]) -> Packet {
    Packet { bytes: buffer[..taken.len].to_vec(), fds: taken.fds }
}

/// As [`receive`], and leaves the message in the buffer.
pub(crate) fn take(
    socket: BorrowedFd<'_>,
    buffer: &mut Vec<u8>,
) -> rustix::io::Result<Option<ReceivedMessage>> {
    loop {
        match take_as(socket, buffer, RecvFlags::DONTWAIT) {
            Err(Errno::INTR) => {}
            taken => return taken,
        }
    }
}

/// Receives one message and has no room for descriptors. `None` if the peer has closed the connection.
fn take_bytes(socket: BorrowedFd<'_>, buffer: &mut Vec<u8>) -> rustix::io::Result<Option<usize>> {
    make_room(buffer);
    loop {
        let mut control = RecvAncillaryBuffer::default();
        let flags = RecvFlags::DONTWAIT;
        match recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
            Ok(received) if received.flags.contains(ReturnFlags::TRUNC) => return Err(Errno::MSGSIZE),
            Ok(received) => return Ok(Some(received.bytes).filter(|bytes| *bytes > 0)),
        }
    }
}

/// Gives the buffer room for the largest message.
fn make_room(buffer: &mut Vec<u8>) {
    if buffer.is_empty() {
        // The system zeroes the pages that are used, and no others.
        *buffer = vec![0; MAX_MESSAGE_BYTES];
    } else {
        buffer.resize(MAX_MESSAGE_BYTES, 0);
    }
}

/// From now on [`take_asleep`] waits for a message, so long at most. Nothing else waits for that.
pub(crate) fn limit_receive_time(socket: BorrowedFd<'_>, longest: Duration) -> rustix::io::Result<()> {
    set_socket_timeout(socket, Timeout::Recv, Some(longest))?;
    rustix::io::ioctl_fionbio(socket, false)
}

/// As [`take`], asleep until there is a message: by one system call. `AGAIN` after a while, `INTR` for a signal.
pub(crate) fn take_asleep(
    socket: BorrowedFd<'_>,
    buffer: &mut Vec<u8>,
) -> rustix::io::Result<Option<ReceivedMessage>> {
    take_as(socket, buffer, RecvFlags::empty())
}

/// As [`receive`], asleep as [`take_asleep`] is.
pub(crate) fn receive_asleep(
    socket: BorrowedFd<'_>,
    buffer: &mut Vec<u8>,
) -> rustix::io::Result<Option<Packet>> {
    let taken = take_asleep(socket, buffer)?;
    Ok(taken.map(|taken| packet(taken, buffer)))
}

fn take_as(
    socket: BorrowedFd<'_>,
    buffer: &mut Vec<u8>,
    how: RecvFlags,
) -> rustix::io::Result<Option<ReceivedMessage>> {
    make_room(buffer);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, how | RecvFlags::CMSG_CLOEXEC)?;
    // Collected first, so that they are closed whatever is wrong with the message.
    let mut fds = ReceivedFds::default();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.0.extend(rights);
        }
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(Errno::MSGSIZE);
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        static WARNINGS: Throttle = Throttle::new();
        if let Some(count) = WARNINGS.count() {
            tracing::warn!(target: crate::os::log::TRANSPORT, count, "a message's descriptors were lost; raise this process's limit (ulimit -n)");
        }
        fds = ReceivedFds::default();
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    Ok(Some(ReceivedMessage { len: received.bytes, fds }))
}

/// Is the other end closed? Looks, and does not wait.
#[allow(clippy::disallowed_methods, reason = "it does not wait")]
pub(crate) fn has_hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::empty())];
    let polled = poll(&mut fds, Some(&clock::timespec(Duration::ZERO)));
    polled.is_ok() && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

/// Waits until the socket can be read, or written, or has ended. False when the deadline came first.
pub(crate) fn wait_until(
    socket: BorrowedFd<'_>,
    interest: PollFlags,
    deadline: Instant,
) -> rustix::io::Result<bool> {
    clock::poll(&mut [PollFd::from_borrowed_fd(socket, interest)], deadline)
}

/// The identity of the peer as reported by the kernel: a client's at its `connect`, a server's at its `listen`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerCredentials {
    /// In our pid namespace; 0 for a process of another one.
    pub(crate) pid: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// Asks the kernel for the identity of the peer of a connected socket (`SO_PEERCRED`, unix(7)).
pub(crate) fn peer_credentials(socket: &OwnedFd) -> std::io::Result<PeerCredentials> {
    let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the pointer and the size are those of `credentials`, which any bytes are a value of.
    let status = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut size,
        )
    };
    if status != 0 {
        return Err(std::io::Error::last_os_error());
    }
    let pid = u32::try_from(credentials.pid).unwrap_or(0);
    Ok(PeerCredentials { pid, uid: credentials.uid, gid: credentials.gid })
}

#[cfg(test)]
mod tests;
