//! Reads and writes with a deadline for the whole operation, which a peer cannot extend by sending single bytes.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::error::TcpError;

/// The deadline of an operation; `None` waits without a limit.
pub type Deadline = Option<Instant>;

/// Returns 0 at the end of the stream.
fn try_read(mut stream: &TcpStream, buffer: &mut [u8], deadline: Deadline) -> io::Result<usize> {
    loop {
        stream.set_read_timeout(remaining(deadline)?)?;
        match stream.read(buffer) {
            Err(error) => retryable(error)?,
            read => return read,
        }
    }
}

fn try_write(mut stream: &TcpStream, bytes: &[u8], deadline: Deadline) -> io::Result<usize> {
    loop {
        stream.set_write_timeout(remaining(deadline)?)?;
        match stream.write(bytes) {
            Err(error) => retryable(error)?,
            written => return written,
        }
    }
}

/// Returns the remaining time, never zero, which the system does not accept.
fn remaining(deadline: Deadline) -> io::Result<Option<Duration>> {
    let Some(deadline) = deadline else { return Ok(None) };
    match deadline.checked_duration_since(Instant::now()) {
        Some(remaining) if !remaining.is_zero() => Ok(Some(remaining)),
        _ => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// Returns `Ok` for an error after which the call is repeated: a timeout, which `remaining` then checks, or a signal.
fn retryable(error: io::Error) -> io::Result<()> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}

/// Reads at least one byte. The step is part of the error.
pub(crate) fn read_some(
    stream: &TcpStream,
    buffer: &mut [u8],
    deadline: Deadline,
    step: &'static str,
) -> Result<usize, TcpError> {
    match try_read(stream, buffer, deadline) {
        Ok(0) => Err(TcpError::Closed { step }),
        Ok(read) => Ok(read),
        Err(cause) => Err(failed(step, cause)),
    }
}

/// Reads until the buffer is full. The step is part of the error.
pub(crate) fn read(
    stream: &TcpStream,
    mut buffer: &mut [u8],
    deadline: Deadline,
    step: &'static str,
) -> Result<(), TcpError> {
    while !buffer.is_empty() {
        let read = read_some(stream, buffer, deadline, step)?;
        buffer = &mut buffer[read..];
    }
    Ok(())
}

/// Writes all bytes. The step is part of the error.
pub(crate) fn write(
    stream: &TcpStream,
    mut bytes: &[u8],
    deadline: Deadline,
    step: &'static str,
) -> Result<(), TcpError> {
    while !bytes.is_empty() {
        match try_write(stream, bytes, deadline) {
            Ok(0) => return Err(TcpError::Closed { step }),
            Ok(written) => bytes = &bytes[written..],
            Err(cause) => return Err(failed(step, cause)),
        }
    }
    Ok(())
}

fn failed(step: &'static str, cause: io::Error) -> TcpError {
    // An error with a number is the system's: it has given up a peer that acknowledges nothing.
    if cause.kind() == io::ErrorKind::TimedOut && cause.raw_os_error().is_none() {
        TcpError::TimedOut { step }
    } else {
        TcpError::Io { step, cause }
    }
}
