//! The authenticated connection between an importer and an exporter of two hosts.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use device_ipc_tcp::{AuthenticatedConnection, TcpError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::os::ClosedByFork;

/// The time for which a receive waits for the rest of a message whose first bytes have arrived. The next one continues with it.
const REST_OF_MESSAGE: Duration = Duration::from_millis(100);

/// A connection after the handshake. Forked children close it.
#[derive(Debug)]
pub(super) struct Control {
    _closed_by_fork: ClosedByFork,
    connection: AuthenticatedConnection,
}

impl Control {
    pub(super) fn new(connection: AuthenticatedConnection) -> Self {
        Self { _closed_by_fork: ClosedByFork::new(connection.socket().as_fd()), connection }
    }

    /// Sends a message.
    pub(super) fn send(&mut self, message: &[u8], until: Instant) -> Result<(), TcpError> {
        self.connection.send(message, Some(until))
    }

    /// Receives a message, if one arrives within `wait`.
    pub(super) fn receive(&mut self, wait: Duration) -> Result<Option<Vec<u8>>, TcpError> {
        if !self.is_readable(wait) {
            return Ok(None);
        }
        match self.connection.receive(Some(Instant::now() + REST_OF_MESSAGE)) {
            Err(TcpError::TimedOut { .. }) => Ok(None),
            received => received.map(Some),
        }
    }

    /// Waits until there are bytes, or the connection is closed.
    fn is_readable(&self, wait: Duration) -> bool {
        let wait = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
        let mut files = [PollFd::new(self.connection.socket(), PollFlags::IN)];
        // After an error the read reports it.
        poll(&mut files, Some(&wait)) != Ok(0)
    }
}
