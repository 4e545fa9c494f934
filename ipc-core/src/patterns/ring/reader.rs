//! A reader's guard, and its open.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use super::read_slot::RingReadSlot;
use super::reader_state::{ReaderState, Releases};
use super::replica::{Replica, ReplicaWriter, Replication};
use super::slots::SlotRanges;
use super::writer::has_no_timelines;
use crate::backend::stream::AsStream;
use crate::backend::{Access, DeviceBound};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{DescriptorError, Error, Remedy, Result};
use crate::model::layout::TensorLayout;
use crate::os::Condvar;
use crate::os::kill::kill_point;
use crate::sharing::PolledReadiness;
use crate::sharing::export::check_backend;
use crate::sharing::import::{Mapping, OpenOptions, Openable};
use crate::sharing::timeline::RingStart;
use crate::wire::ring::RingSlots;

/// A reader of a ring. It receives, in order, every publication made after the reader opened the ring.
///
/// [`next`](Self::next) waits on the host for a publication, and returns published slots only. A loop over it processes every
/// publication exactly once, and no unpublished bytes:
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let ipc = device_ipc_core::Ipc::with_backend(device_ipc_mock::MockBackend::from_spec("devices=1")?);
/// # let mut ring = ipc.ring(ipc.allocate(0, 512)?).start()?;
/// # let descriptor = ring.descriptor().clone();
/// use std::time::Duration;
///
/// let stream = ipc.create_stream(0)?;
/// let mut reader = ipc.open_ring(&descriptor).on(&stream)?;
/// # for value in [1.0_f32, 2.0] {
/// #     let mut slot = ring.write(&stream)?;
/// #     slot.view_mut(&stream)?.copy_from(&[value; 64])?;
/// #     slot.publish()?;
/// # }
/// # drop(ring); // the writer publishes 1.0 and 2.0, and closes the ring
/// let mut values = Vec::new();
/// while let Some(slot) = reader.next(Duration::from_secs(30))? {
///     values.push(slot.view::<f32, _>(&stream)?.to_vec()?[0]);
///     slot.release(&stream)?; // the writer may reuse the slot when the stream reaches this point
/// }
/// assert_eq!(values, [1.0, 2.0]); // the writer has closed the ring
/// # Ok(())
/// # }
/// ```
///
/// | call | waits for the publication | returns |
/// |---|---|---|
/// | [`next`](Self::next) | on the host | a published slot |
/// | [`try_next`](Self::try_next) | not at all; [`AsFd`] for waiting | a published slot |
/// | [`next_ahead`](Self::next_ahead) | on the stream | a slot that **may never be published** |
///
/// When the writer has closed the ring (or dropped it) and the reader has taken every publication, `next` and `try_next` return
/// `None`, and `next_ahead` returns [`Error::RingClosed`], as the release of a slot ahead does. When the writer has died and the
/// reader has taken every publication that had arrived, all three return [`Error::ExporterGone`].
///
/// # Slots ahead of their publication
///
/// [`next_ahead`](Self::next_ahead) returns a slot at once, and the stream waits for the publication, so that the host can
/// submit the work that reads the slot meanwhile. The writer may close the ring, or die, before it publishes that sequence; the
/// stream then continues over bytes that were never written. The first call after the end is known reports it: an access to the
/// slot ([`view`](RingReadSlot::view), [`tensor`](RingReadSlot::tensor)), its release, or the next call of this reader. The end
/// is known as soon as the stream has continued. So a result is valid if the work that computed it has finished before the
/// slot's [`release`](RingReadSlot::release) returned `Ok`. A slot that was accessed and released earlier is reported by the
/// next call and by [`check`](Self::check), as [`Error::RingUnpublished`].
///
/// # Waiting for a descriptor
///
/// The reader implements [`AsFd`], for `poll`, mio or tokio's `AsyncFd`: the descriptor is readable until
/// [`try_next`](Self::try_next) has returned [`Poll::Pending`], and becomes readable again when there is a publication to take,
/// or an end or an error to report. It may also be readable without either. Wait for it only after `try_next` has returned
/// `Pending`; never read from it. A wait that is cancelled loses nothing.
///
/// A publication by a stream is a store of the device and wakes no thread, so a thread of the library polls for it, from a
/// `Pending` until the descriptor becomes readable: at most 1 ms apart in the first second, later at most 10 ms. The first call
/// of `as_fd` creates the descriptor; a reader without it costs nothing.
///
/// # Several slots
///
/// A reader may take several slots at a time and release them in any order; the writer is notified of a release when all older
/// slots are released. Dropping the reader closes it when its slots are dropped and the work that released them has finished.
#[derive(Debug)]
pub struct RingReader {
    inner: Arc<ReaderState>,
    next: u64,
}

