//! Readers of rings on other hosts: a private ring of this process, and the thread that pulls publications into it.
//!
//! The thread is the writer of the private ring, and the reader is an ordinary reader of it. So slots, streams, releases and
//! descriptors work as for a ring of this host, and a reader that does not release its slots holds up the thread, and with it
//! the writer. Sequences are those of the writer.

#![allow(unsafe_code, reason = "the transfer engine writes to slots of the private ring")]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::builder::RingBuilder;
use super::writer::Ring;
use crate::backend::interop::DeviceOwner;
use crate::backend::{Buffer, DeviceBound, MemoryUse};
use crate::model::error::{Error, Result};
use crate::os::{Backoff, Readiness, clock, log, spawn_without_signals};
use crate::sharing::export::ShareBuilder;
use crate::sharing::import::Replicate;
use crate::sharing::remote::{IncomingPull, RemoteRing, RingMessage, SlotPull};
use crate::sharing::{Ipc, RuntimeRef, allocate};
use crate::wire::descriptor::Descriptor;
use crate::wire::ring::RingSlots;

/// Maximum number of slots that are pulled at the same time.
const MAX_PULLS: usize = 4;

/// The intervals at which running pulls are polled.
const PULL_POLL: Backoff = Backoff::eighth(Duration::from_micros(20), Duration::from_millis(1));

/// The intervals at which a slot is polled that the reader has not released.
const SLOT_POLL: Backoff = PULL_POLL.idle(Duration::from_millis(10));

/// The longest wait for a message.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// The private ring of a reader that is being opened.
#[derive(Debug)]
pub(super) struct Replication {
    slots: RingSlots,
    timeout: Duration,
    relay: RefCell<Option<ReplicaWriter>>,
}

impl Replication {
    pub(super) const fn new(slots: RingSlots, timeout: Duration) -> Self {
        Self { slots, timeout, relay: RefCell::new(None) }
    }

    /// Returns the private ring, if there is one: the ring is on another host.
    pub(super) fn into_relay(self) -> Option<ReplicaWriter> {
        self.relay.into_inner()
    }
}

impl Replicate for Replication {
    fn replicate(&self, ipc: &Ipc, incoming: &IncomingPull<'_>) -> Result<Descriptor> {
        let (backend, slots) = (incoming.backend, self.slots);
        let bytes = u64::from(slots.slots()) * slots.slot_bytes();
        let buffer = allocate(backend, incoming.device, bytes, MemoryUse::new())?;
        let buffer = Arc::new(buffer);
        let (remote, first) = RemoteRing::join(incoming, bytes)?;
        let region = buffer.region();
        let share = ShareBuilder::new(ipc, Arc::clone(&buffer), region);
        let ring = RingBuilder::new(share, backend, region, self.timeout).slots(slots.slots());
        let ring = ring.first_sequence(first).start()?;
        let descriptor = ring.descriptor().clone();
        let relay = ReplicaWriter {
            pulls: VecDeque::new(),
            remote,
            ring,
            buffer,
            slots,
            announced: first,
            started: first,
            acknowledged: first,
            is_closed: false,
        };
        self.relay.replace(Some(relay));
        Ok(descriptor)
    }
}

/// The private ring of a reader, into which a thread pulls publications as long as this exists.
pub(super) struct Replica {
    shared: Arc<ReplicaState>,
}

/// The state that the reader and the thread share.
struct ReplicaState {
    is_stopped: AtomicBool,
    /// Readable once the thread is to stop.
    wake: Readiness,
    /// The reason for which the thread has ended, unless the writer has closed the ring.
    failure: OnceLock<Error>,
    callbacks: Mutex<Vec<GoneCallback>>,
    runtime: RuntimeRef,
}

/// A callback for the termination of the writer's process.
type GoneCallback = Box<dyn FnOnce(&Error) + Send>;

impl Replica {
    /// Starts the thread, after the reader has joined the private ring.
    pub(super) fn start(relay: ReplicaWriter) -> Result<Self> {
        let wake = Readiness::new().map_err(|error| Error::io("creating an eventfd", error))?;
        let shared = Arc::new(ReplicaState {
            is_stopped: AtomicBool::new(false),
            wake,
            failure: OnceLock::new(),
            callbacks: Mutex::default(),
            runtime: relay.ring.runtime(),
        });
        let thread = Arc::clone(&shared);
        spawn_without_signals("device-ipc-ring", move || relay.run(&thread))?;
        Ok(Self { shared })
    }

    /// Returns the reason for which there are no further publications, unless the writer has closed the ring.
    pub(super) fn failure(&self) -> Option<Error> {
        self.shared.failure.get().cloned()
    }

    /// Registers a callback that runs once when the writer's process has terminated, now if it has.
    pub(super) fn on_gone(&self, callback: DeviceBound<impl FnOnce(&Error) + Send + 'static>) {
        let callback = move |error: &Error| {
            callback.consume(|callback| callback(error));
        };
        let mut callbacks = self.shared.callbacks.lock().unwrap_or_else(PoisonError::into_inner);
        callbacks.push(Box::new(callback));
        drop(callbacks);
        // The thread may have ended before it saw the callback.
        self.shared.call_back();
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        if self.shared.runtime.is_here() {
            self.shared.callbacks.lock().unwrap_or_else(PoisonError::into_inner).clear();
            self.shared.is_stopped.store(true, Ordering::Release);
            self.shared.wake.set();
        }
    }
}

