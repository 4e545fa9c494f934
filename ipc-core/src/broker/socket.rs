//! Sequenced packets over Unix sockets: whole messages with file descriptors, and who is at the other end.
//!
//! `SOCK_SEQPACKET` keeps the bounds of messages and ties descriptors to the message they came with (unix(7)), so a
//! peer cannot get us out of step.

#![allow(unsafe_code, reason = "SO_PEERCRED with the process id 0, which rustix's type cannot hold")]

use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socket_with,
};

/// The most file descriptors that the kernel takes in one message (`SCM_MAX_FD`).
pub(crate) const MAX_FDS: usize = 253;

/// The largest message in bytes. Below the default size of a socket's buffer.
pub(crate) const MAX_MESSAGE_BYTES: usize = 128 * 1024;

/// A message as it arrived. Not shown by `Debug`: it may hold a token or a handle.
pub(crate) struct Packet {
    pub(crate) bytes: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

/// A message that lies in the buffer it was received with.
#[derive(Debug)]
pub(crate) struct Taken {
    /// In bytes, from the buffer's begin.
    pub(crate) len: usize,
    pub(crate) fds: Vec<OwnedFd>,
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

fn packet(taken: Taken, buffer: &[u8]) -> Packet {
    Packet { bytes: buffer[..taken.len].to_vec(), fds: taken.fds }
}

/// As [`receive`], and leaves the message in the buffer.
pub(crate) fn take(socket: BorrowedFd<'_>, buffer: &mut Vec<u8>) -> rustix::io::Result<Option<Taken>> {
    loop {
        match take_as(socket, buffer, RecvFlags::DONTWAIT) {
            Err(Errno::INTR) => {}
            taken => return taken,
        }
    }
}

/// From now on [`take_asleep`] waits for a message, so long at most. Nothing else waits for that.
pub(crate) fn let_sleep(socket: BorrowedFd<'_>, longest: Duration) -> rustix::io::Result<()> {
    set_socket_timeout(socket, Timeout::Recv, Some(longest))?;
    rustix::io::ioctl_fionbio(socket, false)
}

/// As [`take`], asleep until there is a message: by one system call. `AGAIN` after a while, `INTR` for a signal.
pub(crate) fn take_asleep(socket: BorrowedFd<'_>, buffer: &mut Vec<u8>) -> rustix::io::Result<Option<Taken>> {
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
) -> rustix::io::Result<Option<Taken>> {
    buffer.resize(MAX_MESSAGE_BYTES, 0);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, how | RecvFlags::CMSG_CLOEXEC)?;
    // Collected first, so that they are closed whatever is wrong with the message.
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(Errno::MSGSIZE);
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        tracing::warn!("a message's descriptors were lost; raise this process's limit (ulimit -n)");
        fds.clear();
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    Ok(Some(Taken { len: received.bytes, fds }))
}

/// Is the other end closed? Looks, and does not wait.
pub(crate) fn has_hung_up(socket: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::empty())];
    let polled = poll(&mut fds, Some(&timespec(Duration::ZERO)));
    polled.is_ok() && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}

/// Waits until the socket can be read, or written, or has ended. False when the deadline came first.
pub(crate) fn wait_until(
    socket: BorrowedFd<'_>,
    interest: PollFlags,
    deadline: Instant,
) -> rustix::io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::from_borrowed_fd(socket, interest)];
        match poll(&mut fds, Some(&timespec(left))) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error),
        }
    }
}

/// A time for the kernel; what does not fit is as good as for ever.
pub(crate) fn timespec(time: Duration) -> Timespec {
    Timespec::try_from(time).unwrap_or(Timespec { tv_sec: i64::from(i32::MAX), tv_nsec: 0 })
}

/// Who is at the other end, as the kernel says: of a client its `connect`, of a server its `listen`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerCredentials {
    /// In our pid namespace; 0 for a process of another one.
    pub(crate) pid: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// Asks the kernel who is at the other end of a connected socket (`SO_PEERCRED`, unix(7)).
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
mod tests {
    use super::*;
    use rustix::net::socketpair;

    fn pair() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    }

    #[test]
    fn messages_keep_their_bounds_and_their_descriptors() {
        let (near, far) = pair();
        let mut buffer = Vec::new();
        assert_eq!(receive(far.as_fd(), &mut buffer).unwrap_err(), Errno::AGAIN);
        send(near.as_fd(), b"one", &[near.as_fd(), far.as_fd()]).unwrap();
        send(near.as_fd(), b"two", &[]).unwrap();
        let one = receive(far.as_fd(), &mut buffer).unwrap().unwrap();
        assert_eq!((one.bytes.as_slice(), one.fds.len()), (&b"one"[..], 2));
        let two = receive(far.as_fd(), &mut buffer).unwrap().unwrap();
        assert_eq!((two.bytes.as_slice(), two.fds.len()), (&b"two"[..], 0));
        drop(one);
        drop(near);
        assert!(receive(far.as_fd(), &mut buffer).unwrap().is_none());
    }

    #[test]
    fn a_message_that_is_too_large_is_refused_whole() {
        let (near, far) = pair();
        send(near.as_fd(), &vec![7; MAX_MESSAGE_BYTES + 1], &[near.as_fd()]).unwrap();
        assert_eq!(receive(far.as_fd(), &mut Vec::new()).unwrap_err(), Errno::MSGSIZE);
    }

    #[test]
    fn a_peer_that_does_not_read_does_not_block_us() {
        let (near, _far) = pair();
        let sent = (0..100_000).find_map(|_| send(near.as_fd(), &[0; 1024], &[]).err());
        assert_eq!(sent, Some(Errno::AGAIN));
    }

    #[test]
    fn a_receiver_sleeps_until_a_message_or_the_end_comes_but_not_longer_than_it_was_let() {
        let (near, far) = pair();
        let mut buffer = Vec::new();
        let_sleep(far.as_fd(), Duration::from_millis(20)).unwrap();
        let begin = Instant::now();
        assert_eq!(take_asleep(far.as_fd(), &mut buffer).unwrap_err(), Errno::AGAIN);
        // The kernel counts in ticks.
        assert!(begin.elapsed() >= Duration::from_millis(10));
        assert_eq!(take(far.as_fd(), &mut buffer).unwrap_err(), Errno::AGAIN, "this one never sleeps");
        let_sleep(far.as_fd(), Duration::from_secs(60)).unwrap();
        let length = || take_asleep(far.as_fd(), &mut Vec::new()).unwrap().map(|taken| taken.len);
        std::thread::scope(|scope| {
            let asleep = scope.spawn(length);
            send(near.as_fd(), b"one", &[]).unwrap();
            assert_eq!(asleep.join().unwrap(), Some(3));
            let asleep = scope.spawn(length);
            drop(near);
            assert_eq!(asleep.join().unwrap(), None, "the end of the connection");
        });
    }

    #[test]
    fn the_kernel_says_who_the_peer_is() {
        let (near, _far) = pair();
        let peer = peer_credentials(&near).unwrap();
        assert_eq!(peer.pid, std::process::id());
        assert_eq!(peer.uid, rustix::process::geteuid().as_raw());
    }
}
