//! The builder of a ring.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::slots::SlotRanges;
use super::writer::{Ring, has_no_timelines};
use crate::backend::interop::Region;
use crate::backend::{Access, DeviceIpc};
use crate::model::error::{Error, Result};
use crate::model::layout::{TensorLayout, check_alignment};
use crate::sharing::RecoverableError;
use crate::sharing::export::{ShareBuilder, check_backend};
use crate::sharing::timeline::OwnCounter;
use crate::wire::ring::{ALIGNMENT, MAX_RING_SLOTS};

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

    /// States the tensor that each slot holds, from the start of the slot, for readers: [`RingReader::layout`](crate::RingReader::layout). By default it has one
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
    /// [`RecoverableError`], which contains the owner and the reason: [`Error::InvalidRegion`] if the number of slots is out of range
    /// or the memory is too small for it; [`Error::Layout`] if the tensor does not fit into a slot; otherwise as for
    /// [`ShareBuilder::start`](crate::ShareBuilder::start).
    pub fn start(self) -> Result<Ring, RecoverableError<O>> {
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
