//! The exporter's side of a copy through host memory.
//!
//! The poller begins a copy, asks for chunks and ends it; the worker calls the driver, in steps: it waits for the bytes to be
//! ready and for room among the other copies, both without blocking, and then fills one half after the other, each as soon as
//! the importer has taken the chunk in it. The memory of a lease that has ended is not read, and a lease ends only when the
//! device has finished the work that was submitted under it.

#![allow(unsafe_code, reason = "copies memory of a lease to pages that the copy holds")]

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::limits::{SetAside, Share};
use super::{Chunks, Segments};
use crate::backend::{DeviceEvent, DeviceIpc, DeviceStream};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::model::lease::LeaseId;
use crate::os::clock;
use crate::os::kill::kill_point;
use crate::os::log::Throttle;
use crate::sharing::Runtime;
use crate::sharing::export::{BorrowedMemory, Granted, Shared, stale};
use crate::sharing::host_pages::{HostPages, Use};
use crate::sharing::timeline::Termination;
use crate::transport::ConnectionId;
use crate::wire::descriptor::ExportId;
use crate::wire::{Failure, Refusal, Reply, RequestId, Span};

/// Maximum time that an importer may leave host memory unused that other copies wait for.
const SILENCE: Duration = Duration::from_secs(10);

/// A copy that an importer has requested.
pub(crate) struct Outgoing {
    runtime: &'static Runtime,
    connection: ConnectionId,
    share: Share,
    export: ExportId,
    lease: LeaseId,
    backend: Arc<dyn DeviceIpc>,
    segments: Segments,
    chunks: Chunks,
    state: Mutex<OutgoingState>,
}

/// A copy that could not begin: its lease is to be ended, and its importer notified.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) lease: LeaseId,
    pub(crate) request: RequestId,
    pub(crate) refusal: Refusal,
}

#[derive(Debug, Default)]
struct OutgoingState {
    /// The host memory, from the first reply until the copy is over.
    halves: Option<Arc<Halves>>,
    begun: bool,
    /// Numbers of chunks that were requested, submitted to the device, and copied by it.
    asked: u64,
    submitted: u64,
    filled: u64,
    /// Number of chunks that were submitted and are not known to be copied.
    in_flight: u32,
    /// The request that the importer waits for.
    wanted: Option<(RequestId, u64)>,
    /// Time of the last reply to the importer.
    answered: Option<Instant>,
    failed: Option<Refusal>,
    ended: Option<Termination>,
}

/// The host memory of a copy. Dropped on the worker.
#[derive(Debug)]
struct Halves {
    stream: Box<dyn DeviceStream>,
    pages: HostPages,
    /// Whether the device copies to the pages directly. Otherwise the bytes go through memory of this process.
    pinned: bool,
    _room: SetAside,
}

impl Outgoing {
    /// Begins a copy of spans of the export under a lease, for the peer of the connection and its process id.
    ///
    /// # Errors
    ///
    /// The refusal of a request for bytes that the export does not have.
    pub(crate) fn begin(
        runtime: &'static Runtime,
        (connection, pid): (ConnectionId, u32),
        (export, spans): (ExportId, &[Span]),
        request: RequestId,
        granted: &Granted,
    ) -> std::result::Result<Arc<Self>, Refusal> {
        let allocation = granted.shared.allocations.first().ok_or(Refusal::Dropped)?;
        let backend = Arc::clone(allocation.backend());
        let segments = Segments::requested(&granted.shared.regions, spans);
        let segments = segments.map_err(Error::InvalidRegion)?;
        let chunks = Chunks::new(segments.len(), runtime.stagings.limits().chunk_bytes);
        let lease = granted.lease;
        let state = Mutex::default();
        let share = if pid == 0 { Share::Connection(connection) } else { Share::Process(pid) };
        let outgoing =
            Arc::new(Self { runtime, connection, share, export, lease, backend, segments, chunks, state });
        let this = Arc::clone(&outgoing);
        runtime.worker.submit(move || this.or_refuse(request, |this| this.wait_until_ready(request)));
        Ok(outgoing)
    }

