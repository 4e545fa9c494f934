//! Reads: the requests of a transfer, and their end.

use std::collections::VecDeque;
use std::ffi::CString;
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device_ipc_core::Result;
use device_ipc_core::backend::VendorError;

use super::{Agent, NixlMemory, Registration};
use crate::bindings::Request;
use crate::exit::Call;
use crate::library::NixlLibrary;
use crate::library::status::{IN_PROGRESS, INVALID_STATE};
use crate::metadata::RegionMetadata;

/// Maximum number of bytes of one request: the engine reports progress by requests that are over.
const REQUEST_BYTES: u64 = 64 << 20;

/// Number of requests of one read that run at the same time: one is transferred while the end of the other is noticed.
const IN_FLIGHT: usize = 2;

/// The bytes that one request reads: as many sources as destinations, in pairs of equal length.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    pub(crate) sources: Vec<NixlMemory>,
    pub(crate) destinations: Vec<NixlMemory>,
}

impl Pieces {
    fn bytes(&self) -> u64 {
        self.sources.iter().map(|memory| memory.len).sum()
    }

    /// Divides the pieces into those of requests of at most [`REQUEST_BYTES`].
    fn into_batches(self) -> VecDeque<Self> {
        let mut batches = VecDeque::from([Self::default()]);
        let mut room = REQUEST_BYTES;
        for (mut source, mut destination) in self.sources.into_iter().zip(self.destinations) {
            while source.len > 0 {
                if room == 0 {
                    batches.push_back(Self::default());
                    room = REQUEST_BYTES;
                }
                let last = batches.back_mut().expect("there is one");
                let len = source.len.min(room);
                last.sources.push(source.take_front(len));
                last.destinations.push(destination.take_front(len));
                room -= len;
            }
        }
        batches
    }
}

/// A read from another process's memory.
#[derive(Debug)]
pub(crate) struct Read {
    agent: Arc<Agent>,
    state: Mutex<State>,
    /// The number of bytes of the requests that are over.
    arrived: AtomicU64,
}

#[derive(Debug)]
enum State {
    Running(Running),
    Over(Result<(), VendorError>),
}

#[derive(Debug)]
struct Running {
    /// The requests that may still run, in the order of their start.
    requests: VecDeque<Posted>,
    /// The pieces of the requests that are not started yet.
    waiting: VecDeque<Pieces>,
    /// The first error of a request that is over, or was not started.
    failed: Option<VendorError>,
    /// Deregistered at the end.
    destination: Registration,
    peer: CString,
}

#[derive(Clone, Copy, Debug)]
struct Posted {
    request: *mut Request,
    bytes: u64,
}

// SAFETY: a request may be used on any thread; the lock of the state admits one at a time.
unsafe impl Send for Posted {}

impl Running {
    /// Starts requests for waiting pieces, as long as none has failed. Adds the bytes of those that are over at once.
    fn start_waiting(&mut self, agent: &Agent, arrived: &mut u64) {
        while self.failed.is_none()
            && self.requests.len() < IN_FLIGHT
            && let Some(batch) = self.waiting.pop_front()
        {
            let bytes = batch.bytes();
            let started = agent.start_request(&self.peer, &batch);
            match started {
                Ok((request, IN_PROGRESS)) => self.requests.push_back(Posted { request, bytes }),
                Ok((request, status)) => {
                    agent.release(request);
                    match NixlLibrary::check("post_xfer_req", status) {
                        Ok(()) => *arrived += bytes,
                        Err(error) => self.failed = Some(error),
                    }
                }
                Err(error) => self.failed = Some(error),
            }
        }
    }
}

