//! The authenticated connection between an importer and an exporter of two hosts.

use std::convert::Infallible;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use device_ipc_tcp::{AuthenticatedConnection, TcpError};
use rustix::event::{PollFd, PollFlags};

use crate::os::{ClosedByFork, Pace, PollMode, clock};

/// The time for which a receive waits for the rest of a message whose first bytes have arrived. The next one continues with it.
const REST_OF_MESSAGE: Duration = Duration::from_millis(100);

/// A connection after the handshake. Forked children close it.
#[derive(Debug)]
pub(super) struct Control {
    _closed_by_fork: ClosedByFork,
    connection: AuthenticatedConnection,
    pace: Pace,
}

impl Control {
    pub(super) fn new(connection: AuthenticatedConnection) -> Self {
        Self {
            _closed_by_fork: ClosedByFork::new(connection.socket().as_fd()),
            connection,
            pace: Pace::default(),
        }
    }

    /// Sends a message.
    pub(super) fn send(&mut self, message: &[u8], until: Instant) -> Result<(), TcpError> {
        self.connection.send(message, Some(clock::to_system(until)))
    }

    /// Waits for the reply to a request: spins before it sleeps, as long as replies arrive meanwhile.
    pub(super) fn wait_for_reply(&mut self, time: Duration) {
        let Self { connection, pace, .. } = self;
        let until = clock::now() + time;
        let waited = pace.wait(Some(until), |mode| {
            let left = match mode {
                PollMode::Now => Duration::ZERO,
                PollMode::Sleep => clock::left(until),
            };
            let has_occurred = wait(connection.socket().as_fd(), left, None) || mode == PollMode::Sleep;
            Ok::<_, Infallible>(has_occurred.then_some(()))
        });
        waited.unwrap_or_else(|never| match never {});
    }

    /// Receives a message, if one arrives within `wait`.
    pub(super) fn receive(&mut self, wait: Duration) -> Result<Option<Vec<u8>>, TcpError> {
        if !self.wait(wait, None) {
            return Ok(None);
        }
        match self.connection.receive(Some(clock::to_system(clock::now() + REST_OF_MESSAGE))) {
            Err(TcpError::TimedOut { .. }) => Ok(None),
            received => received.map(Some),
        }
    }

    /// Waits until there are bytes, the connection is closed, or another descriptor is readable. Returns whether one of these has
    /// occurred.
    pub(super) fn wait(&self, time: Duration, or: Option<BorrowedFd<'_>>) -> bool {
        wait(self.connection.socket().as_fd(), time, or)
    }
}

fn wait(socket: BorrowedFd<'_>, time: Duration, or: Option<BorrowedFd<'_>>) -> bool {
    let mut files = [socket, or.unwrap_or(socket)].map(|file| PollFd::from_borrowed_fd(file, PollFlags::IN));
    // After an error the read reports it.
    clock::poll(&mut files[..1 + usize::from(or.is_some())], clock::now() + time) != Ok(false)
}
