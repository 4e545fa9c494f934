//! TCP connections with a deadline for each complete read or write, which a peer cannot extend by sending single bytes.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::arguments;

/// Interval between attempts to connect.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// The deadline of an operation; `None` waits without a limit.
pub(crate) type Deadline = Option<Instant>;

/// A TCP connection.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
}

impl Connection {
    pub(crate) fn new(stream: TcpStream) -> io::Result<Self> {
        // Connections block within their deadlines, whatever mode they inherit from the listener.
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream })
    }

    /// Reads until the buffer is full.
    pub(crate) fn read(&mut self, mut buffer: &mut [u8], deadline: Deadline) -> io::Result<()> {
        while !buffer.is_empty() {
            self.stream.set_read_timeout(remaining(deadline)?)?;
            match self.stream.read(buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => buffer = &mut buffer[read..],
                Err(error) => retryable(error)?,
            }
        }
        Ok(())
    }

    /// Writes all bytes.
    pub(crate) fn write(&mut self, mut bytes: &[u8], deadline: Deadline) -> io::Result<()> {
        while !bytes.is_empty() {
            self.stream.set_write_timeout(remaining(deadline)?)?;
            match self.stream.write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => bytes = &bytes[written..],
                Err(error) => retryable(error)?,
            }
        }
        Ok(())
    }
}

/// Returns the remaining time, never zero, which the system does not accept.
fn remaining(deadline: Deadline) -> io::Result<Option<Duration>> {
    let Some(deadline) = deadline else { return Ok(None) };
    match deadline.checked_duration_since(Instant::now()) {
        Some(remaining) if !remaining.is_zero() => Ok(Some(remaining)),
        _ => Err(io::Error::new(io::ErrorKind::TimedOut, "timed out: the peer did not answer in time")),
    }
}

/// Returns `Ok` for an error after which the call is repeated: a timeout, which `remaining` then checks, or a signal.
fn retryable(error: io::Error) -> io::Result<()> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}

/// Connects to `HOST:PORT`; retries until a process listens there or the timeout expires.
pub(crate) fn connect(address: &str, timeout: Duration, on_wait: impl FnOnce()) -> Result<Connection> {
    let end = Instant::now() + timeout;
    let mut on_wait = Some(on_wait);
    loop {
        let error = match try_connect(address, end)? {
            Ok(stream) => {
                return Connection::new(stream).with_context(|| format!("cannot connect to {address}"));
            }
            Err(error) => error,
        };
        let refused = matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::TimedOut);
        if !refused || Instant::now() + RETRY_INTERVAL >= end {
            let timeout = arguments::shown(timeout);
            return Err(error).with_context(|| {
                format!("cannot connect to {address} within {timeout}; check that 'device-ipc send --listen' is running there")
            });
        }
        if let Some(on_wait) = on_wait.take() {
            on_wait();
        }
        // No notification exists for the start of a listener.
        std::thread::sleep(RETRY_INTERVAL);
    }
}

/// Tries each address of the host once.
fn try_connect(address: &str, end: Instant) -> Result<io::Result<TcpStream>> {
    let addresses: Vec<_> = address
        .to_socket_addrs()
        .with_context(|| format!("invalid address {address:?}: expected HOST:PORT"))?
        .collect();
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
        None => bail!("invalid address {address:?}: the host name has no address"),
    }
}
