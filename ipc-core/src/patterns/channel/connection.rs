//! One end of a channel: the socket, the shared counter page, and the state of the peer.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use rustix::net::Shutdown;

use super::builder::LocalEnd;
use super::handshake::Hello;
use super::inbox::{self, Inbox};
use super::limits::Limits;
use super::maps::Maps;
use super::readiness::SocketReadiness;
use super::receive::ReceiveState;
use super::relay::Relay;
use super::room::Room;
use super::send::SendState;
use crate::backend::stream::BorrowedStream;
use crate::model::device::DeviceIdentity;
use crate::model::error::{Error, Result};
use crate::os::log::Throttle;
use crate::os::process::ProcessIdentity;
use crate::os::wait_for_words;
use crate::sharing::Session;
use crate::sharing::export::{Bearer, ChannelId};
use crate::sharing::timeline::{
    ENDED, OwnCounter, Place, Poison, Side, Termination, Timeline, Word, WordPage, timelines_of,
};
use crate::sharing::{Runtime, RuntimeRef};
use crate::transport::socket::{self, PeerSocket};
use crate::transport::{Allotment, Deadline, TimedMutex, WatchedSocket};

/// A callback for the termination of the peer.
pub(super) type GoneCallback = Box<dyn FnOnce(&Error) + Send>;

/// Maximum time of one sleep of a receive at the socket.
pub(super) const LONGEST_RECEIVE: Duration = Duration::from_secs(1);

/// The slots of the counter page. Each contains one word for either end.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(super) enum Slot {
    /// The counter that streams signal when the tensors of a message are ready.
    Ready = 0,
    /// The directions that the end has closed, as bits of [`Direction`]; stored before the sockets are closed.
    Closed = 1,
    /// The number of messages that the end has received, lost ones included.
    Received = 2,
    /// The number of tensors that the end has opened or discarded.
    Settled = 3,
    /// The number of messages that the end has sent by its socket, stored after sending, for a peer that spins.
    Sent = 4,
    /// The number of the last message that the end has taken from its inbox.
    Taken = 5,
    /// 1 while the end is awake: it polls its inbox before it sleeps, and before it receives from its socket.
    Awake = 6,
    /// The value of the peer's `Received` at which the end, which waits for room, wants a wake-up; 0 if it does not wait.
    WantsRoom = 7,
}

/// A direction of an end. Its value is a bit of `Slot::Closed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum Direction {
    Sending = 1,
    Receiving = 2,
}

impl Direction {
    /// Returns the direction of the peer that this one is connected to.
    const fn of_peer(self) -> Self {
        match self {
            Self::Sending => Self::Receiving,
            Self::Receiving => Self::Sending,
        }
    }
}

/// Both directions.
pub(super) const BOTH: u64 = Direction::Sending as u64 | Direction::Receiving as u64;

/// The process at the other end.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub(super) process: ProcessIdentity,
    /// The process id reported by the kernel, or stated by the peer if it belongs to another pid namespace.
    pub(super) pid: u32,
    pub(super) program: String,
}

/// The result of the handshake.
pub(super) struct Agreement {
    pub(super) own: LocalEnd,
    pub(super) peer: Hello,
    pub(super) maps: Maps,
    pub(super) page: Arc<WordPage>,
    pub(super) side: Side,
    pub(super) control: PeerSocket,
    /// The relay of a channel to another host.
    pub(super) relay: Option<Arc<Relay>>,
    /// The peer's share of the channels that this process accepts.
    pub(super) allotment: Option<Allotment>,
}

