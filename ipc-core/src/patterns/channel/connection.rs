//! One end of a channel: its parts, and its termination.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::builder::LocalEnd;
use super::counters::Direction;
use super::handshake::Hello;
use super::link::ChannelLink;
use super::maps::Maps;
use super::progress::{ReceiveState, SendState, Spinning};
use super::readiness::Descriptors;
use super::relay_handle::Relay;
use super::signals::ReadySignals;
use crate::model::device::DeviceIdentity;
use crate::model::error::{Error, Result};
use crate::os::log::Throttle;
use crate::os::process::ProcessIdentity;
use crate::sharing::export::{Bearer, ChannelId};
use crate::sharing::{Ipc, RuntimeRef};
use crate::transport::socket;
use crate::transport::{Allotment, TimedMutex, WatchedSocket, new_socket_number};

/// A callback for the termination of the peer.
pub(super) type GoneCallback = Box<dyn FnOnce(&Error) + Send>;

/// Maximum time of one sleep of a receive at the socket.
pub(super) const LONGEST_RECEIVE: Duration = Duration::from_secs(1);

/// The process of the peer.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub(super) process: ProcessIdentity,
    /// The bearer of grants in the export table. Its process id is that of the kernel, or as the peer states it if it belongs to
    /// another pid namespace.
    pub(super) bearer: Bearer,
}

impl Peer {
    pub(super) const fn pid(&self) -> u32 {
        self.bearer.pid
    }

    pub(super) fn program(&self) -> &str {
        &self.bearer.program
    }

    /// Returns the error for a peer that has terminated.
    pub(super) fn gone(&self) -> Error {
        Error::PeerGone { pid: self.pid(), program: self.program().to_owned() }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({})", self.pid(), self.program())
    }
}

/// The result of the handshake.
pub(super) struct Agreement {
    pub(super) own: LocalEnd,
    pub(super) peer: Hello,
    /// The peer's process id as the kernel reports it, or 0.
    pub(super) pid: u32,
    pub(super) maps: Maps,
    pub(super) link: ChannelLink,
    /// The relay of a channel to another host, which is the peer of the link.
    pub(super) relay: Option<Arc<Relay>>,
    /// The peer's share of the channels that this process accepts.
    pub(super) allotment: Option<Allotment>,
}

/// One end of a channel. The guard and unopened received memory keep it alive.
pub(super) struct ChannelConnection {
    pub(super) ipc: Ipc,
    pub(super) runtime: RuntimeRef,
    pub(super) peer: Peer,
    pub(super) link: ChannelLink,
    /// The relay of a channel to another host, which is the peer of the link.
    pub(super) relay: Option<Arc<Relay>>,
    /// The devices of this process.
    pub(super) devices: Vec<DeviceIdentity>,
    pub(super) maps: Maps,
    /// The maximum size of a message in bytes.
    pub(super) limit: u64,
    pub(super) sending: TimedMutex<SendState>,
    pub(super) receiving: TimedMutex<ReceiveState>,
    pub(super) spinning: Spinning,
    pub(super) descriptors: Descriptors,
    pub(super) signals: ReadySignals,
    /// The peer's protocol violation.
    violation: OnceLock<String>,
    callbacks: GoneCallbacks,
    _allotment: Option<Allotment>,
}

impl ChannelConnection {
    /// Creates the connection after the handshake.
    pub(super) fn begin(agreement: Agreement) -> Result<Arc<Self>> {
        let Agreement { own, peer, pid, maps, link, relay, allotment } = agreement;
        let runtime = own.runtime.check()?;
        let bearer = Bearer {
            channel: ChannelId(new_socket_number()),
            pid: if pid == 0 { peer.process.pid } else { pid },
            program: peer.program.into(),
        };
        let backend = Arc::clone(own.ipc.backend());
        let connection = Arc::new(Self {
            ipc: own.ipc,
            runtime: runtime.for_guard(),
            signals: ReadySignals::new(link.counters.clone(), backend, bearer.pid),
            peer: Peer { process: peer.process, bearer },
            link,
            // The threads of a relay need the processor.
            spinning: Spinning::new(relay.is_none()),
            relay,
            devices: own.hello.devices,
            maps,
            limit: own.hello.limit.min(peer.limit),
            sending: TimedMutex::new(SendState::new(own.limits)),
            receiving: TimedMutex::new(ReceiveState::default()),
            descriptors: Descriptors::default(),
            violation: OnceLock::new(),
            callbacks: GoneCallbacks::default(),
            _allotment: allotment,
        });
        socket::limit_receive_time(connection.link.messages.fd(), LONGEST_RECEIVE)
            .map_err(|error| Error::io("preparing the channel's socket", error))?;
        connection.link.counters.inbox().wake_up();
        let watched = Arc::clone(&connection) as Arc<dyn WatchedSocket>;
        runtime.poller.watch_socket(connection.id().0, watched, pid)?;
        Ok(connection)
    }

