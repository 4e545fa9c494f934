//! The importer's side of a ring on another host: the lease of a reader, and the pulls of slots.
//!
//! The exporter reports each publication. The importer pulls the slot and acknowledges it, after which the writer may reuse the
//! slot. The bytes count only after the exporter has confirmed the acknowledgement: until then the writer may have dismissed the
//! reader, and have written the slot again during the pull.

#![allow(unsafe_code, reason = "an engine writes to a slot, whose memory the pull keeps")]

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::incoming::IncomingPull;
use super::lease::{RemoteLease, transfer_limit};
use crate::backend::engine::{MemorySpace, Piece, PullRequest, TransferEngine, TransferMemory};
use crate::backend::{Buffer, DeviceIpc, with_device_context};
use crate::model::address::DeviceRange;
use crate::model::error::{Error, ErrorKind, Result};
use crate::sharing::RuntimeRef;
use crate::sharing::pull::{Pull, PullOwner};
use crate::sharing::timeline::TIMELINE_END;
use crate::transport::Deadline;
use crate::wire::remote::{RemoteReply, RemoteRequest, RingEnd};

/// A reader's lease on a ring of another host. It ends when this and all pulls have been dropped, and the engine has finished.
#[derive(Debug)]
pub(crate) struct RemoteRing {
    runtime: RuntimeRef,
    lease: Arc<Mutex<ReaderLease>>,
    engine: Arc<dyn TransferEngine>,
    backend: Arc<dyn DeviceIpc>,
    space: MemorySpace,
    /// The metadata of the ring's memory.
    metadata: Vec<u8>,
    /// The time limit of each pull.
    limit: Duration,
}

#[derive(Debug)]
struct ReaderLease {
    lease: RemoteLease,
    /// Whether only pulls are left, which have to keep the lease alive.
    is_abandoned: bool,
}

/// A message of the exporter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RingMessage {
    /// This sequence has been published.
    Published(u64),
    /// The pulled bytes of this sequence are right.
    Confirmed(u64),
    /// The writer has closed the ring.
    Closed,
}

impl RemoteRing {
    /// Joins the ring, whose slots have this size together. Returns the sequence with which the reader begins.
    ///
    /// # Errors
    ///
    /// As for a copy; [`Error::Protocol`] if the export is no ring.
    pub(crate) fn join(incoming: &IncomingPull<'_>, bytes: u64) -> Result<(Self, u64)> {
        let space = incoming.space()?;
        let (deadline, limit) = (Deadline::after(incoming.timeout), transfer_limit(incoming.timeout, bytes));
        let (mut lease, mut metadata) = RemoteLease::begin(incoming, RemoteRequest::Join, limit, deadline)?;
        let sequence = match lease.receive_until(deadline)? {
            RemoteReply::Joined { sequence } if sequence < TIMELINE_END => sequence,
            _ => return Err(lease.exporter.protocol("it sent no sequence with which a reader begins")),
        };
        let ring = Self {
            lease: Arc::new(Mutex::new(ReaderLease { lease, is_abandoned: false })),
            runtime: incoming.runtime.for_guard(),
            engine: Arc::clone(&incoming.remote.engine),
            backend: Arc::clone(incoming.backend),
            space,
            // A ring has one region.
            metadata: metadata.swap_remove(0),
            limit,
        };
        Ok((ring, sequence))
    }