    /// Handles the request for the next chunk, by which the importer has taken the one before. Returns the reply where the chunk is
    /// available, or the importer's violation of the protocol.
    pub(crate) fn ask(
        self: &Arc<Self>,
        request: RequestId,
        chunk: u64,
    ) -> std::result::Result<Option<Reply>, &'static str> {
        let mut state = self.lock();
        if !state.begun || chunk != state.asked || chunk >= self.chunks.count() || state.wanted.is_some() {
            return Err("it asked for another chunk of a copy than the next");
        }
        state.asked += 1;
        state.wanted = Some((request, chunk));
        let ahead = state.submitted > chunk;
        let answer = state.take_answer(self.chunks);
        drop(state);
        self.runtime.metrics.staged_chunks_total.add(1);
        self.runtime.metrics.staged_chunks_ahead_total.add(u64::from(ahead));
        let this = Arc::clone(self);
        self.runtime.worker.submit(move || this.fill_halves());
        Ok(answer)
    }

    /// Ends the copy. Returns true where its lease may end at once; otherwise the lease ends when the device has finished.
    pub(crate) fn end(&self, how: Termination) -> bool {
        let mut state = self.lock();
        state.ended = Some(how);
        state.wanted = None;
        let (halves, idle) = (state.halves.take(), state.in_flight == 0);
        drop(state);
        self.drop_on_worker(halves);
        idle
    }

    /// Frees the host memory of an importer that leaves it unused.
    pub(crate) fn end_if_silent(&self) {
        let mut state = self.lock();
        let silent = state.answered.is_some_and(|at| clock::elapsed(at) > SILENCE);
        if !silent || state.wanted.is_some() || state.in_flight > 0 || state.halves.is_none() {
            return;
        }
        let seconds = SILENCE.as_secs();
        let detail = format!("the importer took no chunk for {seconds} s while other copies waited for room");
        static WARNINGS: Throttle = Throttle::new();
        if let Some(count) = WARNINGS.count() {
            tracing::warn!(target: crate::os::log::STAGING, export = %self.export, lease = %self.lease, detail, count, "a copy is given up");
        }
        state.failed = Some(Refusal::Failed(Failure::quota(detail)));
        let halves = state.halves.take();
        drop(state);
        self.drop_on_worker(halves);
    }

    /// Runs a step before the first reply; an error refuses the copy.
    fn or_refuse(self: &Arc<Self>, request: RequestId, step: impl FnOnce(&Arc<Self>) -> Step) {
        if self.lock().ended.is_some() {
            return;
        }
        if let Err(refusal) = step(self) {
            let refused = Refused { lease: self.lease, request, refusal };
            self.runtime.poller.refuse_staging(self.connection, refused);
        }
    }

    fn wait_until_ready(self: &Arc<Self>, request: RequestId) -> Step {
        let granted = self.granted()?;
        stale(granted.borrowed.as_ref().map_or(Ok(()), BorrowedMemory::check))?;
        let ready = behind_ready(&*self.backend, &granted.shared)?;
        let this = Arc::clone(self);
        let go_on = move || this.or_refuse(request, |this| this.wait_for_room(request));
        match ready {
            Some(event) => self.runtime.worker.submit_when(event, go_on),
            None => go_on(),
        }
        Ok(())
    }

    fn wait_for_room(self: &Arc<Self>, request: RequestId) -> Step {
        let runtime = self.runtime;
        let this = Arc::clone(self);
        let bytes = self.chunks.buffer_bytes() as u64;
        runtime.stagings.when_there_is_room(runtime, self.share, bytes, move |room| {
            this.or_refuse(request, |this| this.start(request, room));
        });
        if runtime.stagings.somebody_waits() {
            runtime.poller.watch_stagings();
        }
        Ok(())
    }

    fn start(self: &Arc<Self>, request: RequestId, room: SetAside) -> Step {
        let runtime = self.runtime;
        let halves = Halves::new(&self.backend, self.segments.device(), self.chunks, room)?;
        let file = halves.file()?;
        let mut state = self.lock();
        if state.ended.is_some() {
            drop(state);
            drop(halves);
            return Ok(());
        }
        state.halves = Some(Arc::new(halves));
        state.begun = true;
        state.answered = Some(clock::now());
        drop(state);
        runtime.metrics.stagings_total.add(1);
        let (lease, chunk_bytes, bytes) = (self.lease, self.chunks.chunk_bytes(), self.segments.len());
        runtime.poller.answer(
            self.connection,
            Reply::Staging { request, lease, chunk_bytes, bytes },
            Some(file),
        );
        kill_point!("exporter:staging-begun");
        self.fill_halves();
        Ok(())
    }

    /// Submits the chunks that may be copied now: one more than was requested.
    fn fill_halves(self: &Arc<Self>) {
        while let Some((chunk, halves)) = self.next() {
            if let Err(refusal) = self.fill(chunk, &halves) {
                self.filled(Err(refusal));
            }
        }
    }

    fn next(&self) -> Option<(u64, Arc<Halves>)> {
        let mut state = self.lock();
        let chunk = state.submitted;
        if chunk >= self.chunks.count() || chunk > state.asked {
            return None;
        }
        let halves = Arc::clone(state.halves.as_ref()?);
        state.submitted += 1;
        state.in_flight += 1;
        Some((chunk, halves))
    }

    fn fill(self: &Arc<Self>, chunk: u64, halves: &Arc<Halves>) -> Step {
        let Granted { borrowed, shared, .. } = self.granted()?;
        stale(borrowed.as_ref().map_or(Ok(()), BorrowedMemory::check))?;
        // SAFETY: the lease keeps the regions, and with them the owner, until `filled` has been called for this chunk.
        let event = unsafe { halves.take(&*self.backend, &self.segments, (self.chunks, chunk)) };
        let event = event?;
        let (this, halves) = (Arc::clone(self), Arc::clone(halves));
        let filled = move || {
            // The bytes may already have been those of another allocation.
            this.filled(stale(borrowed.as_ref().map_or(Ok(()), BorrowedMemory::check)));
            kill_point!("exporter:staging-chunk");
            drop((shared, halves));
        };
        match event {
            Some(event) => self.runtime.worker.submit_when(event, filled),
            None => filled(),
        }
        Ok(())
    }

    /// Notes that a chunk has been copied, or could not be.
    fn filled(&self, result: Step) {
        let runtime = self.runtime;
        let mut state = self.lock();
        state.in_flight -= 1;
        let mut unused = None;
        match result {
            Ok(()) => state.filled += 1,
            Err(refusal) => {
                state.failed.get_or_insert(refusal);
                unused = state.halves.take();
            }
        }
        let answer = state.take_answer(self.chunks);
        let over = state.ended.filter(|_| state.in_flight == 0);
        drop(state);
        drop(unused);
        if let Some(answer) = answer {
            runtime.poller.answer(self.connection, answer, None);
        }
        if let Some(how) = over {
            runtime.exports.release(self.export, self.lease, how);
        }
    }

    /// Returns the lease, unless it has ended.
    fn granted(&self) -> std::result::Result<Granted, Refusal> {
        self.runtime.exports.granted(self.export, self.lease).ok_or(Refusal::Dropped)
    }

    /// Drops host memory on the worker: a driver call.
    fn drop_on_worker(&self, halves: Option<Arc<Halves>>) {
        if let Some(halves) = halves {
            self.runtime.worker.submit(move || drop(halves));
        }
    }

    fn lock(&self) -> MutexGuard<'_, OutgoingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The outcome of a step of the copy.
