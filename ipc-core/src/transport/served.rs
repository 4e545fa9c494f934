//! A connection that is served: requests of the socket to the session, replies of the session to the socket. Runs on the poller's
//! thread: nothing here may block.

use rustix::event::epoll::EventFlags;

use super::Metrics;
use super::connection::{Connection, Next};
use super::service::Session;

/// Maximum number of messages of one peer that are answered before the event loop turns to the others.
const MESSAGES_PER_TURN: u32 = 32;

/// A connection and the session of its peer.
pub(crate) struct Served<S> {
    pub(crate) connection: Connection,
    pub(crate) session: S,
}

impl<S: Session> Served<S> {
    /// Reads and answers the messages that have arrived.
    pub(crate) fn read(&mut self, buffer: &mut Vec<u8>, metrics: &Metrics) -> Next {
        let Self { connection, session } = self;
        connection.begin_period();
        for _ in 0..MESSAGES_PER_TURN {
            if let Some(until) = connection.rate_limit() {
                return Next::Pause(until);
            }
            if session.is_full() {
                return Next::Keep;
            }
            let request = match connection.take_request(buffer, metrics) {
                Ok(request) => request,
                Err(next) => return next,
            };
            let waits = request.has_an_answer();
            let next = session.answer(request, connection);
            // A peer that waits for a reply has mostly sent nothing behind; the kernel reports where there is more.
            if waits || next == Next::Close {
                return next;
            }
        }
        Next::Keep
    }

    /// Returns the events to wait for from now on, where they have changed.
    pub(super) fn take_change_of_interest(&mut self, paused: bool) -> Option<EventFlags> {
        self.connection.take_change_of_interest(!self.session.is_full(), paused)
    }
}