    fn lease(&self) -> MutexGuard<'_, ReaderLease> {
        lock(&self.lease)
    }

    /// Returns the next message, if there is one.
    ///
    /// # Errors
    ///
    /// [`Error::DismissedFromRing`]; otherwise the error of the connection.
    pub(crate) fn try_receive(&self) -> Result<Option<RingMessage>> {
        let lease = &mut self.lease().lease;
        Ok(Some(match lease.receive(Duration::ZERO)? {
            None => return Ok(None),
            Some(RemoteReply::Published { sequence }) => RingMessage::Published(sequence),
            Some(RemoteReply::Confirmed { sequence }) => RingMessage::Confirmed(sequence),
            Some(RemoteReply::Ended(RingEnd::Closed)) => RingMessage::Closed,
            Some(RemoteReply::Ended(RingEnd::Dismissed)) => return Err(lease.dismissed()),
            Some(_) => return Err(lease.exporter.protocol("it sent another message than those of a ring")),
        }))
    }

    /// Returns the error of a message that is not the next one of its kind.
    pub(crate) fn out_of_order(&self, message: RingMessage) -> Error {
        self.lease().lease.exporter.protocol(format!("{message:?} is out of order"))
    }

    /// States that the bytes of this sequence have arrived.
    pub(crate) fn acknowledge(&self, sequence: u64) -> Result<()> {
        let lease = &mut self.lease().lease;
        lease.send(&RemoteRequest::Acknowledge { sequence }).map_err(|error| lease.reason(error))
    }

    /// Sends a sign of life if it is time for one, and checks those of the exporter. Called after all messages have been received.
    pub(crate) fn ping(&self) -> Result<()> {
        let lease = &mut self.lease().lease;
        lease
            .ping()
            .map_err(|error| if error.kind() == ErrorKind::Timeout { error } else { lease.reason(error) })
    }

    /// Waits for a message, for the time of the next [ping](Self::ping), or until `or` is readable.
    pub(crate) fn wait(&self, time: Duration, or: BorrowedFd<'_>) {
        let lease = &self.lease().lease;
        lease.wait(time.min(lease.until_ping()), or);
    }

    /// Starts a copy of the bytes at this offset of the ring into a slot.
    ///
    /// # Safety
    ///
    /// The slot lies in the buffer, and no other code accesses it until [`SlotPull::try_finish`] has returned true.
    pub(crate) unsafe fn pull(
        &self,
        offset: u64,
        buffer: &Arc<Buffer>,
        slot: DeviceRange,
    ) -> Result<SlotPull> {
        let destination = TransferMemory { space: self.space, address: slot.ptr.get(), len: slot.len };
        let piece =
            Piece { source: 0, source_offset: offset, destination: 0, destination_offset: 0, len: slot.len };
        let request =
            PullRequest { sources: &[&self.metadata], destinations: &[destination], pieces: &[piece] };
        let owner = SlotDestination { _buffer: Arc::clone(buffer), lease: Arc::clone(&self.lease) };
        // SAFETY: the owner keeps the buffer, and the caller the slot.
        let start = || unsafe { Pull::start(self.runtime, &*self.engine, &request, owner, self.limit) };
        Ok(SlotPull(with_device_context(&*self.backend, slot.device, start)?))
    }
}

impl Drop for RemoteRing {
    fn drop(&mut self) {
        let state = &mut *self.lease();
        state.is_abandoned = true;
        // A pull that does not end keeps the lease, but the writer must not wait for its slot.
        if Arc::strong_count(&self.lease) > 1 && !state.lease.is_over() {
            let _ = state.lease.send(&RemoteRequest::Leave);
        }
    }
}

fn lock(lease: &Mutex<ReaderLease>) -> MutexGuard<'_, ReaderLease> {
    lease.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A running copy of a slot. After a drop the library keeps the buffer and the lease until the engine has finished.
#[derive(Debug)]
pub(crate) struct SlotPull(Pull<SlotDestination>);

impl SlotPull {
    /// Returns whether the copy is complete. Not called again after true or an error.
    pub(crate) fn try_finish(&mut self) -> Result<bool> {
        Ok(self.0.try_finish()?.is_some())
    }
}

/// The memory and the lease, which the engine uses until it has finished.
#[derive(Debug)]
struct SlotDestination {
    _buffer: Arc<Buffer>,
    lease: Arc<Mutex<ReaderLease>>,
}

impl PullOwner for SlotDestination {
    fn keep_alive(&mut self) -> Result<()> {
        let mut state = lock(&self.lease);
        let ReaderLease { lease, is_abandoned } = &mut *state;
        // The ring's thread does that otherwise.
        if *is_abandoned && !lease.is_over() {
            lease.receive(Duration::ZERO)?;
            lease.ping()?;
        }
        Ok(())
    }

    fn failed(&mut self, error: Error) -> Error {
        let lease = &mut lock(&self.lease).lease;
        let error = lease.exporter.error(error);
        lease.reason(error)
    }

    fn with_exporter(&self, error: Error) -> Error {
        lock(&self.lease).lease.exporter.error(error)
    }
}
