//! The guards of a ring's writer.

mod publisher;
mod readers;
mod write_slot;

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use super::members::{Members, ReaderPosition, describe_readers};
use super::slots::{SlotRanges, count_host_wait};
use crate::backend::DeviceIpc;
use crate::backend::stream::{AsStream, BorrowedStream};
use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::model::layout::TensorLayout;
use crate::model::lease::{Holders, LeaseId};
use crate::os::kill::kill_point;
use crate::os::wait_for_words;
use crate::sharing::export::{Export, ExportChanges, check_backend};
use crate::sharing::import::OwnMemory;
use crate::sharing::timeline::{OwnCounter, TIMELINE_END};
use crate::sharing::{PolledReadiness, RuntimeRef};
use crate::transport::check_may_wait;
use crate::wire::descriptor::{Descriptor, Memory};
use crate::wire::ring::RingSlots;

use publisher::Publisher;
pub(super) use publisher::{StreamKey, record_event_on};
pub use readers::RingReaders;
pub use write_slot::RingWriteSlot;

/// The writer of a ring: memory that is shared once, in slots that are written in turn.
///
/// [`write`](Self::write) returns the next slot; its stream waits until every reader has released the slot.
/// [`RingWriteSlot::publish`] notifies the readers when the stream reaches that point. If the device has timelines, no host
/// waits. Readers open ([`Ipc::open_ring`](crate::Ipc::open_ring)) and close the ring at any time. A reader that dies leaves
/// the ring, and streams that wait for it continue.
///
/// Dropping the ring closes it without waiting: readers receive all publications, then `None`.
///
/// # Examples
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let ipc = device_ipc_core::Ipc::with_backend(device_ipc_mock::MockBackend::from_spec("devices=1")?);
/// use std::time::Duration;
///
/// let mut ring = ipc.ring(ipc.allocate(0, 512)?).slots(2).start()?;
/// # let descriptor = ring.descriptor().clone();
/// # let reader = ipc.open_ring(&descriptor).at_home()?;
/// // Send ring.descriptor() to the reader, then wait until it has opened the ring.
/// ring.wait_readers(1, Duration::from_secs(30))?;
/// let stream = ipc.create_stream(0)?;
/// let mut slot = ring.write(&stream)?;
/// slot.view_mut(&stream)?.copy_from(&[1.0_f32; 64])?;
/// slot.publish()?;
/// assert_eq!(ring.sequence(), 1);
/// # drop(reader);
/// ring.close(Duration::from_secs(30))?; // waits until the readers have closed the ring
/// # Ok(())
/// # }
/// ```
pub struct Ring {
    // Fields are dropped in this order: the ring notifies readers of its end, then ends the export.
    close_guard: RingCloser,
    export: Export,
    /// The source of views of slots.
    memory: OwnMemory,
    descriptor: Descriptor,
    backend: Arc<dyn DeviceIpc>,
    slots: SlotRanges,
    publisher: Publisher,
    next: u64,
    timeout: Duration,
    /// The descriptor of the writer, created by its first use.
    readiness: PolledReadiness,
    runtime: RuntimeRef,
}

/// A guard that closes the ring when it is dropped.
struct RingCloser {
    members: Arc<Members>,
    runtime: RuntimeRef,
}

impl Drop for RingCloser {
    fn drop(&mut self) {
        if self.runtime.is_here() {
            self.members.close();
        }
    }
}

impl Ring {
    pub(super) const fn runtime(&self) -> RuntimeRef {
        self.runtime
    }

    pub(super) fn new(
        export: Export,
        backend: Arc<dyn DeviceIpc>,
        slots: SlotRanges,
        layout: Option<TensorLayout>,
        own: Option<Arc<OwnCounter>>,
        timeout: Duration,
        first: u64,
    ) -> Self {
        let runtime = export.runtime();
        let members = Arc::new(Members::new(own.clone(), first, runtime));
        let memory = export.descriptor().clone();
        if let Some(runtime) = runtime.here() {
            runtime.exports.observe(memory.export(), Arc::clone(&members) as _);
        }
        let ring = RingSlots::new(slots.count(), slots.bytes(), memory.len());
        let descriptor = memory.with(|contents| {
            contents.ring = ring;
            if let Memory::Region(region) = &mut contents.memory {
                region.layout = layout;
            }
        });
        Self {
            close_guard: RingCloser { members: Arc::clone(&members), runtime },
            export,
            memory: OwnMemory::new(Arc::clone(&backend), slots.device(), "the ring"),
            descriptor,
            publisher: Publisher::new(Arc::clone(&backend), members, own),
            backend,
            slots,
            next: first,
            timeout,
            readiness: PolledReadiness::default(),
            runtime,
        }
    }