/// One end of a channel. The guard and unopened received memory keep it alive.
pub(super) struct Connection {
    pub(super) id: ChannelId,
    pub(super) ipc: Session,
    /// Carries messages.
    pub(super) socket: PeerSocket,
    /// Carries wake-ups of a sender that waits for room. It is open as long as the peer's process may use memory of this end.
    pub(super) control: PeerSocket,
    /// The relay of a channel to another host, which is the peer of the sockets.
    pub(super) relay: Option<Arc<Relay>>,
    pub(super) peer: Peer,
    /// The peer as the bearer of grants in the export table.
    pub(super) bearer: Bearer,
    pub(super) devices: Vec<DeviceIdentity>,
    pub(super) maps: Maps,
    /// The maximum size of a message in bytes.
    pub(super) limit: u64,
    /// The limits of the messages that this end sends.
    pub(super) limits: Limits,
    pub(super) sending: TimedMutex<SendState>,
    pub(super) receiving: TimedMutex<ReceiveState>,
    /// The descriptors that an event loop or a sender waits for, created on their first use; `None` if that failed.
    receiver_readiness: OnceLock<SocketReadiness>,
    sender_readiness: OnceLock<SocketReadiness>,
    /// Whether the receiver's descriptor is in use: every message must make it readable.
    has_descriptor: AtomicBool,
    /// Whether a receiver may spin before it sleeps.
    pub(super) may_spin: AtomicBool,
    /// Whether the peer was asleep when the last message was sent to it.
    pub(super) has_woken: AtomicBool,
    side: Side,
    page: Arc<WordPage>,
    /// The timeline of `Slot::Ready`, created on its first use by a stream: registering pages with devices is expensive.
    words: Mutex<Option<Timeline>>,
    /// Counts the arrived signals of this end. The shared words cannot be trusted, because the peer can write them.
    pub(super) order: OnceLock<Arc<OwnCounter>>,
    /// Whether the peer's process or its socket has terminated.
    gone: AtomicBool,
    /// The value of the peer's counter at that time.
    reached: AtomicU64,
    /// The peer's protocol violation.
    violation: OnceLock<String>,
    callbacks: Mutex<Vec<GoneCallback>>,
    pub(super) runtime: RuntimeRef,
    _allotment: Option<Allotment>,
}

