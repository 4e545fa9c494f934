//! Bare sockets: sequenced packets, as the broker's, and nothing else.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result, ensure};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen,
    recv, send, socket_with,
};

use super::super::frame::PATIENCE;

/// A connected socket. Reads give up after a while.
#[derive(Debug)]
pub(in crate::bench) struct Socket(OwnedFd);

impl Socket {
    fn of(socket: OwnedFd) -> Result<Self> {
        use rustix::net::sockopt::{Timeout, set_socket_timeout};
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE)).context("setting a socket's timeout")?;
        Ok(Self(socket))
    }

    pub(in crate::bench) fn send(&self, bytes: &[u8]) -> Result<()> {
        let sent = send(&self.0, bytes, SendFlags::NOSIGNAL).context("sending")?;
        ensure!(sent == bytes.len(), "a packet was cut");
        Ok(())
    }

    /// The packet's length; 0 at the end of the connection.
    pub(in crate::bench) fn receive(&self, buffer: &mut [u8]) -> Result<usize> {
        Ok(recv(&self.0, buffer, RecvFlags::empty()).context("receiving")?.0)
    }

    /// There and back. The first four bytes of a request say how many the answer is to have.
    pub(in crate::bench) fn round_trip(&self, request: &[u8], answer: &mut [u8]) -> Result<()> {
        self.send(request)?;
        let received = self.receive(answer)?;
        ensure!(received == answer.len(), "an answer of {received} bytes instead of {}", answer.len());
        Ok(())
    }
}

/// A request of so many bytes for an answer of so many.
pub(in crate::bench) fn request(bytes: usize, answer: usize) -> Vec<u8> {
    let mut request = vec![0; bytes.max(4)];
    request[..4].copy_from_slice(&(answer as u32).to_ne_bytes());
    request
}

/// Connects to a name of the abstract namespace.
pub(in crate::bench) fn connect(name: &str) -> Result<Socket> {
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
pub(super) fn echo(socket: &Socket) -> Result<()> {
    let (mut buffer, answer) = ([0; 64 * 1024], [0; 64 * 1024]);
    loop {
        let received = socket.receive(&mut buffer)?;
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
    fn an_echo_answers_with_what_it_was_asked_for() {
        let name = serve("test", |socket| echo(&socket)).expect("it listens");
        let socket = connect(&name).expect("it is there");
        for (there, back) in [(4, 1), (100, 300), (1, 7)] {
            socket.round_trip(&request(there, back), &mut vec![0; back]).expect("it answers");
        }
    }
}
