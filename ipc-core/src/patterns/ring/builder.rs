//! Builders of rings and of ring readers.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::reader::RingReader;
use super::replica::Replication;
use super::slots::SlotRanges;
use super::writer::{Ring, has_no_timelines};
use crate::backend::interop::Region;
use crate::backend::stream::AsStream;
use crate::backend::{Access, DeviceIpc};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Remedy, Result};
use crate::model::layout::{TensorLayout, check_alignment};
use crate::model::placement::DeviceMap;
use crate::sharing::export::{ShareBuilder, check_backend};
use crate::sharing::import::{CopyPolicy, Mapping, OpenBuilder};
use crate::sharing::timeline::OwnCounter;
use crate::sharing::{ErrorWith, Session};
use crate::wire::descriptor::{Descriptor, DescriptorError};
use crate::wire::ring::{ALIGNMENT, MAX_RING_SLOTS, RingSlots};

/// Default number of slots: one is read while the other is written.
const DEFAULT_SLOTS: u32 = 2;

/// A builder for [`Ring`]s; see [`Ipc::ring`](crate::Ipc::ring).
///
/// # Examples
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let ipc = device_ipc_core::Ipc::with_backend(device_ipc_mock::MockBackend::from_spec("devices=1")?);
/// use device_ipc_core::{Access, Dtype, TensorLayout};
///
/// let memory = ipc.allocate(0, 4 << 10)?;
/// let slot = TensorLayout::contiguous(Dtype::F32, [16, 16])?;
/// let ring = ipc.ring(memory).slots(4).layout(slot.clone()).access(Access::ReadOnly).start()?; // four slots of 1 KiB
/// assert_eq!(ring.sequence(), 0);
///
/// let reader = ipc.open_ring(ring.descriptor()).at_home()?; // in another process
/// assert_eq!(reader.layout(), Some(&slot));
///
/// let wide = TensorLayout::contiguous(Dtype::F32, [16, 17])?;
/// assert!(ipc.ring(ipc.allocate(0, 4 << 10)?).slots(4).layout(wide).start().is_err());
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is shared before RingBuilder::start"]
pub struct RingBuilder<'a, O> {
    share: ShareBuilder<'a, O>,
    backend: &'a Arc<dyn DeviceIpc>,
    region: Region,
    slots: u32,
    layout: Option<TensorLayout>,
    timeout: Duration,
    first: u64,
}

