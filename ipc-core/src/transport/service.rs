//! The traits that the layer above implements to answer the processes that connect.
//!
//! The event loop owns the sockets: it accepts, checks the peer's user, bounds and decodes messages, queues replies, and closes.
//! A [`Service`] decides what a request means. Every method runs on the poller's thread: none may call a driver, run the user's
//! code, or wait.

use std::time::Instant;

use super::connection::{Connection, Next};
use super::socket::PeerCredentials;
use crate::wire::protocol::Request;

/// Tells connections apart; never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ConnectionId(pub(crate) u64);

/// A process's answers to its peers.
pub(crate) trait Service: Send + Sized + 'static {
    /// The state of one connection.
    type Session: Session;
    /// A command from another thread of this process.
    type Command: Send + 'static;

    /// Returns whether the peer may connect at all.
    fn permits(&self, peer: &PeerCredentials) -> bool;

    /// Begins the session of a connection that was accepted.
    fn connected(&mut self, connection: ConnectionId) -> Self::Session;

    /// Ends the session of a connection that has closed.
    fn closed(&mut self, session: Self::Session, peer: &PeerCredentials);

    /// Runs a command.
    fn run(&mut self, command: Self::Command);

    /// Returns the time of the next call of [`run_timers`](Self::run_timers).
    fn next_timer(&self) -> Option<Instant>;

    /// Runs everything that is due.
    fn run_timers<'a>(&mut self, now: Instant, sessions: impl Iterator<Item = &'a Self::Session>)
    where
        Self::Session: 'a;
}

/// The state of one connection that is served.
pub(crate) trait Session: Send {
    /// An event from another thread of this process, for this connection.
    type Event: Send + 'static;

    /// Answers a request.
    fn answer(&mut self, request: Request, connection: &mut Connection) -> Next;

    /// Handles an event.
    fn handle(&mut self, event: Self::Event, connection: &mut Connection) -> Next;

    /// Returns whether the peer has introduced itself. A connection whose peer does not is closed after a while.
    fn has_said_hello(&self) -> bool;

    /// Returns whether the session holds something for its peer. A connection without makes room for new ones.
    fn has_leases(&self) -> bool;

    /// Returns whether the maximum number of requests is in progress: no more are read until one of them has been answered.
    fn is_full(&self) -> bool;
}
