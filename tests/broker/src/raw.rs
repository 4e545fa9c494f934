//! Both sides of the protocol without the library.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, recvmsg, sendmsg, socket_with, sockopt::socket_peercred,
};

use crate::forged::Forged;
use crate::protocol::{FromExporter, ToExporter};

/// As many descriptors as the kernel takes in one packet.
const MOST_DESCRIPTORS: usize = 253;

/// A connection.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
}

/// The result of a receive.
#[derive(Debug)]
pub enum Received {
    /// A packet.
    Packet(Vec<u8>, Vec<OwnedFd>),
    /// The other side has closed the connection.
    Closed,
    /// Nothing, for as long as was waited.
    Nothing,
}

impl Connection {
    /// Over a socket that is connected.
    pub fn over(socket: OwnedFd) -> Self {
        Self { socket }
    }

    /// Connects to an abstract name. Says nothing.
    pub fn to(name: &[u8]) -> rustix::io::Result<Self> {
        let socket = new_socket()?;
        connect(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
        Ok(Self { socket })
    }

    /// Connects to an abstract name, unless its queue is full.
    pub fn try_to(name: &[u8]) -> rustix::io::Result<Self> {
        let socket = new_socket()?;
        rustix::io::ioctl_fionbio(&socket, true)?;
        connect(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
        rustix::io::ioctl_fionbio(&socket, false)?;
        Ok(Self { socket })
    }

    /// Connects to the descriptor's exporter and exchanges hellos.
    #[track_caller]
    pub fn greeted(target: &Forged) -> Self {
        let connection = Self::to(target.address()).expect("it listens");
        connection.send(&ToExporter::Hello { protocol: 1, program: "raw".into() }).expect("it reads");
        match connection.receive_message() {
            FromExporter::Hello { protocol: 1, exporter } => assert_eq!(exporter, target.exporter()),
            other => panic!("no hello, but {other:?}"),
        }
        connection
    }

    /// Sends bytes as a packet, and waits for room.
    pub fn send_bytes(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
        self.send_flagged(bytes, descriptors, SendFlags::NOSIGNAL)
    }

    /// Sends bytes as a packet, unless there is no room.
    pub fn try_send_bytes(&self, bytes: &[u8]) -> rustix::io::Result<()> {
        self.send_flagged(bytes, &[], SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    fn send_flagged(
        &self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
        flags: SendFlags,
    ) -> rustix::io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)), "they fit");
        }
        sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, flags).map(drop)
    }

    /// Sends a message.
    pub fn send<T: serde::Serialize>(&self, message: &T) -> rustix::io::Result<()> {
        self.send_bytes(&postcard::to_stdvec(message).expect("it can be encoded"), &[])
    }

    /// Returns the number of descriptors that have been sent to it, and that it has not received. `None` where the kernel does not say, before
    /// Linux 5.6.
    pub fn descriptors_in_transit(&self) -> Option<usize> {
        let path = format!("/proc/self/fdinfo/{}", self.socket.as_raw_fd());
        let information = std::fs::read_to_string(path).expect("the socket is open");
        let number = information.lines().find_map(|line| line.strip_prefix("scm_fds:"))?;
        Some(number.trim().parse().expect("a number"))
    }

    /// Waits for a packet, with a time limit.
    pub fn receive(&self, patience: Duration) -> Received {
        if !readable(&self.socket, patience) {
            return Received::Nothing;
        }
        let mut buffer = vec![0; 256 * 1024];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let bytes = loop {
            match recvmsg(&self.socket, &mut [IoSliceMut::new(&mut buffer)], &mut control, flags) {
                Ok(received) => break received.bytes,
                // Reported once, where the other side closed over something of ours; what it had sent is still there.
                Err(Errno::CONNRESET) => {}
                Err(error) => panic!("{error}"),
            }
        };
        if bytes == 0 {
            return Received::Closed;
        }
        buffer.truncate(bytes);
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        Received::Packet(buffer, descriptors)
    }

    /// The exporter's next message.
    #[track_caller]
    pub fn receive_message(&self) -> FromExporter {
        match self.receive(crate::DEADLINE) {
            Received::Packet(bytes, _) => match postcard::take_from_bytes(&bytes) {
                Ok((message, [])) => message,
                other => panic!("not as it is documented: {other:?} from {bytes:?}"),
            },
            other => panic!("no message, but {other:?}"),
        }
    }

    /// Passes over what comes, until the other side closes the connection.
    #[track_caller]
    pub fn is_closed_within(&self, patience: Duration) {
        let until = Instant::now() + patience;
        loop {
            match self.receive(until.saturating_duration_since(Instant::now())) {
                Received::Closed => return,
                Received::Packet(..) => {}
                Received::Nothing => panic!("the connection stays open"),
            }
        }
    }

    /// Has the other side closed the connection?
    pub fn is_closed(&self) -> bool {
        let mut events = [PollFd::new(&self.socket, PollFlags::IN)];
        let _ = poll(&mut events, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        events[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }
}

/// An open of what the descriptor names.
pub fn open_request(target: &Forged, request: u64) -> ToExporter {
    ToExporter::Open(target.open(request))
}

/// Listens at a name, and is no broker.
#[derive(Debug)]
pub struct FakeServer {
    socket: OwnedFd,
}

impl FakeServer {
    /// Listens at an abstract name.
    pub fn at(name: &[u8]) -> Self {
        Self::at_address(&SocketAddrUnix::new_abstract_name(name).expect("a name"))
    }

    /// Listens at a path.
    pub fn at_path(path: &Path) -> Self {
        Self::at_address(&SocketAddrUnix::new(path).expect("a path"))
    }

    fn at_address(address: &SocketAddrUnix) -> Self {
        let socket = new_socket().expect("a socket");
        bind(&socket, address).expect("the name is free");
        listen(&socket, 16).expect("it can listen");
        Self { socket }
    }

    /// The next one that comes.
    #[track_caller]
    pub fn accept(&self) -> Connection {
        assert!(readable(&self.socket, crate::DEADLINE), "nobody comes");
        let socket = accept_with(&self.socket, SocketFlags::CLOEXEC).expect("somebody came");
        Connection { socket }
    }

    /// Returns whether this process is among those that have connected. A process that lists exports connects too.
    pub fn is_visited_by(&self, process: u32) -> bool {
        std::iter::from_fn(|| readable(&self.socket, Duration::ZERO).then(|| self.accept())).any(|visit| {
            let peer = socket_peercred(&visit.socket).expect("the kernel knows it");
            peer.pid.as_raw_nonzero().get() as u32 == process
        })
    }
}

fn new_socket() -> rustix::io::Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

fn readable(socket: &OwnedFd, patience: Duration) -> bool {
    let until = Instant::now() + patience;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let time = Timespec::try_from(left).expect("not that long");
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&time)) {
            Ok(0) if left.is_zero() => return false,
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return true,
            Err(error) => panic!("{error}"),
        }
    }
}