    pub(super) const fn id(&self) -> ChannelId {
        self.peer.bearer.channel
    }

    /// Returns an error if messages can no longer be sent.
    pub(super) fn check(&self) -> Result<()> {
        self.runtime.check()?;
        let has_ended = self.link.counters.is_closed_by_either(Direction::Sending)
            || self.has_gone()
            || self.is_violated();
        if has_ended { Err(self.close_reason(Direction::Sending)) } else { Ok(()) }
    }

    /// Returns whether the peer's process or its socket has terminated.
    pub(super) fn has_gone(&self) -> bool {
        self.signals.have_ended()
    }

    /// Returns whether the peer has violated the protocol.
    pub(super) fn is_violated(&self) -> bool {
        self.violation.get().is_some()
    }

    /// Returns the error of a direction that has ended.
    pub(super) fn close_reason(&self, direction: Direction) -> Error {
        if let Some(how) = self.violation.get() {
            return Error::Protocol(how.clone());
        }
        if self.link.counters.is_closed_by_either(direction) {
            Error::ChannelClosed { pid: self.peer.pid(), program: self.peer.program().to_owned() }
        } else {
            self.peer.gone()
        }
    }

    /// Ends the channel because of a protocol violation of the peer.
    pub(super) fn reject_peer(&self, how: String) -> Error {
        static WARNINGS: Throttle = Throttle::new();
        if let Some(count) = WARNINGS.count() {
            tracing::warn!(target: crate::os::log::CHANNEL,
                pid = self.peer.pid(),
                program = self.peer.program(),
                how,
                count,
                "closing a channel: protocol violation"
            );
        }
        let how = self.violation.get_or_init(|| how).clone();
        self.shut_down();
        Error::Protocol(how)
    }

    /// Ends both sockets, which wakes the waits of both processes.
    fn shut_down(&self) {
        self.link.shut_down();
        self.descriptors.wake_senders();
    }

    /// Returns the descriptor that is readable when a send call that found no room may find room.
    pub(super) fn sender_descriptor(&self) -> Result<BorrowedFd<'_>> {
        let descriptor = self.descriptors.sender(self.link.wakes.fd())?;
        // A close that found no descriptor has not set the flag.
        if self.check().is_err() {
            self.descriptors.wake_senders();
        }
        Ok(descriptor)
    }

    /// Returns whether the peer's counter has reached a value. Fails if it never will.
    pub(super) fn is_ready(&self, value: u64) -> Result<bool> {
        self.runtime.check()?;
        self.signals.have_reached(value).ok_or_else(|| self.peer.gone())
    }

    /// Registers a callback for the termination of the peer without closing the channel; runs it now if that has happened.
    pub(super) fn on_gone(&self, callback: GoneCallback) {
        if self.runtime.is_here()
            && let Some(callback) = self.callbacks.add(callback)
        {
            self.run(vec![callback]);
        }
    }

    fn run(&self, callbacks: Vec<GoneCallback>) {
        let counters = &self.link.counters;
        if counters.peer_has_closed_both_ways() || counters.is_closed_both_ways() {
            return;
        }
        let Some(runtime) = self.runtime.here() else { return };
        for callback in callbacks {
            let error = self.peer.gone();
            runtime.worker.submit(move || callback(&error));
        }
    }
}

impl WatchedSocket for ChannelConnection {
    fn socket(&self) -> BorrowedFd<'_> {
        self.link.wakes.fd()
    }

    /// Ends the connection. The peer no longer uses memory of its grants, because it keeps the sockets while it does.
    fn ready(self: Arc<Self>) {
        // The poller reports both the process and the socket.
        if !self.signals.end(self.runtime) {
            return;
        }
        // A forked child of the peer may keep the sockets open: the shutdown wakes waiting threads of this process nevertheless.
        self.shut_down();
        if let Some(runtime) = self.runtime.here() {
            runtime.exports.end_grants_of(self.id());
        }
        self.run(self.callbacks.take());
    }
}

impl Drop for ChannelConnection {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.here() {
            runtime.poller.unwatch_socket(self.id().0, self.link.wakes.fd());
            runtime.exports.end_grants_of(self.id());
        }
    }
}

impl fmt::Debug for ChannelConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChannelConnection").field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// The callbacks for the termination of the peer; `None` after it.
struct GoneCallbacks(Mutex<Option<Vec<GoneCallback>>>);

impl Default for GoneCallbacks {
    fn default() -> Self {
        Self(Mutex::new(Some(Vec::new())))
    }
}

impl GoneCallbacks {
    /// Adds a callback. Returns it if the peer has terminated.
    fn add(&self, callback: GoneCallback) -> Option<GoneCallback> {
        match &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            None => Some(callback),
            Some(callbacks) => {
                callbacks.push(callback);
                None
            }
        }
    }

    /// Takes the callbacks at the termination of the peer.
    fn take(&self) -> Vec<GoneCallback> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default()
    }
}
