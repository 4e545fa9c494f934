//! One end of a channel: the socket, the page of words beside it, and what is known of the other end.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use rustix::net::Shutdown;

use super::handshake::Hello;
use super::inbox::{self, Inbox};
use super::maps::Maps;
use super::receive::Receiving;
use super::send::Sending;
use crate::backend::stream::BorrowedStream;
use crate::model::device::DeviceIdentity;
use crate::model::error::{Error, Result};
use crate::os::SPIN;
use crate::os::process::{Owner, ProcessIdentity};
use crate::sharing::Runtime;
use crate::sharing::Session;
use crate::sharing::export::{Bearer, ChannelId};
use crate::sharing::timeline::{ENDED, End, OwnCounter, Place, Side, Timeline, Word, WordPage, timelines_of};
use crate::transport::socket::{self, PeerSocket};
use crate::transport::{Deadline, Gate, Poison, WatchedSocket};

/// What is run when the other end has gone.
pub(super) type GoneCallback = Box<dyn FnOnce(&Error) + Send>;

/// The longest sleep of a wait for a word, which looks again and again before it begins to sleep.
const LONGEST_SLEEP: Duration = Duration::from_micros(200);

/// How long a receive sleeps at the socket at a time.
pub(super) const LONGEST_RECEIVE: Duration = Duration::from_secs(1);

/// What the slots of the page are for. In each, either end has a word of its own.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(super) enum Slot {
    /// The counters that streams signal: the tensors of a message are ready.
    Ready = 0,
    /// 1 when the end has been closed; stored before its socket is.
    Closed = 1,
    /// How many messages the end has received.
    Received = 2,
    /// How many tensors of messages the end has opened or discarded.
    Settled = 3,
    /// How many messages the end has sent by its socket, a moment after that has them: for an end that spins.
    Sent = 4,
    /// The number of the last message that the end has taken out of its inbox.
    Taken = 5,
    /// 1 while the end is awake: it looks into its inbox before it sleeps, and before it takes anything from its socket.
    Awake = 6,
}

/// Who is at the other end.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub(super) process: ProcessIdentity,
    /// As the kernel tells it here, or as it says itself where it is of another pid namespace.
    pub(super) pid: u32,
    pub(super) program: String,
}

/// What both ends agreed on.
pub(super) struct Agreed {
    pub(super) own: Hello,
    pub(super) peer: Hello,
    pub(super) maps: Maps,
    pub(super) page: Arc<WordPage>,
    pub(super) side: Side,
}

/// One end of a channel. The guard, and what was received and has not been opened, hold it together.
pub(super) struct Connection {
    pub(super) id: ChannelId,
    pub(super) ipc: Session,
    pub(super) socket: PeerSocket,
    pub(super) peer: Peer,
    /// The same for the table of exports.
    pub(super) bearer: Bearer,
    pub(super) devices: Vec<DeviceIdentity>,
    pub(super) maps: Maps,
    /// The largest message that both ends take, in bytes.
    pub(super) limit: u64,
    pub(super) sending: Gate<Sending>,
    pub(super) receiving: Gate<Receiving>,
    /// May a receiver look again and again before it sleeps?
    pub(super) may_spin: AtomicBool,
    /// Did the other end sleep when the last message was sent to it?
    pub(super) has_woken: AtomicBool,
    side: Side,
    page: Arc<WordPage>,
    /// Made when a stream first has to do with it: pages that devices know are dear.
    words: Mutex<Option<Timeline>>,
    /// Counts which of its own signals have arrived: the other end can write the words.
    pub(super) order: OnceLock<Arc<OwnCounter>>,
    /// The other end's process, or its socket, has ended.
    gone: AtomicBool,
    /// What its counter had reached by then.
    reached: AtomicU64,
    /// It broke the rules, and how.
    broken: OnceLock<String>,
    callbacks: Mutex<Vec<GoneCallback>>,
    pub(super) owner: Owner,
}

