//! How a ring is made, and how a reader joins.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::reader::RingReader;
use super::slots::Slots;
use super::writer::{Ring, has_no_timelines};
use crate::backend::interop::Region;
use crate::backend::stream::AsStream;
use crate::backend::{Access, DeviceIpc};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::model::placement::DeviceMap;
use crate::sharing::ErrorWith;
use crate::sharing::export::{ShareBuilder, check_backend};
use crate::sharing::import::{Mapping, OpenBuilder};
use crate::sharing::timeline::OwnCounter;
use crate::wire::ring::ALIGNMENT;
use crate::wire::ring::{MAX_RING_SLOTS, RingDescriptor};

/// How many slots a ring has unless said otherwise: one is read while the other is written.
const SLOTS: u32 = 2;

/// A ring in the making; see [`Ipc::ring`](crate::Ipc::ring).
#[must_use = "nothing is shared before RingBuilder::start"]
pub struct RingBuilder<'a, O> {
    share: ShareBuilder<'a, O>,
    backend: &'a Arc<dyn DeviceIpc>,
    region: Region,
    slots: u32,
    timeout: Duration,
}

impl<'a, O: Send + 'static> RingBuilder<'a, O> {
    pub(crate) const fn new(
        share: ShareBuilder<'a, O>,
        backend: &'a Arc<dyn DeviceIpc>,
        region: Region,
        timeout: Duration,
    ) -> Self {
        Self { share, backend, region, slots: SLOTS, timeout }
    }

    /// How many slots the memory is cut into; two unless said otherwise. Each has the same number of bytes, the memory's divided
    /// by the slots and rounded down to a multiple of 256.
    pub const fn slots(mut self, slots: u32) -> Self {
        self.slots = slots;
        self
    }

    /// What readers may do with the memory; as for [`ShareBuilder::access`](crate::ShareBuilder::access).
    pub fn access(mut self, access: Access) -> Self {
        self.share = self.share.access(access);
        self
    }

    /// How long [`Ring::write`] may wait where the host does the waiting; the [`Ipc`](crate::Ipc)'s time unless said otherwise.
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Shares the memory. Readers may join from now on.
    ///
    /// # Errors
    ///
    /// [`ErrorWith`], which holds the owner and the reason: [`Error::InvalidRegion`] where the memory is too small for the
    /// slots, or there are none or too many of them; else those of [`ShareBuilder::start`](crate::ShareBuilder::start).
    pub fn start(self) -> Result<Ring, ErrorWith<O>> {
        let (slots, own) = match self.checked() {
            Ok(checked) => checked,
            Err(error) => return Err(self.share.refuse(error)),
        };
        let export = self.share.start()?;
        Ok(Ring::new(export, Arc::clone(self.backend), slots, own, self.timeout))
    }

    /// Where the slots lie, and the counter of the writer's own streams; `None` where the host does the waiting.
    fn checked(&self) -> Result<(Slots, Option<Arc<OwnCounter>>)> {
        let (range, count) = (self.region.range, self.slots);
        check_backend("the memory", self.region.backend, self.backend.info().name)?;
        if !(1..=MAX_RING_SLOTS).contains(&count) {
            return Err(Error::InvalidRegion(format!("{count} slots; a ring has 1 to {MAX_RING_SLOTS}")));
        }
        let bytes = range.len / u64::from(count) / ALIGNMENT * ALIGNMENT;
        let slots = Slots::new(range, count, bytes).ok_or_else(|| {
            Error::InvalidRegion(format!(
                "{} bytes are too few for {count} slots of at least {ALIGNMENT} bytes each; take fewer slots, or more \
                 memory",
                range.len
            ))
        })?;
        let on_host = has_no_timelines(&**self.backend, range.device)?;
        let own = if on_host { None } else { Some(OwnCounter::new(self.backend)?) };
        Ok((slots, own))
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

/// A reader in the making; see [`Ipc::open_ring`](crate::Ipc::open_ring). It joins by the method that says where.
#[must_use = "nothing is joined before at_home, on_device, on or mapped_by"]
#[derive(Debug)]
pub struct RingOpenBuilder<'a> {
    open: OpenBuilder<'a>,
    descriptor: &'a RingDescriptor,
    timeout: Duration,
}

impl<'a> RingOpenBuilder<'a> {
    pub(crate) const fn new(
        open: OpenBuilder<'a>,
        descriptor: &'a RingDescriptor,
        timeout: Duration,
    ) -> Self {
        Self { open: open.alone(), descriptor, timeout }
    }

    /// What this process wants to do with the memory; what the writer permits unless said otherwise.
    pub const fn access(mut self, access: Access) -> Self {
        self.open = self.open.access(access);
        self
    }

    /// How long the writer's process may take to answer; and [`RingReader::next`] to wait where the host does the waiting.
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self.open = self.open.timeout(timeout);
        self
    }

    /// Joins on the device where the bytes live.
    ///
    /// # Errors
    ///
    /// Those of [`OpenBuilder::at_home`]; [`Error::Protocol`] where the writer's process shares the memory as no ring.
    pub fn at_home(self) -> Result<RingReader> {
        self.join(OpenBuilder::at_home)
    }

    /// Joins on the device at this position in this process's numbering.
    ///
    /// # Errors
    ///
    /// Those of [`OpenBuilder::on_device`]; as [`at_home`](Self::at_home).
    pub fn on_device(self, device: impl Into<DeviceOrdinal>) -> Result<RingReader> {
        self.join(|open| open.on_device(device))
    }

    /// Joins on the stream's device.
    ///
    /// # Errors
    ///
    /// Those of [`OpenBuilder::on`]; as [`at_home`](Self::at_home).
    pub fn on<M>(self, stream: &impl AsStream<M>) -> Result<RingReader> {
        self.join(|open| open.on(stream))
    }

    /// Joins on the device that the map names for the bytes' home.
    ///
    /// # Errors
    ///
    /// Those of [`OpenBuilder::mapped_by`]; as [`at_home`](Self::at_home).
    pub fn mapped_by(self, map: &DeviceMap) -> Result<RingReader> {
        self.join(|open| open.mapped_by(map))
    }

    fn join(self, open: impl FnOnce(OpenBuilder<'a>) -> Result<Mapping>) -> Result<RingReader> {
        let mapping = open(self.open)?;
        RingReader::join(mapping, self.descriptor, self.timeout)
    }
}
