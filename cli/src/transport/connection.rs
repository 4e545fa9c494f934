//! Connecting by TCP to a sender that may start later.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::arguments;

/// Interval between attempts to connect.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Connects to `HOST:PORT`; retries until a process listens there or the timeout, which ends at `end`, expires.
pub(crate) fn connect(
    address: &str,
    end: Instant,
    timeout: Duration,
    on_wait: impl FnOnce(),
) -> Result<TcpStream> {
    let mut on_wait = Some(on_wait);
    loop {
        let error = match try_connect(address, end)? {
            Ok(stream) => return Ok(stream),
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
