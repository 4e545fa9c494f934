//! The importer's side: a lease of an exporter on another host, and the pull of its bytes.

#![allow(unsafe_code, reason = "an engine writes to the destinations, which the pull keeps")]

use std::fmt;
use std::time::{Duration, Instant};

use super::incoming::IncomingPull;
use super::lease::{RemoteLease, transfer_limit};
use crate::backend::engine::{Piece, PullRequest, TransferMemory};
use crate::backend::{Buffer, MemoryUse, with_device_context};
use crate::model::address::DeviceRange;
use crate::model::error::{Error, Result};
use crate::os::clock;
use crate::os::kill::kill_point;
use crate::sharing::pull::{Failed, Pull, PullOwner};
use crate::sharing::staging::CopyLayout;
use crate::sharing::{RecoverableError, allocate};
use crate::transport::Deadline;
use crate::wire::Span;
use crate::wire::remote::RemoteRequest;

/// The interval at which the exporter's connection is looked at.
const LOOK: Duration = Duration::from_millis(10);

/// Pulls an export to a new buffer, as the layout states, and waits until the copy is complete.
pub(crate) fn pull_in(incoming: &IncomingPull<'_>, layout: &CopyLayout) -> Result<Buffer> {
    let piece = |(span, offset): (&Span, u64)| Piece {
        source: span.region as usize,
        source_offset: span.offset,
        destination: 0,
        destination_offset: offset,
        len: span.len,
    };
    let pieces: Vec<_> = layout.spans().map(piece).collect();
    let granted = incoming.request(&pieces)?;
    let buffer = allocate(incoming.backend, incoming.device, layout.buffer_bytes(), MemoryUse::new())?;
    let range = buffer.range();
    Ok(granted.pull(&[range], &pieces, buffer)?)
}

/// Pulls pieces of an export to memory on one device, which belongs to `owner`, and waits until the copy is complete.
///
/// # Errors
///
/// With the owner, if the engine does not use the memory any longer.
pub(crate) fn pull_into<O: fmt::Debug + Send + 'static>(
    incoming: &IncomingPull<'_>,
    destinations: &[DeviceRange],
    pieces: &[Piece],
    owner: O,
) -> Result<O, Failed<O>> {
    let granted = match incoming.request(pieces) {
        Ok(granted) => granted,
        Err(error) => return Err(RecoverableError::new(error, Some(owner))),
    };
    granted.pull(destinations, pieces, owner).map_err(|failed| {
        let (error, unused) = failed.into_parts();
        RecoverableError::new(error, unused.map(PullDestination::into_owner))
    })
}

impl<'a> IncomingPull<'a> {
    /// Requests a lease.
    fn request(&'a self, pieces: &[Piece]) -> Result<GrantedPull<'a>> {
        self.space()?;
        let bytes = pieces.iter().map(|piece| piece.len).fold(0, u64::saturating_add);
        let limit = transfer_limit(self.timeout, bytes);
        let deadline = Deadline::after(self.timeout);
        let (lease, metadata) = RemoteLease::begin(self, RemoteRequest::Open, limit, deadline)?;
        Ok(GrantedPull { incoming: self, lease, metadata })
    }
}

/// A lease, and the engine's metadata of the regions.
struct GrantedPull<'a> {
    incoming: &'a IncomingPull<'a>,
    lease: RemoteLease,
    metadata: Vec<Vec<u8>>,
}

impl GrantedPull<'_> {
    /// Pulls to memory that belongs to `owner`, waits, and releases the lease.
    fn pull<O: fmt::Debug + Send + 'static>(
        self,
        destinations: &[DeviceRange],
        pieces: &[Piece],
        owner: O,
    ) -> Result<O, Failed<PullDestination<O>>> {
        let Self { incoming: IncomingPull { runtime, remote, backend, device, report, .. }, lease, metadata } =
            self;
        if let Err(error) = lease.check() {
            return Err(RecoverableError::new(error, Some(PullDestination::new(owner, lease))));
        }
        let limit = lease.limit();
        let memory = |range: &DeviceRange| TransferMemory {
            space: backend.transfer_space(range.device),
            address: range.ptr.get(),
            len: range.len,
        };
        let sources: Vec<_> = metadata.iter().map(Vec::as_slice).collect();
        let destinations: Vec<_> = destinations.iter().map(memory).collect();
        let request = PullRequest { sources: &sources, destinations: &destinations, pieces };
        let owner = PullDestination::new(owner, lease);
        // SAFETY: the owner keeps the memory, and no other code accesses it until it is returned here.
        let start = || unsafe { Pull::start(runtime.for_guard(), remote.engine(), &request, owner, limit) };
        let pull = with_device_context(&***backend, *device, start)?;
        kill_point!("importer:remote-pulling");
        let mut finished = pull.wait(report)?;
        if let Err(error) = finished.lease.check() {
            return Err(RecoverableError::new(error, Some(finished)));
        }
        kill_point!("importer:remote-pulled");
        finished.lease.finish();
        kill_point!("importer:remote-released");
        Ok(finished.into_owner())
    }
}

/// The owner of the destinations, and the lease, which exist until the engine has finished.
#[derive(Debug)]
struct PullDestination<O: Send + 'static> {
    /// Taken when the engine has finished.
    owner: Option<O>,
    lease: RemoteLease,
    next_look: Instant,
}

impl<O: Send + 'static> PullDestination<O> {
    fn new(owner: O, lease: RemoteLease) -> Self {
        Self { owner: Some(owner), lease, next_look: clock::now() + LOOK }
    }

    fn into_owner(mut self) -> O {
        self.owner.take().expect("taken here and by drop alone")
    }
}

impl<O: fmt::Debug + Send + 'static> PullOwner for PullDestination<O> {
    fn keep_alive(&mut self) -> Result<()> {
        let now = clock::now();
        if self.lease.is_over() || now < self.next_look {
            return Ok(());
        }
        self.next_look = now + LOOK;
        if self.lease.receive(Duration::ZERO)?.is_some() {
            return Err(self.lease.exporter.protocol("it sent another reply to a ping"));
        }
        self.lease.ping()
    }

    fn failed(&mut self, error: Error) -> Error {
        let error = self.lease.exporter.error(error);
        self.lease.reason(error)
    }

    fn with_exporter(&self, error: Error) -> Error {
        self.lease.exporter.error(error)
    }
}

impl<O: Send + 'static> Drop for PullDestination<O> {
    /// A driver's free waits for streams; the caller must not.
    fn drop(&mut self) {
        if let (Some(owner), Some(runtime)) = (self.owner.take(), self.lease.runtime.here()) {
            runtime.worker.submit(move || drop(owner));
        }
    }
}