impl Read {
    /// Starts a read of pieces of these regions. `destinations` contain the pieces' destinations.
    ///
    /// # Safety
    ///
    /// The destinations stay allocated, and no other code accesses them, until [`is_finished`](Self::is_finished) has returned
    /// true or an error. If the result is dropped before, they stay allocated for ever.
    pub(crate) unsafe fn start(
        agent: &Arc<Agent>,
        regions: &[RegionMetadata],
        destinations: Vec<NixlMemory>,
        pieces: Pieces,
    ) -> Result<Self> {
        let _call = Call::begin();
        // SAFETY: as the caller promised.
        let registered = unsafe { Registration::new(agent, destinations)? };
        let mut peers = agent.peers();
        let peer = agent.load_regions(&mut peers, regions)?;
        peers.begin(&peer);
        let mut running = Running {
            requests: VecDeque::new(),
            waiting: pieces.into_batches(),
            failed: None,
            destination: registered,
            peer,
        };
        let mut arrived = 0;
        running.start_waiting(agent, &mut arrived);
        if running.requests.is_empty()
            && let Some(error) = running.failed
        {
            agent.end_request(&mut peers, &running.peer, true);
            return Err(error.into());
        }
        drop(peers);
        let (agent, state) = (Arc::clone(agent), Mutex::new(State::Running(running)));
        Ok(Self { agent, state, arrived: AtomicU64::new(arrived) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of bytes of the requests that are over.
    pub(crate) fn arrived_bytes(&self) -> u64 {
        self.arrived.load(Ordering::Relaxed)
    }

    /// Returns whether all bytes have arrived; after an error all requests are over, too.
    pub(crate) fn is_finished(&self) -> Result<bool> {
        self.agent.check_process()?;
        let _call = Call::begin();
        let mut state = self.state();
        if let State::Running(running) = &mut *state {
            self.update(running);
            if running.requests.is_empty() {
                let over = State::Over(running.failed.take().map_or(Ok(()), Err));
                let ended = mem::replace(&mut *state, over);
                if let (State::Running(Running { destination, peer, .. }), State::Over(result)) =
                    (ended, &*state)
                {
                    drop(destination);
                    self.agent.end_request(&mut self.agent.peers(), &peer, result.is_err());
                }
            }
        }
        match &*state {
            State::Running(_) => Ok(false),
            State::Over(result) => result.clone().map(|()| true).map_err(Into::into),
        }
    }

    /// Starts no further requests. The read fails if there are any.
    pub(crate) fn cancel_rest(&self) {
        if let State::Running(running) = &mut *self.state()
            && !running.waiting.is_empty()
        {
            running.waiting.clear();
            running.failed.get_or_insert_with(|| NixlLibrary::error("post_xfer_req", INVALID_STATE));
        }
    }

    /// Releases the requests that are over, as far as no earlier one runs, and starts others, which the next call looks at: so the
    /// caller sees the number of arrived bytes grow, however late it calls.
    fn update(&self, running: &mut Running) {
        let api = &self.agent.library.api;
        let mut arrived = 0;
        for _ in 0..running.requests.len() {
            let Some(Posted { request, bytes }) = running.requests.front().copied() else { break };
            // SAFETY: the request exists until it is over.
            let status = unsafe { (api.get_xfer_status)(self.agent.raw.as_ptr(), request) };
            if status == IN_PROGRESS {
                break;
            }
            running.requests.pop_front();
            self.agent.release(request);
            match NixlLibrary::check("get_xfer_status", status) {
                Ok(()) => arrived += bytes,
                Err(error) => {
                    running.failed.get_or_insert(error);
                }
            }
            running.start_waiting(&self.agent, &mut arrived);
        }
        self.arrived.fetch_add(arrived, Ordering::Relaxed);
    }
}

impl Drop for Read {
    fn drop(&mut self) {
        let over = State::Over(Ok(()));
        if let State::Running(running) = mem::replace(&mut *self.state(), over) {
            // UCX may write to the destination as long as the agent exists, so both stay.
            mem::forget(running);
            mem::forget(Arc::clone(&self.agent));
            if self.agent.check_process().is_ok() {
                tracing::warn!(target: crate::LOG,
                    "a transfer was dropped before its end; the agent of NIXL stays until the process exits"
                );
            }
        }
    }
}