    /// Returns the descriptor with which readers open the ring. Send it over any transport.
    pub const fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// Returns the tensor that each slot holds, or `None` for plain bytes; see [`RingBuilder::layout`].
    ///
    /// [`RingBuilder::layout`]: crate::RingBuilder::layout
    pub fn layout(&self) -> Option<&TensorLayout> {
        self.descriptor.layout()
    }

    /// Returns whether the host waits because the device has no timelines.
    ///
    /// Then [`write`](Self::write) waits for releases, and a thread of the library signals publications.
    pub const fn waits_on_host(&self) -> bool {
        self.publisher.waits_on_host()
    }

    /// Returns the next sequence to publish, which is the number of publications so far.
    pub const fn sequence(&self) -> u64 {
        self.next
    }

    /// Returns the number of readers.
    pub fn readers(&self) -> usize {
        self.watch().count()
    }

    /// Returns the descriptor of [`AsFd`], which the first call creates, or an error if there is none left.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the process cannot create a descriptor (its limit of open files is reached). A later call tries again.
    pub fn try_as_fd(&self) -> Result<BorrowedFd<'_>> {
        self.readiness.fd()
    }

    /// Waits until there are at least `count` readers.
    ///
    /// A reader receives only publications made after it opened the ring.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`], which states the number of readers; [`Error::OnWorkerThread`] in a callback; [`Error::Forked`].
    pub fn wait_readers(&self, count: usize, timeout: Duration) -> Result<()> {
        self.watch().wait_readers(count, timeout)
    }

    /// Returns the readers that the next [`write`](Self::write) waits for, the slowest first.
    pub fn readers_behind(&self) -> Vec<ReaderPosition> {
        self.watch().readers_behind()
    }

    /// Dismisses a reader and returns whether it was a reader.
    ///
    /// Streams that wait for the reader continue, and its slots are overwritten. The reader gets [`Error::DismissedFromRing`]
    /// when it takes, releases or checks a slot. It may open the ring again.
    pub fn dismiss(&self, reader: LeaseId) -> bool {
        self.watch().dismiss(reader)
    }

    /// Returns a handle to the readers for other threads, for use while the writer's thread waits in the driver.
    pub fn watch(&self) -> RingReaders {
        RingReaders {
            members: Arc::clone(self.publisher.members()),
            slots: self.slots.count(),
            runtime: self.runtime,
        }
    }

    /// Returns a descriptor that becomes readable when a reader has joined, and with every change of
    /// [`holders`](Self::holders).
    pub fn changes(&self) -> ExportChanges {
        self.export.changes()
    }

    /// Returns the holders of leases on the memory.
    pub fn holders(&self) -> Holders {
        self.export.holders()
    }

    /// Returns the next slot. Later work on the stream waits until every reader has released the slot, which the stream
    /// [publishes](RingWriteSlot::publish).
    ///
    /// The host does not wait, unless the ring [waits on the host](Self::waits_on_host). A reader that never releases its slots
    /// blocks the stream: [`readers_behind`](Self::readers_behind) returns it, [`dismiss`](Self::dismiss) removes it, and
    /// [`wait_writable`](Self::wait_writable) fails after a timeout.
    ///
    /// # Errors
    ///
    /// [`Error::WrongBackend`]; [`Error::StreamCapturing`]; if the host waits, [`Error::Timeout`] with the readers that are
    /// behind, after the builder's timeout; [`Error::Unsupported`] for a stream of a device without timelines in a ring of a
    /// device with timelines; [`Error::Forked`]. After an error, the next call returns the same slot.
    pub fn write<'r, M>(&'r mut self, stream: &'r impl AsStream<M>) -> Result<RingWriteSlot<'r>> {
        let stream = stream.as_stream();
        self.check_next(stream)?;
        if self.waits_on_host() {
            self.wait_writable(self.timeout)?;
        }
        self.take(stream)
    }

    /// Returns the next slot if every reader has released it. `None` otherwise: the slot would have to wait for a reader.
    ///
    /// After `None`, the ring's descriptor ([`AsFd`]) becomes readable when the slot is free.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write), except [`Error::Timeout`].
    pub fn try_write<'r, M>(&'r mut self, stream: &'r impl AsStream<M>) -> Result<Option<RingWriteSlot<'r>>> {
        let stream = stream.as_stream();
        self.check_next(stream)?;
        if let Some(previous) = self.slots.previous_in_slot(self.next)
            && self.publisher.is_in_use(previous)
        {
            self.readiness.watch(self.runtime, || {
                let members = Arc::clone(self.publisher.members());
                move || !members.is_in_use(previous)
            });
            return Ok(None);
        }
        self.take(stream).map(Some)
    }

    /// Returns the slot of a sequence that has not been published, if every reader has released it.
    pub(super) fn free_slot(&mut self, sequence: u64) -> Option<DeviceRange> {
        self.publisher.update();
        let is_free =
            self.slots.previous_in_slot(sequence).is_none_or(|previous| !self.publisher.is_in_use(previous));
        is_free.then(|| self.slots.of(sequence))
    }

    /// Checks that there is a next sequence, and that a stream can write it.
    fn check_next(&mut self, stream: BorrowedStream<'_>) -> Result<()> {
        self.runtime.check()?;
        check_backend("the stream", stream.backend(), self.backend.info().name)?;
        if self.next + 1 >= TIMELINE_END {
            let why = "the ring has used up its sequence numbers; create a new ring";
            return Err(Error::invalid_input(format!("sequence {}", self.next + 1), why));
        }
        self.publisher.update();
        Ok(())
    }

    /// Returns the next slot. The stream waits for its readers, unless the host has waited.
    fn take<'r>(&'r mut self, stream: BorrowedStream<'r>) -> Result<RingWriteSlot<'r>> {
        if !self.waits_on_host()
            && let Some(previous) = self.slots.previous_in_slot(self.next)
        {
            self.publisher.wait_release_on_stream(previous, stream)?;
        }
        kill_point!("exporter:ring-waited");
        let sequence = self.next;
        Ok(RingWriteSlot { ring: self, stream, sequence })
    }

    /// Waits on the host until every reader has released the slot that the next [`write`](Self::write) returns.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`], which names the readers that have not released it; [`Error::OnWorkerThread`] in a callback;
    /// [`Error::Forked`].
    pub fn wait_writable(&self, timeout: Duration) -> Result<()> {
        self.runtime.check()?;
        let Some(previous) = self.slots.previous_in_slot(self.next) else { return Ok(()) };
        if !self.publisher.is_in_use(previous) {
            return Ok(());
        }
        check_may_wait("waiting for a writable slot", timeout)?;
        count_host_wait(self.runtime);
        wait_for_words(
            timeout,
            || Ok(!self.publisher.is_in_use(previous)),
            || Error::Timeout {
                what: format!("the release of sequence {previous}, whose slot is to be reused"),
                after: timeout,
                detail: describe_readers(&self.publisher.members().behind(previous)),
            },
        )
    }

    /// Publishes a sequence to every reader by a stream.
    fn publish(&mut self, sequence: u64, stream: BorrowedStream<'_>) -> Result<()> {
        self.runtime.check()?;
        self.publisher.publish(sequence, stream, self.runtime)?;
        self.next = sequence + 1;
        kill_point!("exporter:ring-published");
        Ok(())
    }

    /// Publishes a sequence to every reader from the host.
    pub(super) fn publish_now(&mut self, sequence: u64) -> Result<()> {
        self.runtime.check()?;
        if let Some(previous) = self.slots.previous_in_slot(sequence) {
            self.publisher.check_released(previous, sequence)?;
        }
        self.publisher.publish_now(sequence, self.timeout)?;
        self.next = sequence + 1;
        kill_point!("exporter:ring-published");
        Ok(())
    }

    /// Closes the ring, and waits until every reader has closed it and the memory's owner has been dropped.
    ///
    /// # Errors
    ///
    /// [`Error::StillHeld`] after the timeout, with the remaining readers; the ring is closed nevertheless. [`Error::Forked`].
    pub fn close(self, timeout: Duration) -> Result<()> {
        let Self { close_guard, export, .. } = self;
        drop(close_guard);
        Ok(export.close(timeout)?)
    }
}

/// Returns whether a device has no timelines, so that the host waits.
pub(super) fn has_no_timelines(backend: &dyn DeviceIpc, device: DeviceOrdinal) -> Result<bool> {
    Ok(backend.timelines().is_none() || !backend.capabilities(device)?.timelines)
}

/// Readable until [`Ring::try_write`] has returned `None`, and again when the slot is free. The first call creates the
/// descriptor, which belongs to the ring. It may also be readable if the slot is not free; never read from it.
///
/// A release by a stream is a store of the device and wakes no thread, so a thread of the library polls for it, from a `None`
/// until the descriptor becomes readable: at most 1 ms apart in the first second, later at most 10 ms.
///
/// # Panics
///
/// The first call panics if the process cannot create a descriptor (its limit of open files is reached); [`Ring::try_as_fd`]
/// returns the error.
impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.try_as_fd().unwrap_or_else(|error| panic!("{error}; Ring::try_as_fd returns this error"))
    }
}

/// As for [`AsFd`](Ring#impl-AsFd-for-Ring).
impl AsRawFd for Ring {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("descriptor", &self.descriptor)
            .field("next", &self.next)
            .field("publisher", &self.publisher)
            .finish_non_exhaustive()
    }
}