impl<'a, O: Send + 'static> RingBuilder<'a, O> {
    pub(crate) const fn new(
        share: ShareBuilder<'a, O>,
        backend: &'a Arc<dyn DeviceIpc>,
        region: Region,
        timeout: Duration,
    ) -> Self {
        Self { share, backend, region, slots: DEFAULT_SLOTS, layout: None, timeout, first: 0 }
    }

    /// Sets the number of slots, by default 2.
    ///
    /// All slots have the same size: the size of the memory divided by the number of slots, rounded down to a multiple of
    /// 256 B.
    pub const fn slots(mut self, slots: u32) -> Self {
        self.slots = slots;
        self
    }

    /// States the tensor that each slot holds, from the start of the slot, for readers: [`RingReader::layout`]. By default it has one
    /// dimension of the owner's element type and takes the whole slot, if the owner has one; otherwise slots are plain bytes.
    pub fn layout(mut self, layout: TensorLayout) -> Self {
        self.layout = Some(layout);
        self
    }

    /// Sets the sequence of the first publication.
    pub(super) const fn first_sequence(mut self, first: u64) -> Self {
        self.first = first;
        self
    }

    /// Sets the access of readers, as [`ShareBuilder::access`](crate::ShareBuilder::access) does.
    pub fn access(mut self, access: Access) -> Self {
        self.share = self.share.access(access);
        self
    }

    /// Sets the timeout of [`Ring::write`] if [the host waits](Ring::waits_on_host), by default the timeout of the
    /// [`Ipc`](crate::Ipc).
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Shares the memory. Readers can open the ring from now on.
    ///
    /// # Errors
    ///
    /// [`ErrorWith`], which contains the owner and the reason: [`Error::InvalidRegion`] if the number of slots is out of range
    /// or the memory is too small for it; [`Error::Layout`] if the tensor does not fit into a slot; otherwise as for
    /// [`ShareBuilder::start`](crate::ShareBuilder::start).
    pub fn start(self) -> Result<Ring, ErrorWith<O>> {
        let (slots, layout, own) = match self.checked() {
            Ok(checked) => checked,
            Err(error) => return Err(self.share.refuse(error)),
        };
        let export = self.share.start()?;
        Ok(Ring::new(export, Arc::clone(self.backend), slots, layout, own, self.timeout, self.first))
    }

    /// Returns the slots, the tensor in each, and the counter of the writer's own streams, which is `None` if the host waits.
    fn checked(&self) -> Result<(SlotRanges, Option<TensorLayout>, Option<Arc<OwnCounter>>)> {
        let (range, count) = (self.region.range, self.slots);
        check_backend("the memory", self.region.backend, self.backend.info().name)?;
        if !(1..=MAX_RING_SLOTS).contains(&count) {
            return Err(Error::InvalidRegion(format!(
                "cannot create a ring of {count} slots: the number must be 1 to {MAX_RING_SLOTS}"
            )));
        }
        let bytes = range.len / u64::from(count) / ALIGNMENT * ALIGNMENT;
        let slots = SlotRanges::new(range, count, bytes).ok_or_else(|| {
            Error::InvalidRegion(format!(
                "{} B are too few for {count} slots of at least {ALIGNMENT} B each; use fewer slots or more memory",
                range.len
            ))
        })?;
        let layout = match (&self.layout, self.region.dtype) {
            (Some(layout), _) => Some(layout.clone()),
            (None, Some(dtype)) => Some(TensorLayout::to_end(dtype, 0, bytes)?),
            (None, None) => None,
        };
        if let Some(layout) = &layout {
            layout.check_fits(bytes)?;
            check_alignment(layout.dtype(), range.ptr.get())?;
        }
        let on_host = has_no_timelines(&**self.backend, range.device)?;
        let own = if on_host { None } else { Some(OwnCounter::new(self.backend)?) };
        Ok((slots, layout, own))
    }
}

impl<O> fmt::Debug for RingBuilder<'_, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingBuilder")
            .field("share", &self.share)
            .field("slots", &self.slots)
            .finish_non_exhaustive()
    }
}

/// A builder for [`RingReader`]s; see [`Ipc::open_ring`](crate::Ipc::open_ring).
///
/// The method that selects the device opens the ring.
///
/// # Examples
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let ipc = device_ipc_core::Ipc::with_backend(device_ipc_mock::MockBackend::from_spec("devices=1")?);
/// # let ring = ipc.ring(ipc.allocate(0, 1 << 10)?).start()?;
/// # let line = ring.descriptor().to_string();
/// use device_ipc_core::Descriptor;
///
/// let descriptor: Descriptor = line.parse()?;
/// let stream = ipc.create_stream(0)?;
/// let reader = ipc.open_ring(&descriptor).on(&stream)?; // on the stream's device
/// assert_eq!(reader.sequence(), 0);
/// # Ok(())
/// # }
/// ```
#[must_use = "the ring is not opened before at_home, on_device, on or on_mapped_devices"]
#[derive(Debug)]
pub struct RingOpenBuilder<'a> {
    session: &'a Session,
    open: OpenBuilder<'a>,
    copy: CopyPolicy,
    slots: Option<RingSlots>,
    timeout: Duration,
}

impl<'a> RingOpenBuilder<'a> {
    pub(crate) fn new(session: &'a Session, descriptor: &'a Descriptor, timeout: Duration) -> Self {
        let open = OpenBuilder::new(session, descriptor, timeout).of_ring();
        Self { session, open, copy: CopyPolicy::Never, slots: descriptor.ring(), timeout }
    }

    /// Sets the access of this reader, by default the access that the writer permits.
    pub fn access(mut self, access: Access) -> Self {
        self.open = self.open.access(access);
        self
    }