impl Connection {
    /// Creates the connection after the handshake.
    pub(super) fn begin(socket: PeerSocket, pid: u32, agreement: Agreement) -> Result<Arc<Self>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let runtime = Runtime::get()?;
        let Agreement { own, peer, maps, page, side, control, relay, allotment } = agreement;
        let LocalEnd { ipc, hello: own, limits } = own;
        let id = ChannelId(NEXT.fetch_add(1, Ordering::Relaxed));
        let pid_here = if pid == 0 { peer.process.pid } else { pid };
        let connection = Arc::new(Self {
            id,
            ipc,
            socket,
            control,
            // The threads of a relay need the processor.
            may_spin: AtomicBool::new(relay.is_none()),
            relay,
            bearer: Bearer { channel: id, pid: pid_here, program: peer.program.as_str().into() },
            peer: Peer { process: peer.process, pid: pid_here, program: peer.program },
            devices: own.devices,
            maps,
            limit: own.limit.min(peer.limit),
            limits,
            sending: TimedMutex::new(SendState::default()),
            receiving: TimedMutex::new(ReceiveState::default()),
            receiver_readiness: OnceLock::new(),
            sender_readiness: OnceLock::new(),
            has_descriptor: AtomicBool::new(false),
            has_woken: AtomicBool::new(false),
            side,
            page,
            words: Mutex::default(),
            order: OnceLock::new(),
            gone: AtomicBool::new(false),
            reached: AtomicU64::new(0),
            violation: OnceLock::new(),
            callbacks: Mutex::default(),
            runtime: runtime.for_guard(),
            _allotment: allotment,
        });
        socket::let_sleep(connection.socket.fd(), LONGEST_RECEIVE)
            .map_err(|error| Error::io("preparing the channel's socket", error))?;
        connection.inbox().wake_up();
        runtime.poller.watch_socket(id.0, Arc::clone(&connection) as Arc<dyn WatchedSocket>, pid)?;
        Ok(connection)
    }

    /// Returns the inbox that the peer writes and this end reads.
    pub(super) fn inbox(&self) -> Inbox<'_> {
        let words = self.page.words(inbox::first_slot(self.side == Side::Exporter), inbox::WORDS);
        Inbox { taken: self.own_word(Slot::Taken), awake: self.own_word(Slot::Awake), words }
    }

    /// Returns the inbox that this end writes and the peer reads.
    pub(super) fn outbox(&self) -> Inbox<'_> {
        let words = self.page.words(inbox::first_slot(self.side != Side::Exporter), inbox::WORDS);
        Inbox { taken: self.peers_word(Slot::Taken), awake: self.peers_word(Slot::Awake), words }
    }

    /// Returns the words by which this end waits for room.
    pub(super) fn room(&self) -> Room<'_> {
        Room { received: self.peers_word(Slot::Received), wanted: self.own_word(Slot::WantsRoom) }
    }

    /// Returns the words by which the peer waits for room.
    pub(super) fn peers_room(&self) -> Room<'_> {
        Room { received: self.own_word(Slot::Received), wanted: self.peers_word(Slot::WantsRoom) }
    }

    /// Returns the word of a slot that this end writes.
    pub(super) fn own_word(&self, slot: Slot) -> &AtomicU64 {
        let own = if self.side == Side::Exporter { Word::FromExporter } else { Word::FromImporter };
        self.page.word(slot as u32, own)
    }

    /// Returns the word of a slot that the peer writes.
    pub(super) fn peers_word(&self, slot: Slot) -> &AtomicU64 {
        let peers = if self.side == Side::Exporter { Word::FromImporter } else { Word::FromExporter };
        self.page.word(slot as u32, peers)
    }

    /// Returns whether the peer sends no further messages. Its earlier messages can still be received.
    pub(super) fn peer_has_finished(&self) -> bool {
        self.peers_word(Slot::Closed).load(Ordering::Acquire) & Direction::Sending as u64 != 0
    }

    /// Returns whether this end has closed a direction.
    pub(super) fn is_closed(&self, direction: Direction) -> bool {
        self.own_word(Slot::Closed).load(Ordering::Acquire) & direction as u64 != 0
    }

    /// Returns whether this end is closed.
    pub(super) fn is_closed_both_ways(&self) -> bool {
        self.own_word(Slot::Closed).load(Ordering::Acquire) & BOTH == BOTH
    }

    /// Marks directions as closed. Returns the directions that were open.
    pub(super) fn mark_closed(&self, directions: u64) -> u64 {
        directions & !self.own_word(Slot::Closed).fetch_or(directions, Ordering::AcqRel)
    }

    /// Returns an error if messages can no longer be sent.
    pub(super) fn check(&self) -> Result<()> {
        self.runtime.check()?;
        let has_ended = self.closed_by(Direction::Sending)
            || self.gone.load(Ordering::Acquire)
            || self.violation.get().is_some();
        if has_ended { Err(self.close_reason(Direction::Sending)) } else { Ok(()) }
    }

    /// Returns whether either end has closed a direction.
    fn closed_by(&self, direction: Direction) -> bool {
        let peers = self.peers_word(Slot::Closed).load(Ordering::Acquire);
        self.is_closed(direction) || peers & direction.of_peer() as u64 != 0
    }

    /// Returns whether the peer's process or its socket has terminated.
    pub(super) fn has_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
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
        let (pid, program) = (self.peer.pid, self.peer.program.clone());
        if self.closed_by(direction) {
            Error::ChannelClosed { pid, program }
        } else {
            Error::PeerGone { pid, program }
        }
    }

    /// Ends the channel because of a protocol violation of the peer.
    pub(super) fn reject_peer(&self, how: String) -> Error {
        static WARNINGS: Throttle = Throttle::new();
        if let Some(count) = WARNINGS.count() {
            tracing::warn!(target: crate::os::log::CHANNEL,
                pid = self.peer.pid,
                program = self.peer.program,
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
        for socket in [&self.socket, &self.control] {
            let _ = rustix::net::shutdown(socket.fd(), Shutdown::Both);
        }
        self.wake_senders();
    }

    /// Wakes the threads and the event loops of this process that wait to send.
    pub(super) fn wake_senders(&self) {
        if let Some(readiness) = self.sender_readiness.get() {
            readiness.flag.set();
        }
    }

    /// Returns the descriptor that is readable when a receive call has a result.
    pub(super) fn receiver_descriptor(&self) -> Result<BorrowedFd<'_>> {
        let readiness = readiness_of(&self.receiver_readiness, self.socket.fd())?;
        if !self.has_descriptor.swap(true, Ordering::SeqCst) {
            self.report_readiness();
        }
        Ok(readiness.as_fd())
    }

    /// Returns the descriptor that is readable when a send call that found no room may find room.
    pub(super) fn sender_descriptor(&self) -> Result<BorrowedFd<'_>> {
        Ok(self.sender_readiness()?.as_fd())
    }

    fn sender_readiness(&self) -> Result<&SocketReadiness> {
        let readiness = readiness_of(&self.sender_readiness, self.control.fd())?;
        // A close that found no descriptor has not set the flag.
        if self.check().is_err() {
            readiness.flag.set();
        }
        Ok(readiness)
    }

    /// Makes the receiver's descriptor readable if a receive call has a result that the socket does not show, and else unreadable.
    ///
    /// While the descriptor is in use, this end is asleep between receive calls, so that every message comes by the socket.
    pub(super) fn report_readiness(&self) {
        if !self.has_descriptor.load(Ordering::SeqCst) {
            return;
        }
        // A thread that holds the lock reports when it has released the lock.
        let Some(receiving) = self.receiving.try_lock() else { return };
        let is_asleep = self.inbox().fall_asleep(receiving.taken() + 1);
        let Some(readiness) = self.receiver_readiness.get() else { return };
        if !is_asleep || receiving.has_packet() {
            readiness.flag.set();
        } else {
            readiness.flag.clear();
        }
    }

    /// Marks this end as awake, unless an event loop waits for its descriptor.
    pub(super) fn wake_up(&self) {
        if !self.has_descriptor.load(Ordering::SeqCst) {
            self.inbox().wake_up();
        }
    }

    /// Returns the timeline that streams signal and wait for.
    pub(super) fn words(&self) -> Timeline {
        let mut words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*words {
            return known.clone();
        }
        let place = Place::first(Arc::clone(&self.page), Slot::Ready as u32);
        let begun = Timeline::new(place, self.side, Arc::clone(self.ipc.backend()), self.peer.pid);
        // Under the lock, so that either this thread or the poller ends the timeline.
        if self.gone.load(Ordering::Acquire) {
            begun.endpoint().end(Termination::Died);
        }
        words.insert(begun).clone()
    }

    /// Returns the counter that orders the signals of this end.
    pub(super) fn order(&self) -> Result<&Arc<OwnCounter>> {
        if self.order.get().is_none() {
            // Only the sending thread creates it; other threads only read it.
            let _ = self.order.set(OwnCounter::new(self.ipc.backend())?);
        }
        Ok(self.order.get().expect("the counter was just set"))
    }

    /// Returns whether the peer's counter has reached a value. Fails if it never will.
    pub(super) fn is_ready(&self, value: u64) -> Result<bool> {
        self.runtime.check()?;
        if value == 0 {
            return Ok(true);
        }
        let now = self.peers_word(Slot::Ready).load(Ordering::Acquire);
        if self.gone.load(Ordering::Acquire) {
            let reached = self.reached.load(Ordering::Acquire);
            return if reached >= value { Ok(true) } else { Err(self.never_ready()) };
        }
        if now >= ENDED { Err(self.never_ready()) } else { Ok(now >= value) }
    }

    fn never_ready(&self) -> Error {
        Error::PeerGone { pid: self.peer.pid, program: self.peer.program.clone() }
    }

    /// Waits on the host until the peer's counter has reached a value.
    pub(super) fn wait_ready(&self, value: u64, deadline: Deadline) -> Result<()> {
        let what = "the completion of the work on the message's tensors";
        let late = || {
            let detail = format!("; the stream of process {} has not reached its signal yet", self.peer.pid);
            deadline.passed(what, &detail)
        };
        wait_for_words(deadline.left(), || self.is_ready(value), late)
    }

    /// Makes the stream wait until the peer's counter has reached a value; the host waits if the device has no timelines.
    pub(super) fn wait_ready_on(
        &self,
        value: u64,
        stream: BorrowedStream<'_>,
        deadline: Deadline,
    ) -> Result<()> {
        if self.is_ready(value)? {
            return Ok(());
        }
        if timelines_of(&**self.ipc.backend(), stream.device()).is_err() {
            return self.wait_ready(value, deadline);
        }
        match self.words().wait(value, &stream) {
            Ok(()) => Ok(()),
            // The counter may have reached the value, or the peer may have terminated, meanwhile.
            Err(error) => {
                if self.is_ready(value)? {
                    Ok(())
                } else {
                    Err(error)
                }
            }
        }
    }

    /// Registers a callback for the termination of the peer without closing the channel; runs it now if that has happened.
    pub(super) fn on_gone(&self, callback: GoneCallback) {
        if !self.runtime.is_here() {
            return;
        }
        let mut callbacks = self.lock_callbacks();
        if self.gone.load(Ordering::Acquire) {
            drop(callbacks);
            self.run(vec![callback]);
        } else {
            callbacks.push(callback);
        }
    }

    fn run(&self, callbacks: Vec<GoneCallback>) {
        let peers = self.peers_word(Slot::Closed).load(Ordering::Acquire);
        if peers & BOTH == BOTH || self.is_closed_both_ways() {
            return;
        }
        let Some(runtime) = self.runtime.here() else { return };
        for callback in callbacks {
            let error = self.never_ready();
            runtime.worker.submit(move || callback(&error));
        }
    }

    fn lock_callbacks(&self) -> MutexGuard<'_, Vec<GoneCallback>> {
        self.callbacks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WatchedSocket for Connection {
    fn socket(&self) -> BorrowedFd<'_> {
        self.control.fd()
    }

    /// Ends the connection. The peer no longer uses memory of its grants, because it keeps the sockets while it does.
    fn hung_up(&self) {
        let words = {
            let words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
            // The poller reports both the process and the socket.
            if self.has_gone() {
                return;
            }
            let reached = self.peers_word(Slot::Ready).load(Ordering::Acquire);
            self.reached.store(if reached < ENDED { reached } else { 0 }, Ordering::Release);
            self.gone.store(true, Ordering::Release);
            words.clone()
        };
        if let Some(words) = words {
            words.endpoint().end(Termination::Died);
            if let Some(runtime) = self.runtime.here()
                && words.endpoint().needs_poison()
            {
                runtime.poller.poison_again(Poison::Timeline(Arc::clone(words.endpoint())));
            }
        }
        // A forked child of the peer may keep the sockets open: the shutdown wakes waiting threads of this process nevertheless.
        self.shut_down();
        if let Some(runtime) = self.runtime.here() {
            runtime.exports.end_grants_of(self.id);
        }
        let callbacks = std::mem::take(&mut *self.lock_callbacks());
        self.run(callbacks);
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.here() {
            runtime.poller.unwatch_socket(self.id.0, self.control.fd());
            runtime.exports.end_grants_of(self.id);
        }
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("id", &self.id).field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// Returns the readiness of a direction, which the first call creates.
fn readiness_of<'a>(
    known: &'a OnceLock<SocketReadiness>,
    socket: BorrowedFd<'_>,
) -> Result<&'a SocketReadiness> {
    if let Some(known) = known.get() {
        return Ok(known);
    }
    let created = SocketReadiness::new(socket);
    let created = created.map_err(|error| Error::io("creating the descriptor of a channel", error))?;
    Ok(known.get_or_init(|| created))
}