impl ReplicaState {
    /// Calls the callbacks back if the writer's process has terminated.
    fn call_back(&self) {
        let (Some(failure), Some(runtime)) = (self.failure.get(), self.runtime.here()) else { return };
        if !matches!(failure.innermost(), Error::ExporterGone { .. }) {
            return;
        }
        let callbacks = std::mem::take(&mut *self.callbacks.lock().unwrap_or_else(PoisonError::into_inner));
        for callback in callbacks {
            let error = failure.clone();
            runtime.worker.submit(move || callback(&error));
        }
    }
}

/// The thread's part: it pulls publications into the private ring.
///
/// Fields are dropped in this order: the pulls and the lease before the private ring, whose end the reader sees.
pub(super) struct ReplicaWriter {
    /// The pulls of sequences from `acknowledged` to `started`.
    pulls: VecDeque<SlotPull>,
    remote: RemoteRing,
    /// Its next sequence is the first one that has not been confirmed.
    ring: Ring,
    buffer: Arc<Buffer>,
    slots: RingSlots,
    /// The first sequence that the writer has not published.
    announced: u64,
    /// The first sequence whose pull has not begun.
    started: u64,
    /// The first sequence whose pull has not ended.
    acknowledged: u64,
    is_closed: bool,
}

impl ReplicaWriter {
    fn run(mut self, shared: &ReplicaState) {
        let ended = catch_unwind(AssertUnwindSafe(|| {
            let ended = self.pull_all(shared);
            if ended.is_err() {
                self.publish_confirmed();
            }
            ended
        }));
        let ended = ended.unwrap_or_else(|_| Err(Error::Protocol("the thread of the ring panicked".into())));
        if let Err(error) = ended {
            tracing::debug!(target: log::RING, %error, "the copies of a ring of another host have ended");
            // Before the private ring is closed.
            let _ = shared.failure.set(error);
            shared.call_back();
        }
    }

    /// Pulls publications until the writer closes the ring, or the reader is dropped.
    fn pull_all(&mut self, shared: &ReplicaState) -> Result<()> {
        let mut since = clock::now();
        while !shared.is_stopped.load(Ordering::Acquire) {
            if self.advance()? {
                since = clock::now();
                continue;
            }
            if self.is_closed && self.ring.sequence() == self.announced {
                return Ok(());
            }
            self.remote.ping()?;
            let waited = clock::elapsed(since);
            let time = if !self.pulls.is_empty() {
                PULL_POLL.interval(waited)
            } else if self.started < self.announced {
                SLOT_POLL.interval(waited)
            } else {
                MAX_WAIT
            };
            self.remote.wait(time, shared.wake.as_fd());
        }
        Ok(())
    }

    /// Publishes, after an error, the sequences whose confirmation has arrived: they precede the error.
    fn publish_confirmed(&mut self) {
        while self.ring.sequence() < self.acknowledged
            && let Ok(Some(message)) = self.remote.try_receive()
            && self.handle(message).is_ok()
        {}
    }

    /// Does everything that can be done now. Returns whether there was anything.
    fn advance(&mut self) -> Result<bool> {
        let mut has_advanced = false;
        while let Some(message) = self.remote.try_receive()? {
            self.handle(message)?;
            has_advanced = true;
        }
        while self.started < self.announced
            && self.pulls.len() < MAX_PULLS
            && self.started - self.ring.sequence() < u64::from(self.slots.slots())
            && let Some(slot) = self.ring.free_slot(self.started)
        {
            let offset = self.started % u64::from(self.slots.slots()) * self.slots.slot_bytes();
            // SAFETY: the slot is one of the buffer. The reader has released it, and takes it only after its publication.
            self.pulls.push_back(unsafe { self.remote.pull(offset, &self.buffer, slot)? });
            self.started += 1;
            has_advanced = true;
        }
        while let Some(pull) = self.pulls.front_mut()
            && pull.try_finish()?
        {
            self.pulls.pop_front();
            self.remote.acknowledge(self.acknowledged)?;
            self.acknowledged += 1;
            has_advanced = true;
        }
        Ok(has_advanced)
    }

    fn handle(&mut self, message: RingMessage) -> Result<()> {
        match message {
            RingMessage::Published(sequence) if sequence == self.announced && !self.is_closed => {
                self.announced += 1;
            }
            RingMessage::Confirmed(sequence)
                if sequence == self.ring.sequence() && sequence < self.acknowledged =>
            {
                self.ring.publish_now(sequence)?;
            }
            RingMessage::Closed if !self.is_closed => self.is_closed = true,
            _ => return Err(self.remote.out_of_order(message)),
        }
        Ok(())
    }
}

impl fmt::Debug for Replica {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replica").field("failure", &self.shared.failure).finish_non_exhaustive()
    }
}

impl fmt::Debug for ReplicaWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplicaWriter").field("announced", &self.announced).finish_non_exhaustive()
    }
}