impl RingReader {
    /// Creates a reader of an open mapping. The first use of the lease's counters notifies the writer. `relay` pulls the
    /// publications of a writer on another host.
    pub(super) fn open(
        mapping: Mapping,
        ring: RingSlots,
        timeout: Duration,
        relay: Option<ReplicaWriter>,
    ) -> Result<Self> {
        let slots = SlotRanges::new(mapping.range(), ring.slots(), ring.slot_bytes()).ok_or_else(|| {
            Error::InvalidRegion(format!(
                "{} slots of {} bytes do not lie in the {} bytes that were mapped",
                ring.slots(),
                ring.slot_bytes(),
                mapping.len()
            ))
        })?;
        let on_host = has_no_timelines(&**mapping.first_part().backend(), mapping.device())?;
        let timeline = mapping.first_part().words()?;
        let writer = mapping.descriptor().exporter().pid;
        let start = match timeline.start() {
            RingStart::At(start) => start,
            RingStart::Dismissed => return Err(Error::DismissedFromRing { pid: writer }),
            RingStart::None => {
                timeline.check()?;
                return Err(Error::Protocol(format!(
                    "process {writer} does not share this memory as a ring"
                )));
            }
        };
        kill_point!("importer:ring-joined");
        let runtime = mapping.first_part().runtime()?.for_guard();
        let inner = ReaderState {
            backend: Arc::clone(mapping.first_part().backend()),
            mapping: Some(mapping),
            timeline,
            slots,
            writer,
            replica: relay.map(Replica::start).transpose()?,
            on_host,
            timeout,
            releases: Mutex::new(Releases::from(start)),
            released: Condvar::new(),
            readiness: PolledReadiness::default(),
            runtime,
        };
        Ok(Self { inner: Arc::new(inner), next: start })
    }

    /// Returns the sequence of the slot that the next call takes.
    pub const fn sequence(&self) -> u64 {
        self.next
    }

    /// Returns the device that the ring is mapped on in this process.
    pub fn device(&self) -> DeviceOrdinal {
        self.inner.slots.device()
    }

    /// Returns the access of this process to the memory.
    pub fn access(&self) -> Access {
        self.inner.mapping().access()
    }

    /// Returns the tensor that each slot holds, from the start of the slot, or `None` if the writer stated none.
    pub fn layout(&self) -> Option<&TensorLayout> {
        self.inner.mapping().descriptor().layout()
    }

    /// Returns whether the host waits because the device has no timelines.
    ///
    /// Then [`next_ahead`](Self::next_ahead) waits for the publication, and a thread of the library signals releases.
    pub fn waits_on_host(&self) -> bool {
        self.inner.on_host
    }

    /// Waits on the host for the next publication and takes its slot. `None` when the writer has closed the ring and every
    /// publication has been taken.
    ///
    /// Work on any stream may then read the slot. The wait spins before it sleeps.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`]; [`Error::ExporterGone`] after the last publication that arrived before the writer died;
    /// [`Error::RingUnpublished`] at the end of the ring, if an earlier slot was taken [ahead](Self::next_ahead), accessed and
    /// released but never published; [`Error::RingSlotsHeld`]; [`Error::DismissedFromRing`]; [`Error::OnWorkerThread`] in a
    /// callback; [`Error::Forked`]. After an error, the next call takes the same slot.
    pub fn next(&mut self, timeout: Duration) -> Result<Option<RingReadSlot>> {
        let inner = &*self.inner;
        inner.runtime.check()?;
        let published = match inner.may_take(self.next) {
            Ok(false) => inner.wait_published("waiting for a publication", self.next, timeout),
            checked => checked.map(drop),
        };
        self.take_or_end(published)
    }

    /// Takes the slot of the next publication if it has arrived. Does not wait: [`Poll::Pending`] if it has not arrived, and
    /// `Ready(None)` when the writer has closed the ring and every publication has been taken.
    ///
    /// Work on any stream may then read the slot. After `Pending`, the reader's descriptor ([`AsFd`]) becomes readable when
    /// this call has something else to return.
    ///
    /// # Errors
    ///
    /// As for [`next`](Self::next), except those of waiting.
    pub fn try_next(&mut self) -> Result<Poll<Option<RingReadSlot>>> {
        let inner = &*self.inner;
        inner.runtime.check()?;
        let published = match inner.may_take(self.next) {
            Ok(false) => {
                inner.watch_publication(self.next);
                return Ok(Poll::Pending);
            }
            checked => checked.map(drop),
        };
        self.take_or_end(published).map(Poll::Ready)
    }

