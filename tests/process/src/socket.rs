//! Processes that exchange messages with file descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, Stdio};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair, sockopt,
};

/// Maximum size of a message in bytes.
const MESSAGE_BYTES: usize = 1 << 16;

/// A process whose standard input is a socket to this process, for messages that may carry a file descriptor.
#[derive(Debug)]
pub struct SocketProcess {
    child: Child,
    socket: OwnedFd,
}

impl SocketProcess {
    /// Starts a program.
    ///
    /// # Errors
    ///
    /// The system's error.
    pub fn start(mut command: Command) -> io::Result<Self> {
        let (socket, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(super::LIMIT))?;
        let child = command.stdin(Stdio::from(theirs)).stdout(Stdio::null()).spawn()?;
        Ok(Self { child, socket })
    }

    /// Returns its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a command and waits for the answer. Returns `None` if the process has ended or does not answer in time.
    pub fn ask(&self, command: &str, fd: Option<BorrowedFd<'_>>) -> Option<(String, Option<OwnedFd>)> {
        send(self.socket.as_fd(), command, fd);
        receive(self.socket.as_fd())
    }

    /// Kills the process by SIGKILL and reaps it.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for SocketProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// In a process of [`SocketProcess`]: serves commands until the first process exits. `execute` stores the file descriptor of an
/// answer in its last argument.
pub fn serve_socket(mut execute: impl FnMut(&str, Option<OwnedFd>, &mut Option<OwnedFd>) -> String) {
    let socket = io::stdin();
    while let Some((command, fd)) = receive(socket.as_fd()) {
        let mut passed = None;
        let answer = execute(&command, fd, &mut passed);
        send(socket.as_fd(), &answer, passed.as_ref().map(AsFd::as_fd));
    }
}

fn send(socket: BorrowedFd<'_>, text: &str, fd: Option<BorrowedFd<'_>>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fd.into_iter().collect();
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)), "room for one descriptor");
    }
    // A process that has exited sends no answer.
    let _ = sendmsg(socket, &[IoSlice::new(text.as_bytes())], &mut control, SendFlags::NOSIGNAL);
}

/// Receives a message; `None` at the end of the stream, and after the time limit.
fn receive(socket: BorrowedFd<'_>) -> Option<(String, Option<OwnedFd>)> {
    let mut bytes = vec![0; MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags).ok()?.bytes;
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    bytes.truncate(received);
    (received > 0).then(|| (String::from_utf8_lossy(&bytes).into_owned(), fd))
}
