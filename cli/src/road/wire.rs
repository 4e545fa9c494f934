//! Bytes over TCP, always with a deadline for the whole of what is waited for: a peer that sends a byte now and then
//! gains no time by it.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// How long it takes until connecting is tried again.
const RETRY: Duration = Duration::from_millis(100);

/// When something has to have happened; `None` is never.
pub(crate) type Deadline = Option<Instant>;

/// A connection.
#[derive(Debug)]
pub(crate) struct Wire {
    stream: TcpStream,
}

impl Wire {
    pub(crate) fn new(stream: TcpStream) -> io::Result<Self> {
        // The listener does not block; its connections shall, within their deadlines.
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream })
    }

    /// Fills the buffer.
    pub(crate) fn read(&mut self, mut buffer: &mut [u8], deadline: Deadline) -> io::Result<()> {
        while !buffer.is_empty() {
            self.stream.set_read_timeout(left(deadline)?)?;
            match self.stream.read(buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => buffer = &mut buffer[read..],
                Err(error) => again(error)?,
            }
        }
        Ok(())
    }

    /// Writes all of it.
    pub(crate) fn write(&mut self, mut bytes: &[u8], deadline: Deadline) -> io::Result<()> {
        while !bytes.is_empty() {
            self.stream.set_write_timeout(left(deadline)?)?;
            match self.stream.write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => bytes = &bytes[written..],
                Err(error) => again(error)?,
            }
        }
        Ok(())
    }
}

/// What is left of the time. The system takes no time of zero.
fn left(deadline: Deadline) -> io::Result<Option<Duration>> {
    let Some(deadline) = deadline else { return Ok(None) };
    match deadline.checked_duration_since(Instant::now()) {
        Some(left) if !left.is_zero() => Ok(Some(left)),
        _ => Err(io::Error::new(io::ErrorKind::TimedOut, "the peer did not answer in time")),
    }
}

/// A read or write that came back because of its time limit or of a signal is tried again; `left` then looks at the clock.
fn again(error: io::Error) -> io::Result<()> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}

/// Connects to `HOST:PORT`, trying again until somebody listens there or the time is over.
pub(crate) fn connect(address: &str, patience: Duration, waiting: impl FnOnce()) -> Result<Wire> {
    let end = Instant::now() + patience;
    let mut waiting = Some(waiting);
    loop {
        let error = match try_connect(address, end)? {
            Ok(stream) => return Wire::new(stream).with_context(|| format!("connecting to {address}")),
            Err(error) => error,
        };
        let refused = matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::TimedOut);
        if !refused || Instant::now() + RETRY >= end {
            let seconds = patience.as_secs();
            return Err(error).with_context(|| {
                format!("nobody could be reached at {address} within {seconds} s; is 'device-ipc send --listen' running there?")
            });
        }
        if let Some(waiting) = waiting.take() {
            waiting();
        }
        // Nothing tells when somebody begins to listen.
        std::thread::sleep(RETRY);
    }
}

/// One attempt at each of the addresses that the name has.
fn try_connect(address: &str, end: Instant) -> Result<io::Result<TcpStream>> {
    let addresses: Vec<_> =
        address.to_socket_addrs().with_context(|| format!("{address:?} is no HOST:PORT"))?.collect();
    let mut outcome = None;
    for one in addresses {
        let left = end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        match TcpStream::connect_timeout(&one, left) {
            Ok(stream) => return Ok(Ok(stream)),
            Err(error) => outcome = Some(error),
        }
    }
    match outcome {
        Some(error) => Ok(Err(error)),
        None => bail!("{address:?} has no address"),
    }
}