    /// Takes the next slot **ahead of its publication**: later work on the stream waits until the slot is published.
    ///
    /// The host does not wait, unless the reader [waits on the host](Self::waits_on_host). The slot may never be published, and
    /// the stream then continues over bytes that were never written. Use what was read only after the work has finished and the
    /// slot's [`release`](RingReadSlot::release) has returned `Ok`; see [slots ahead of their
    /// publication](Self#slots-ahead-of-their-publication).
    ///
    /// # Errors
    ///
    /// As for [`next`](Self::next), with [`Error::Timeout`] only if the host waits, or if dropped slots are not released within
    /// the builder's timeout; [`Error::RingClosed`] when the writer has closed the ring and every publication has been taken, as
    /// from the slot's release; [`Error::WrongBackend`]; [`Error::StreamCapturing`]; [`Error::Unsupported`] for a stream of a
    /// device without timelines in a ring of a device with timelines.
    pub fn next_ahead<M>(&mut self, stream: &impl AsStream<M>) -> Result<RingReadSlot> {
        let stream = stream.as_stream();
        let inner = &*self.inner;
        inner.runtime.check()?;
        check_backend("the stream", stream.backend(), inner.backend.info().name)?;
        let submitted = match inner.may_take(self.next) {
            Ok(false) => inner.wait_on(self.next, stream),
            checked => checked.map(drop),
        };
        self.take_if(submitted)
    }

    /// Takes the next slot if it can be taken, or returns the reason why it cannot.
    fn take_if(&mut self, found: Result<()>) -> Result<RingReadSlot> {
        found.map_err(|error| self.inner.end_of_ring(error))?;
        Ok(self.take())
    }

    /// Takes the next slot if it has been published, or returns the end of the ring.
    fn take_or_end(&mut self, published: Result<()>) -> Result<Option<RingReadSlot>> {
        match self.take_if(published) {
            Ok(slot) => Ok(Some(slot)),
            Err(Error::RingClosed { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn take(&mut self) -> RingReadSlot {
        let sequence = self.next;
        self.inner.lock().taken.take();
        self.next += 1;
        kill_point!("importer:ring-taken");
        RingReadSlot::new(Arc::clone(&self.inner), sequence)
    }

    /// Registers a callback that runs once when the writer's process has terminated; see [`Mapping::on_gone`].
    pub fn on_gone(&self, callback: impl FnOnce(&Error) + Send + 'static) {
        let inner = &*self.inner;
        match &inner.replica {
            None => inner.mapping().on_gone(callback),
            Some(replica) => replica.on_gone(DeviceBound::new(&inner.backend, self.device(), callback)),
        }
    }

    /// Returns whether publications are copied from another host ([`OpenBuilder::copy`](crate::OpenBuilder::copy)).
    pub fn is_copy(&self) -> bool {
        self.inner.replica.is_some()
    }

    /// Returns an error if a slot that this reader took [ahead](Self::next_ahead), accessed and released was never published.
    ///
    /// The next call that takes a slot reports the same. If a reader takes a fixed number of slots and releases them without
    /// waiting, call this when the work has finished, before its result is used.
    ///
    /// # Errors
    ///
    /// [`Error::RingUnpublished`]; [`Error::DismissedFromRing`]; [`Error::Forked`].
    pub fn check(&self) -> Result<()> {
        let inner = &*self.inner;
        inner.runtime.check()?;
        let Some(last) = inner.lock().last_read_ahead else { return Ok(()) };
        inner.is_published(last).map(drop).map_err(|error| inner.end_of_ring(error))
    }

    /// Returns the descriptor of [`AsFd`], which the first call creates, or an error if there is none left.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] if the process cannot create a descriptor (its limit of open files is reached). A later call tries again.
    pub fn try_as_fd(&self) -> Result<BorrowedFd<'_>> {
        self.inner.readiness.fd()
    }

    /// Closes the reader, as dropping it does. Does not wait.
    pub fn close(self) {}
}

/// Readable until [`RingReader::try_next`] has returned [`Poll::Pending`], and again when there is a publication to take, or an
/// end or an error to report. The first call creates the descriptor, which belongs to the reader.
///
/// # Panics
///
/// The first call panics if the process cannot create a descriptor (its limit of open files is reached);
/// [`RingReader::try_as_fd`] returns the error.
impl AsFd for RingReader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.try_as_fd().unwrap_or_else(|error| panic!("{error}; RingReader::try_as_fd returns this error"))
    }
}

/// As for [`AsFd`](RingReader#impl-AsFd-for-RingReader).
impl AsRawFd for RingReader {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl Openable for RingReader {
    fn open(
        options: OpenOptions<'_>,
        open: impl FnOnce(&OpenOptions<'_>) -> Result<Mapping>,
    ) -> Result<Self> {
        let slots = options.descriptor.ring().ok_or(DescriptorError::Kind {
            expected: "a ring",
            found: "other memory",
            remedy: Remedy::OpenMemory,
        })?;
        let copy = options.copy.without_staging().ok_or_else(|| Error::Unsupported {
            backend: options.ipc.backend().info().name,
            what: "copy a ring through host memory".into(),
            why: "such a copy does not receive later publications; open the ring in place, or copy it over the network".into(),
        })?;
        let timeout = options.timeout;
        let replication = Replication::new(slots, timeout);
        let mapping = open(&options.of_ring(copy, &replication))?;
        Self::open(mapping, slots, timeout, replication.into_relay())
    }
}
