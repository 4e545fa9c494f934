//! Raw sockets with sequenced packets, like the broker's.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen,
    recv, send, socket_with,
};

use super::serve::in_background;
use crate::wait::TIMEOUT;

/// Maximum size of a packet, independent of the buffers of the socket.
const PIECE_BYTES: usize = 64 * 1024;

/// Time without a packet after which an echo sleeps instead of spinning.
const SPIN_TIME: Duration = Duration::from_millis(1);

/// A connected socket. Receiving has a timeout.
#[derive(Debug)]
pub(crate) struct Socket(OwnedFd);

impl Socket {
    fn of(socket: OwnedFd) -> Result<Self> {
        use rustix::net::sockopt::{Timeout, set_socket_timeout};
        set_socket_timeout(&socket, Timeout::Recv, Some(TIMEOUT))
            .context("cannot set the timeout of a socket")?;
        Ok(Self(socket))
    }

    pub(crate) fn send(&self, bytes: &[u8]) -> Result<()> {
        let sent = send(&self.0, bytes, SendFlags::NOSIGNAL).context("cannot send a packet")?;
        ensure!(sent == bytes.len(), "a packet was truncated");
        Ok(())
    }

    /// Receives a packet and returns its length; 0 if the connection is closed.
    pub(crate) fn receive(&self, buffer: &mut [u8]) -> Result<usize> {
        Ok(recv(&self.0, buffer, RecvFlags::empty()).context("cannot receive a packet")?.0)
    }

    /// Sends any number of bytes: their length, then the bytes in as many packets as required.
    pub(crate) fn send_in_pieces(&self, bytes: &[u8]) -> Result<()> {
        self.send(&(bytes.len() as u64).to_le_bytes())?;
        bytes.chunks(PIECE_BYTES).try_for_each(|piece| self.send(piece))
    }

    /// Receives bytes that were sent in pieces; returns false if the connection is closed.
    pub(super) fn receive_pieces(&self, bytes: &mut Vec<u8>) -> Result<bool> {
        let mut length = [0; 8];
        match self.receive(&mut length)? {
            0 => return Ok(false),
            8 => {}
            other => bail!("protocol violation: a length of {other} B instead of 8 B"),
        }
        bytes.resize(usize::try_from(u64::from_le_bytes(length))?, 0);
        let mut filled = 0;
        while filled < bytes.len() {
            let received = self.receive(&mut bytes[filled..])?;
            ensure!(received > 0, "the connection was closed between two pieces");
            filled += received;
        }
        Ok(true)
    }

    /// Receives a packet; spins until it arrives, at most for a time.
    fn spin_for(&self, buffer: &mut [u8], time: Duration) -> Result<Option<usize>> {
        let begin = Instant::now();
        while begin.elapsed() < time {
            match recv(&self.0, &mut *buffer, RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN) => {}
                received => return Ok(Some(received.context("cannot receive a packet")?.0)),
            }
        }
        Ok(None)
    }

    /// Receives a packet; spins until it arrives.
    pub(crate) fn spin(&self, buffer: &mut [u8]) -> Result<usize> {
        self.spin_for(buffer, TIMEOUT)?.context("timed out: no packet arrived")
    }

    /// Sends a request and receives the answer. The first four bytes of a request contain the length of the answer.
    pub(crate) fn round_trip(&self, request: &[u8], answer: &mut [u8]) -> Result<()> {
        self.send(request)?;
        let received = self.receive(answer)?;
        ensure!(received == answer.len(), "an answer of {received} B instead of {} B", answer.len());
        Ok(())
    }
}

/// Returns a request with this length for an answer with that length.
pub(crate) fn request(bytes: usize, answer: usize) -> Vec<u8> {
    let mut request = vec![0; bytes.max(4)];
    request[..4].copy_from_slice(&(answer as u32).to_ne_bytes());
    request
}

/// Connects to a name in the abstract namespace.
pub(crate) fn connect(name: &str) -> Result<Socket> {
    let socket = new_socket()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)
        .with_context(|| format!("cannot connect to the peer process at {name}"))?;
    Socket::of(socket)
}

/// Listens under a new name; a thread accepts the first connection and serves it with `body`.
pub(super) fn serve(
    suffix: &str,
    body: impl FnOnce(Socket) -> Result<()> + Send + 'static,
) -> Result<String> {
    let name = format!("device-ipc-bench-{}-{suffix}", std::process::id());
    let listener = new_socket()?;
    bind(&listener, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)
        .with_context(|| format!("cannot listen at {name}"))?;
    listen(&listener, 1).with_context(|| format!("cannot listen at {name}"))?;
    in_background(move || {
        let accepted = accept_with(listener.as_fd(), SocketFlags::CLOEXEC);
        body(Socket::of(accepted.context("cannot accept a connection")?)?)
    });
    Ok(name)
}

/// Answers each request with the requested number of bytes.
pub(super) fn echo(socket: &Socket, spins: bool) -> Result<()> {
    let (mut buffer, answer) = ([0; 64 * 1024], [0; 64 * 1024]);
    loop {
        // Sleeps after a short spin, so that other measurements have the processor.
        let early = if spins { socket.spin_for(&mut buffer, SPIN_TIME)? } else { None };
        let received = early.map_or_else(|| socket.receive(&mut buffer), Ok)?;
        if received == 0 {
            return Ok(());
        }
        let requested = u32::from_ne_bytes([buffer[0], buffer[1], buffer[2], buffer[3]]) as usize;
        ensure!(requested <= answer.len(), "an answer of {requested} B is out of range");
        socket.send(&answer[..requested])?;
    }
}

fn new_socket() -> Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .context("cannot create a socket")
}
