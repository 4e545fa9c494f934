//! Bare sockets: sequenced packets, as the broker's, and nothing else.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen,
    recv, send, socket_with,
};

use crate::wait::TIMEOUT;

/// What fits a packet whatever the socket's buffers are.
const PIECE_BYTES: usize = 64 * 1024;

/// How long a silence lasts behind which others are measured.
const PAUSE: Duration = Duration::from_millis(1);

/// A connected socket. Reads give up after a while.
#[derive(Debug)]
pub(crate) struct Socket(OwnedFd);

impl Socket {
    fn of(socket: OwnedFd) -> Result<Self> {
        use rustix::net::sockopt::{Timeout, set_socket_timeout};
        set_socket_timeout(&socket, Timeout::Recv, Some(TIMEOUT)).context("setting a socket's timeout")?;
        Ok(Self(socket))
    }

    pub(crate) fn send(&self, bytes: &[u8]) -> Result<()> {
        let sent = send(&self.0, bytes, SendFlags::NOSIGNAL).context("sending")?;
        ensure!(sent == bytes.len(), "a packet was cut");
        Ok(())
    }

    /// The packet's length; 0 at the end of the connection.
    pub(crate) fn receive(&self, buffer: &mut [u8]) -> Result<usize> {
        Ok(recv(&self.0, buffer, RecvFlags::empty()).context("receiving")?.0)
    }

    /// Sends what need not fit a packet: its length, and the bytes in packets of their own.
    pub(crate) fn send_in_pieces(&self, bytes: &[u8]) -> Result<()> {
        self.send(&(bytes.len() as u64).to_le_bytes())?;
        bytes.chunks(PIECE_BYTES).try_for_each(|piece| self.send(piece))
    }

    /// Receives what came in pieces; false at the end of the connection.
    pub(super) fn receive_pieces(&self, bytes: &mut Vec<u8>) -> Result<bool> {
        let mut length = [0; 8];
        match self.receive(&mut length)? {
            0 => return Ok(false),
            8 => {}
            other => bail!("a length of {other} bytes"),
        }
        bytes.resize(usize::try_from(u64::from_le_bytes(length))?, 0);
        let mut filled = 0;
        while filled < bytes.len() {
            let received = self.receive(&mut bytes[filled..])?;
            ensure!(received > 0, "the connection ended between two pieces");
            filled += received;
        }
        Ok(true)
    }

    /// The same, looking again and again until a packet is there.
    pub(crate) fn spin(&self, buffer: &mut [u8]) -> Result<usize> {
        let begin = Instant::now();
        loop {
            match recv(&self.0, &mut *buffer, RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN) => ensure!(begin.elapsed() < TIMEOUT, "no packet came"),
                received => return Ok(received.context("receiving")?.0),
            }
        }
    }

    /// The same, and sleeping once none has come for a while: whatever else is measured then has the processors.
    fn spin_a_while(&self, buffer: &mut [u8]) -> Result<usize> {
        let begin = Instant::now();
        while begin.elapsed() < PAUSE {
            match recv(&self.0, &mut *buffer, RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN) => {}
                received => return Ok(received.context("receiving")?.0),
            }
        }
        self.receive(buffer)
    }

    /// There and back. The first four bytes of a request say how many the answer is to have.
    pub(crate) fn round_trip(&self, request: &[u8], answer: &mut [u8]) -> Result<()> {
        self.send(request)?;
        let received = self.receive(answer)?;
        ensure!(received == answer.len(), "an answer of {received} bytes instead of {}", answer.len());
        Ok(())
    }
}

/// A request of so many bytes for an answer of so many.
pub(crate) fn request(bytes: usize, answer: usize) -> Vec<u8> {
    let mut request = vec![0; bytes.max(4)];
    request[..4].copy_from_slice(&(answer as u32).to_ne_bytes());
    request
}

/// Connects to a name of the abstract namespace.
pub(crate) fn connect(name: &str) -> Result<Socket> {
    let socket = new_socket()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)
        .with_context(|| format!("connecting to the second process at {name}"))?;
    Socket::of(socket)
}

/// Listens under a name of its own; what is connected first is served by `body` on a thread, until it ends.
pub(super) fn serve(what: &str, body: impl FnOnce(Socket) -> Result<()> + Send + 'static) -> Result<String> {
    let name = format!("device-ipc-bench-{}-{what}", std::process::id());
    let listener = new_socket()?;
    bind(&listener, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)
        .with_context(|| format!("listening at {name}"))?;
    listen(&listener, 1).with_context(|| format!("listening at {name}"))?;
    std::thread::spawn(move || {
        let served = accept_with(listener.as_fd(), SocketFlags::CLOEXEC)
            .context("accepting a connection")
            .and_then(|accepted| body(Socket::of(accepted)?));
        if let Err(error) = served {
            eprintln!("error: the second process no longer answers on its socket: {error:#}");
        }
    });
    Ok(name)
}

/// Answers with as many bytes as each request asks for.
pub(super) fn echo(socket: &Socket, spins: bool) -> Result<()> {
    let (mut buffer, answer) = ([0; 64 * 1024], [0; 64 * 1024]);
    loop {
        let received = if spins { socket.spin_a_while(&mut buffer)? } else { socket.receive(&mut buffer)? };
        if received == 0 {
            return Ok(());
        }
        let wanted = u32::from_ne_bytes([buffer[0], buffer[1], buffer[2], buffer[3]]) as usize;
        ensure!(wanted <= answer.len(), "an answer of {wanted} bytes is too long");
        socket.send(&answer[..wanted])?;
    }
}

fn new_socket() -> Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        .context("creating a socket")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_no_packet_arrives_in_pieces() {
        let name = serve("pieces-test", |socket| {
            let mut bytes = Vec::new();
            while socket.receive_pieces(&mut bytes)? {
                socket.send(&(bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>()).to_le_bytes())?;
            }
            Ok(())
        });
        let socket = connect(&name.expect("it listens")).expect("it is there");
        for count in [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES] {
            let mut sum = [0; 8];
            socket.send_in_pieces(&vec![1; count]).expect("sent");
            assert_eq!(socket.receive(&mut sum).expect("answered"), 8);
            assert_eq!(u64::from_le_bytes(sum), count as u64);
        }
    }

    #[test]
    fn an_echo_answers_with_what_it_was_asked_for() {
        for (name, spins) in [("test", false), ("spinning-test", true)] {
            let name = serve(name, move |socket| echo(&socket, spins)).expect("it listens");
            let socket = connect(&name).expect("it is there");
            for (there, back) in [(4, 1), (100, 300), (1, 7)] {
                socket.round_trip(&request(there, back), &mut vec![0; back]).expect("it answers");
            }
        }
    }
}