type Step = std::result::Result<(), Refusal>;

/// An event that is reached when the bytes are ready; `None` where they are.
fn behind_ready(backend: &dyn DeviceIpc, shared: &Shared) -> Result<Option<Box<dyn DeviceEvent>>> {
    let Some(ready) = &shared.ready else { return Ok(None) };
    if ready.event.query()? {
        return Ok(None);
    }
    let device = ready.event.device();
    let stream = backend.memory().create_stream(device)?;
    ready.event.wait_on(stream.as_borrowed())?;
    let behind = backend.create_event(device)?;
    behind.record(stream.as_borrowed())?;
    Ok(Some(behind))
}

impl OutgoingState {
    fn take_answer(&mut self, chunks: Chunks) -> Option<Reply> {
        let (request, chunk) = self.wanted?;
        let answer = match &self.failed {
            Some(refusal) => Reply::Refused { request, refusal: refusal.clone() },
            None if self.filled > chunk => Reply::Staged { request, chunk, bytes: chunks.len(chunk) },
            None => return None,
        };
        self.wanted = None;
        self.answered = Some(clock::now());
        Some(answer)
    }
}

impl Halves {
    fn new(
        backend: &Arc<dyn DeviceIpc>,
        device: DeviceOrdinal,
        chunks: Chunks,
        room: SetAside,
    ) -> Result<Self> {
        let pages = HostPages::create("device-ipc-staging", chunks.buffer_bytes())?;
        let pinned = match pages.known_to(backend, device, Use::Copies) {
            Ok(_) => true,
            Err(error) => {
                tracing::debug!(target: crate::os::log::STAGING, %error, "a copy goes through memory that is not page-locked");
                false
            }
        };
        let stream = backend.memory().create_stream(device)?;
        Ok(Self { stream, pages, pinned, _room: room })
    }