impl Connection {
    /// A channel of which both ends have said hello.
    pub(super) fn begin(ipc: &Session, socket: PeerSocket, pid: u32, agreed: Agreed) -> Result<Arc<Self>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let Agreed { own, peer, maps, page, side } = agreed;
        let id = ChannelId(NEXT.fetch_add(1, Ordering::Relaxed));
        let pid_here = if pid == 0 { peer.process.pid } else { pid };
        let connection = Arc::new(Self {
            id,
            ipc: ipc.clone(),
            socket,
            bearer: Bearer { channel: id, pid: pid_here, program: peer.program.as_str().into() },
            peer: Peer { process: peer.process, pid: pid_here, program: peer.program },
            devices: own.devices,
            maps,
            limit: own.limit.min(peer.limit),
            sending: Gate::new(Sending::default()),
            receiving: Gate::new(Receiving::default()),
            may_spin: AtomicBool::new(true),
            has_woken: AtomicBool::new(false),
            side,
            page,
            words: Mutex::default(),
            order: OnceLock::new(),
            gone: AtomicBool::new(false),
            reached: AtomicU64::new(0),
            broken: OnceLock::new(),
            callbacks: Mutex::default(),
            owner: Owner::current(),
        });
        socket::let_sleep(connection.socket.fd(), LONGEST_RECEIVE)
            .map_err(|error| Error::io("preparing the channel's socket", error))?;
        connection.inbox().wake_up();
        Runtime::get()?.poller.watch_socket(id.0, Arc::clone(&connection) as Arc<dyn WatchedSocket>, pid)?;
        Ok(connection)
    }

    /// What the other end writes and this one reads.
    pub(super) fn inbox(&self) -> Inbox<'_> {
        let words = self.page.words(inbox::first_slot(self.side == Side::Exporter), inbox::WORDS);
        Inbox { taken: self.own_word(Slot::Taken), awake: self.own_word(Slot::Awake), words }
    }

    /// What this end writes and the other one reads.
    pub(super) fn outbox(&self) -> Inbox<'_> {
        let words = self.page.words(inbox::first_slot(self.side != Side::Exporter), inbox::WORDS);
        Inbox { taken: self.peers_word(Slot::Taken), awake: self.peers_word(Slot::Awake), words }
    }

    /// The word that this end writes.
    pub(super) fn own_word(&self, slot: Slot) -> &AtomicU64 {
        let own = if self.side == Side::Exporter { Word::FromExporter } else { Word::FromImporter };
        self.page.word(slot as u32, own)
    }

    /// The word that the other end writes.
    pub(super) fn peers_word(&self, slot: Slot) -> &AtomicU64 {
        let peers = if self.side == Side::Exporter { Word::FromImporter } else { Word::FromExporter };
        self.page.word(slot as u32, peers)
    }

    /// Has the other end been closed? What it had sent before may still be there to be received.
    pub(super) fn peer_has_closed(&self) -> bool {
        self.peers_word(Slot::Closed).load(Ordering::Acquire) != 0
    }

    /// Does nothing more come, and does nobody take anything?
    pub(super) fn check(&self) -> Result<()> {
        self.owner.check()?;
        let closed_here = self.own_word(Slot::Closed).load(Ordering::Acquire) != 0;
        let over = closed_here
            || self.peer_has_closed()
            || self.gone.load(Ordering::Acquire)
            || self.broken.get().is_some();
        if over { Err(self.why_over()) } else { Ok(()) }
    }

    /// Has the other end's process, or its socket, ended?
    pub(super) fn has_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// Did it break the rules?
    pub(super) fn is_broken(&self) -> bool {
        self.broken.get().is_some()
    }

    /// Why nothing more comes.
    pub(super) fn why_over(&self) -> Error {
        if let Some(how) = self.broken.get() {
            return Error::Protocol(how.clone());
        }
        let (pid, program) = (self.peer.pid, self.peer.program.clone());
        let closed_here = self.own_word(Slot::Closed).load(Ordering::Acquire) != 0;
        if closed_here || self.peer_has_closed() {
            Error::ChannelClosed { pid, program }
        } else {
            Error::PeerGone { pid, program }
        }
    }

    /// The other end does not keep to the protocol: there is no more to be had from it, or to be said to it.
    pub(super) fn break_off(&self, how: String) -> Error {
        tracing::warn!(pid = self.peer.pid, program = self.peer.program, how, "a channel is broken off");
        let how = self.broken.get_or_init(|| how).clone();
        let _ = rustix::net::shutdown(self.socket.fd(), Shutdown::Both);
        Error::Protocol(how)
    }

    /// The counters that streams signal.
    pub(super) fn words(&self) -> Timeline {
        let mut words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = &*words {
            return known.clone();
        }
        let place = Place::first(Arc::clone(&self.page), Slot::Ready as u32);
        let begun = Timeline::new(place, self.side, Arc::clone(self.ipc.backend()), self.peer.pid);
        // Under the lock, so that it is ended here or by who notes the other end's death.
        if self.gone.load(Ordering::Acquire) {
            begun.ends().end(End::Died);
        }
        words.insert(begun).clone()
    }

    /// The order of this end's own signals.
    pub(super) fn order(&self) -> Result<&Arc<OwnCounter>> {
        if self.order.get().is_none() {
            // By the one that sends; another thread only looks.
            let _ = self.order.set(OwnCounter::new(self.ipc.backend())?);
        }
        Ok(self.order.get().expect("it was just set"))
    }

    /// Has the other end's counter reached this value? An error where it never will.
    pub(super) fn is_ready(&self, value: u64) -> Result<bool> {
        self.owner.check()?;
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

    /// The host waits until the other end's counter has reached this value.
    pub(super) fn wait_ready(&self, value: u64, deadline: Deadline) -> Result<()> {
        let what = "the end of the work that the message's tensors wait for";
        wait_until(
            deadline,
            || self.is_ready(value),
            || {
                deadline
                    .passed(what, &format!("; the stream of process {} has not got there yet", self.peer.pid))
            },
        )
    }

    /// The stream waits until the other end's counter has reached this value; the host does where the device has no words.
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
            // It may have been reached, or the other end may have gone, in between.
            Err(error) => {
                if self.is_ready(value)? {
                    Ok(())
                } else {
                    Err(error)
                }
            }
        }
    }

    /// Has something run when the other end goes without closing the channel, or at once when it has.
    pub(super) fn on_gone(&self, callback: GoneCallback) {
        let mut callbacks = self.lock_callbacks();
        if self.gone.load(Ordering::Acquire) {
            drop(callbacks);
            self.run(vec![callback]);
        } else {
            callbacks.push(callback);
        }
    }

    fn run(&self, callbacks: Vec<GoneCallback>) {
        if self.peer_has_closed() || self.own_word(Slot::Closed).load(Ordering::Acquire) != 0 {
            return;
        }
        for callback in callbacks {
            let error = self.never_ready();
            if let Ok(runtime) = Runtime::get() {
                runtime.worker.submit(move || callback(&error));
            }
        }
    }

    fn lock_callbacks(&self) -> MutexGuard<'_, Vec<GoneCallback>> {
        self.callbacks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WatchedSocket for Connection {
    fn socket(&self) -> BorrowedFd<'_> {
        self.socket.fd()
    }

    /// The other end has nothing of ours any longer: while it had, it kept its socket.
    fn hung_up(&self) {
        let words = {
            let words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
            // Its process and its socket both end.
            if self.has_gone() {
                return;
            }
            let reached = self.peers_word(Slot::Ready).load(Ordering::Acquire);
            self.reached.store(if reached < ENDED { reached } else { 0 }, Ordering::Release);
            self.gone.store(true, Ordering::Release);
            words.clone()
        };
        if let Some(words) = words {
            words.ends().end(End::Died);
            if let Some(runtime) = Runtime::existing()
                && words.ends().needs_poison()
            {
                runtime.poller.poison_again(Poison::Timeline(Arc::clone(words.ends())));
            }
        }
        // A forked child of the other end may keep the socket open: whoever waits here is woken all the same.
        let _ = rustix::net::shutdown(self.socket.fd(), Shutdown::Both);
        if let Some(runtime) = Runtime::existing() {
            runtime.exports.end_grants_of(self.id);
        }
        let callbacks = std::mem::take(&mut *self.lock_callbacks());
        self.run(callbacks);
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(runtime) = Runtime::of_guard(&self.owner) {
            runtime.poller.unwatch_socket(self.id.0);
            runtime.exports.end_grants_of(self.id);
        }
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection").field("id", &self.id).field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// Looks until it holds: for words of shared memory, which wake nobody.
pub(super) fn wait_until(
    deadline: Deadline,
    mut holds: impl FnMut() -> Result<bool>,
    late: impl FnOnce() -> Error,
) -> Result<()> {
    let begin = std::time::Instant::now();
    loop {
        if holds()? {
            return Ok(());
        }
        let left = deadline.left();
        if left.is_zero() {
            return Err(late());
        }
        let waited = begin.elapsed();
        if waited < SPIN {
            std::hint::spin_loop();
        } else {
            std::thread::sleep((waited / 8).min(LONGEST_SLEEP).min(left));
        }
    }
}
