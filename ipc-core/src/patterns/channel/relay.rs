//! The relay of a channel to another host: two threads of this process that act as the peer.
//!
//! The end of this process is an ordinary [`ChannelConnection`] whose sockets and page belong to this process alone. One thread, the
//! *sender*, takes packets out of the socket and sends their messages by TCP, and the counters that the process has changed. The
//! other one, the *receiver*, puts the messages of the other host into the socket, and the counters of the other process into
//! the page. So limits, descriptors for event loops, closing and errors are those of a channel within one host.
//!
//! The receiver never waits for this process, so that counters always arrive: a sender has at most [`WINDOW`] messages on the
//! way that the other process has not received, and the packets of that many fit into the socket, because longer messages are
//! in memory files.
//!
//! Device words are not shared between hosts. The host waits for the streams of a message before it sends the message.

mod receiver;
mod sender;

use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use device_ipc_tcp::AuthenticatedConnection;
use rustix::net::sockopt;

use super::connection::ChannelConnection;
use super::counters::Direction;
use super::limits::Limits;
use super::link::ChannelLink;
use super::relay_handle::Relay;
use crate::model::error::{Error, Result};
use crate::os::{ClosedByFork, spawn_without_signals};
use receiver::Receiver;
use sender::Sender;

/// The messages of one direction that are on the way: sent by TCP and not received by the other process. One more may begin
/// while there are fewer of either.
const WINDOW: Limits = Limits { messages: 64, bytes: 16 << 20 };

/// Maximum size of a message in a packet of this process, in bytes; a longer one is in a memory file. The packets of a whole
/// [`WINDOW`] fit into the buffer of a socket, 208 KiB on Linux.
const MAX_WHOLE_BYTES: usize = 1024;

/// The interval at which the receiver of a closed channel looks whether the sender has finished.
const TICK: Duration = Duration::from_millis(100);

/// The time without a packet of the peer after which the system asks whether its host exists, and the interval of repetitions.
const KEEPALIVE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(5));

/// The time after which the system gives up a peer that acknowledges nothing.
const LOST: Duration = Duration::from_secs(30);

/// The state of both threads.
struct RelayShared {
    /// The link of the connection from the view of the peer, which the threads act as.
    link: ChannelLink,
    relay: Arc<Relay>,
    /// The messages that the receiver has taken from TCP.
    arrived: AtomicU64,
    /// The messages that the peer has received or discarded, of those that this process has sent.
    taken_by_peer: AtomicU64,
    /// Whether the sender waits until that changes.
    is_blocked: AtomicBool,
    /// The directions that the peer has closed.
    closed_by_peer: AtomicU64,
    /// Whether the sender has sent everything, and sends nothing more.
    has_finished: AtomicBool,
}

impl RelayShared {
    /// Returns the number of messages that this process has received or discarded.
    fn taken(&self, closed: u64, received: u64) -> u64 {
        if closed & Direction::Receiving as u64 == 0 {
            received
        } else {
            self.arrived.load(Ordering::Acquire).max(received)
        }
    }
}

/// Starts the relay of a connection. It ends with the connection, or with the TCP connection.
pub(super) fn start(
    connection: &Arc<ChannelConnection>,
    relay: Arc<Relay>,
    link: ChannelLink,
    tcp: AuthenticatedConnection,
) -> Result<()> {
    prepare(tcp.socket()).map_err(|error| Error::io("preparing the TCP connection of a channel", error))?;
    let closed_by_fork = ClosedByFork::new(tcp.socket().as_fd());
    let (tcp_sender, tcp_receiver) = tcp.split();
    let shared = Arc::new(RelayShared {
        link,
        relay,
        arrived: AtomicU64::new(0),
        taken_by_peer: AtomicU64::new(0),
        is_blocked: AtomicBool::new(false),
        closed_by_peer: AtomicU64::new(0),
        has_finished: AtomicBool::new(false),
    });
    let mut receiver = Receiver::new(Arc::clone(&shared), tcp_receiver, connection);
    let mut sender = Sender::new(shared, tcp_sender);
    // If one thread cannot be started, the other one ends: its socket is shut down.
    let stop = sender.socket().try_clone().map_err(|error| Error::io("duplicating a socket", error))?;
    let started = spawn_without_signals("device-ipc-tcp", move || sender.run()).and_then(|()| {
        spawn_without_signals("device-ipc-tcp", move || {
            let _closed_by_fork = closed_by_fork;
            receiver.run();
        })
    });
    started.inspect_err(|_| drop(stop.shutdown(Shutdown::Both)))
}

/// Sets the options of the TCP connection: no delay, and the detection of a host that has vanished.
fn prepare(tcp: &TcpStream) -> rustix::io::Result<()> {
    let (idle, interval) = KEEPALIVE;
    sockopt::set_tcp_nodelay(tcp, true)?;
    sockopt::set_socket_keepalive(tcp, true)?;
    sockopt::set_tcp_keepidle(tcp, idle)?;
    sockopt::set_tcp_keepintvl(tcp, interval)?;
    sockopt::set_tcp_user_timeout(tcp, LOST.as_millis() as u32)
}

#[cfg(test)]
mod tests;