    fn file(&self) -> Result<OwnedFd> {
        let file = self.pages.file().try_clone_to_owned();
        file.map_err(|error| Error::io("handing out host memory of a copy", error))
    }

    /// Copies a chunk to its place. Returns an event that is reached when the copy is complete, or `None` if it is.
    ///
    /// # Safety
    ///
    /// The segments stay allocated until then.
    unsafe fn take(
        &self,
        backend: &dyn DeviceIpc,
        segments: &Segments,
        (chunks, chunk): (Chunks, u64),
    ) -> Result<Option<Box<dyn DeviceEvent>>> {
        let (place, len) = (chunks.place(chunk), chunks.len(chunk));
        assert!(place + len as usize <= self.pages.len(), "chunks lie in the pages");
        let (memory, stream) = (backend.memory(), self.stream.as_borrowed());
        // SAFETY: inside the pages, by the check above.
        let bytes: NonNull<u8> = unsafe { self.pages.base().add(place) };
        let mut parts = segments.within(chunks.start(chunk), len);
        if !self.pinned {
            let mut own = vec![0_u8; len as usize];
            for (offset, part) in parts {
                let own = &mut own[offset as usize..][..part.len as usize];
                // SAFETY: the part stays allocated, as the caller promised.
                unsafe { memory.read(part, own, stream)? };
            }
            // SAFETY: the pages are mapped, and only ever touched by raw addresses: an importer that writes to them meanwhile
            // spoils its own copy.
            unsafe { bytes.as_ptr().copy_from_nonoverlapping(own.as_ptr(), own.len()) };
            return Ok(None);
        }
        let recorded = parts
            .try_for_each(|(offset, part)| {
                // SAFETY: the part stays allocated, as the caller promised, and its place is inside the chunk's. The pages are
                // pinned as long as `self`, which outlives the copy: the event's waiter holds it, and errors are waited for.
                unsafe { memory.copy_to_host(bytes.add(offset as usize), part, stream) }
            })
            .and_then(|()| backend.capabilities(segments.device()))
            .and_then(|capabilities| {
                if !capabilities.ipc_events {
                    return Ok(None);
                }
                let event = backend.create_event(segments.device())?;
                event.record(stream)?;
                Ok(Some(event))
            });
        match recorded {
            Ok(Some(event)) => Ok(Some(event)),
            // Without an event the copy has to be waited for: nothing else would tell when the memory is free.
            Ok(None) => memory.synchronize(stream).map(|()| None),
            Err(error) => {
                memory.synchronize(stream)?;
                Err(error)
            }
        }
    }
}