    /// Sets the timeout for the writer's process to answer, and of [`RingReader::next_ahead`] if [the host
    /// waits](RingReader::waits_on_host).
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self.open = self.open.timeout(timeout);
        self
    }

    /// Sets the condition under which each publication is copied over the network; by default none is. A ring is never staged:
    /// [`CopyPolicy::IfNeeded`] and [`CopyPolicy::Always`] only pull, and the method that opens returns [`Error::Unsupported`] for
    /// the policies that only stage.
    ///
    /// The reader of copies has private slots, as many as the ring, and a thread of the library copies each publication into the next
    /// one as soon as this reader has released it. The writer may reuse its slot when the copy is complete, so it can be ahead of
    /// the reader by twice the number of slots. The reader works as otherwise, with these differences:
    ///
    /// - Errors of the connection and of a copy are [`Error::InPull`]. As after the death of the writer, the reader first receives
    ///   the publications that have arrived. [`Error::Timeout`] in an `InPull` means that the writer's process has been silent for
    ///   [`timeout`](Self::timeout), because it is suspended or cannot be reached.
    /// - The writer's [`readers_behind`](crate::Ring::readers_behind) and [`holders`](crate::Ring::holders) contain the
    ///   process id and the program that this process states, with its network address.
    /// - [`Ring::close`](crate::Ring::close) waits until the copies are complete, and not for this reader. A writer whose process
    ///   exits without it ends the ring by [`Error::ExporterGone`], also if it has dropped the ring.
    /// - A reader that does not answer, because its process is suspended or cannot be reached, delays the writer for
    ///   [`timeout`](Self::timeout), 1 s for each 16 MiB of the ring, and 10 s. Then it is dismissed. One whose process terminates
    ///   leaves the ring at once.
    pub fn copy(mut self, policy: CopyPolicy) -> Self {
        self.copy = policy;
        self
    }

    /// Opens the ring on the home device of the memory.
    ///
    /// # Errors
    ///
    /// Those of [`OpenBuilder::at_home`]; [`DescriptorError::Kind`] for the descriptor of other memory; [`Error::Protocol`] if the writer's process does not
    /// share the memory as a ring.
    pub fn at_home(self) -> Result<RingReader> {
        self.open(|open| open.at_home())
    }

    /// Opens the ring on the device with this ordinal.
    ///
    /// # Errors
    ///
    /// As for [`OpenBuilder::on_device`] and [`at_home`](Self::at_home).
    pub fn on_device(self, device: impl Into<DeviceOrdinal>) -> Result<RingReader> {
        self.open(|open| open.on_device(device))
    }

    /// Opens the ring on the device of a stream.
    ///
    /// # Errors
    ///
    /// As for [`OpenBuilder::on`] and [`at_home`](Self::at_home).
    pub fn on<M>(self, stream: &impl AsStream<M>) -> Result<RingReader> {
        self.open(|open| open.on(stream))
    }

    /// Opens the ring on the device that the map assigns to the home device.
    ///
    /// # Errors
    ///
    /// As for [`OpenBuilder::on_mapped_devices`] and [`at_home`](Self::at_home).
    pub fn on_mapped_devices(self, map: &DeviceMap) -> Result<RingReader> {
        self.open(|open| open.on_mapped_devices(map))
    }

    fn open(self, open: impl FnOnce(OpenBuilder<'_>) -> Result<Mapping>) -> Result<RingReader> {
        let slots = self.slots.ok_or(DescriptorError::Kind {
            expected: "a ring",
            found: "other memory",
            remedy: Remedy::OpenMemory,
        })?;
        let copy = self.copy.without_staging().ok_or_else(|| Error::Unsupported {
            backend: self.session.backend().info().name,
            what: "copy a ring through host memory".into(),
            why: "such a copy does not receive later publications; open the ring in place, or copy it over the network".into(),
        })?;
        let replication = Replication::new(slots, self.timeout);
        let mapping = open(self.open.copy(copy).replicated_by(&replication))?;
        RingReader::open(mapping, slots, self.timeout, replication.into_relay())
    }
}
