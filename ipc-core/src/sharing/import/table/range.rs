//! Driver mappings, each opened once.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use super::ImportTable;
use super::begin::{OpenTarget, check_opened};
use super::keys::{LeaseKey, OnDevice, RangeKey};
use super::regions::Regions;
use super::reserved::ReservedImport;
use crate::backend::{DeviceIpc, Opened, ReceivedHandle};
use crate::model::address::{DevicePtr, DeviceRange};
use crate::model::error::{Error, Result};
use crate::model::lease::LeaseId;
use crate::os::process::ProcessIdentity;
use crate::sharing::RuntimeRef;
use crate::sharing::import::cache::{CacheEntry, Cached};
use crate::sharing::import::link::Link;
use crate::sharing::import::reservation::Place;
use crate::wire::WireHandle;

/// A reference to a driver mapping.
pub(super) type RangeRef = Arc<CacheEntry<RangeKey, OpenRange>>;

/// A driver mapping.
#[derive(Debug)]
pub(super) struct OpenRange {
    pub(super) runtime: RuntimeRef,
    pub(super) backend: Arc<dyn DeviceIpc>,
    pub(super) content: Mutex<Content>,
    pub(super) range: DeviceRange,
    /// The reserved addresses, if the mapping has an import.
    pub(super) place: Option<Arc<Place>>,
}

/// The vendor's object that a driver mapping closes.
#[derive(Debug)]
pub(super) enum Content {
    /// None: it has been closed, or the memory is of this process.
    None,
    /// A range at addresses of the driver's choice.
    Opened(Opened),
    /// An import for reserved addresses.
    Imported(ReservedImport),
}

impl Cached for OpenRange {
    /// The leases are kept idle; a driver mapping without a lease is not.
    fn may_be_kept(&self) -> bool {
        false
    }

    fn bytes(&self) -> u64 {
        self.range.len
    }
}

impl ImportTable {
    /// Returns references to the driver mappings of all regions, opened with the handles of the reply.
    pub(super) fn open_ranges(
        &self,
        wanted: &OpenTarget<'_>,
        lease_key: &LeaseKey,
        link: &Link,
        id: LeaseId,
        (handles, fds): (Vec<WireHandle>, Vec<OwnedFd>),
    ) -> Result<Regions> {
        check_opened(wanted, &handles, fds.len())?;
        let (mut handles, mut fds) = (handles.into_iter(), fds.into_iter());
        let (regions, place) = (wanted.descriptor.regions(), (&lease_key.exporter, lease_key.on));
        let mut opened = Opening { table: self, ranges: Vec::with_capacity(regions.len()) };
        // No other mapping shares an import, as each has its own addresses.
        let alone = if wanted.reserved.is_some() { lease_key.alone } else { 0 };
        for (index, region) in regions.iter().enumerate() {
            let handles = handles.by_ref().take(region.len());
            let range =
                self.open_region(wanted, place, link, (index, alone), handles, &mut fds).map_err(|error| {
                    match error {
                        // The driver's errors for an exporter that has terminated meanwhile, or has dropped the export, differ; the
                        // answer of its broker decides.
                        Error::Vendor(_) | Error::NoPeerAccess { .. } => {
                            link.confirm(id, wanted.deadline).err().unwrap_or(error)
                        }
                        error => error,
                    }
                });
            let range = range.map_err(|error| (wanted.with_region_name)(index, error))?;
            opened.ranges.push(range);
        }
        Ok(std::mem::take(&mut opened.ranges).into())
    }

    /// Returns a reference to the driver mapping of an allocation that a lease ahead is in.
    pub(super) fn open_ahead(
        &self,
        wanted: &OpenTarget<'_>,
        lease_key: &LeaseKey,
        link: &Link,
        handle: &WireHandle,
    ) -> Result<RangeRef> {
        if wanted.alone || handle.fds != 0 || handle.kind == WireHandle::OWN_ADDRESS {
            return Err(Error::Protocol("it sent a handle ahead that cannot be opened".into()));
        }
        let place = (&lease_key.exporter, lease_key.on);
        self.open_region(wanted, place, link, (0, 0), [handle.clone()].into_iter(), &mut std::iter::empty())
    }

    /// Returns a reference to the driver mapping of a region, which these handles open unless it is open already.
    fn open_region(
        &self,
        wanted: &OpenTarget<'_>,
        (exporter, on): (&Arc<ProcessIdentity>, OnDevice),
        link: &Link,
        (region, alone): (usize, u64),
        handles: impl Iterator<Item = WireHandle>,
        fds: &mut impl Iterator<Item = OwnedFd>,
    ) -> Result<RangeRef> {
        let mut allocations = Vec::with_capacity(handles.size_hint().0);
        let received = handles.map(|handle| {
            allocations.push(handle.allocation);
            ReceivedHandle {
                kind: handle.kind,
                bytes: handle.bytes,
                fds: fds.by_ref().take(usize::from(handle.fds)).collect(),
                size: handle.size,
                generation: handle.generation,
                home: wanted.home,
                home_identity: Some(wanted.descriptor.part.home),
                exporter: wanted.descriptor.contents.exporter,
            }
        });
        let received: Vec<_> = received.collect();
        let key = RangeKey { exporter: Arc::clone(exporter), allocations: allocations.into(), on, alone };
        let open = |_: &RangeRef| {
            if let Some(target) = wanted.reserved {
                return OpenRange::import(wanted, target, region, received);
            }
            if received.iter().any(|handle| handle.kind == WireHandle::OWN_ADDRESS) {
                return OpenRange::of_own_process(wanted, link, &received);
            }
            let opened = wanted.backend.open(received, wanted.device, wanted.access)?;
            wanted.runtime.metrics.driver_opens_total.add(1);
            wanted.runtime.metrics.mapped_bytes.add(opened.range.len);
            self.addresses.add(opened.range);
            Ok(OpenRange::new(wanted, opened.range, Content::Opened(opened), None))
        };
        let (range, _) = self.ranges.acquire(key, wanted.deadline, open, |range| range.close())?;
        Ok(range)
    }

    pub(super) fn release_ranges(&self, ranges: &[RangeRef]) {
        for range in ranges {
            self.ranges.release(Arc::clone(range), |range| range.close());
        }
    }
}

impl OpenRange {
    pub(super) fn new(
        wanted: &OpenTarget<'_>,
        range: DeviceRange,
        content: Content,
        place: Option<Arc<Place>>,
    ) -> Self {
        let (runtime, backend) = (wanted.runtime.for_guard(), Arc::clone(wanted.backend));
        Self { runtime, backend, content: Mutex::new(content), range, place }
    }

    /// Returns memory that another copy of the library shares in this process: there is one address, which the lease keeps valid.
    fn of_own_process(wanted: &OpenTarget<'_>, link: &Link, received: &[ReceivedHandle]) -> Result<Self> {
        let invalid = || Error::Protocol("it sent an address that is not of this process or region".into());
        if !link.is_in_this_process() {
            return Err(invalid());
        }
        let mut range: Option<DeviceRange> = None;
        for handle in received {
            let bytes = handle.bytes.as_slice().try_into().map_err(|_| invalid())?;
            let ptr = DevicePtr::new(u64::from_le_bytes(bytes));
            let (start, len) = range.map_or((ptr, 0), |before| (before.ptr, before.len));
            let is_next = handle.kind == WireHandle::OWN_ADDRESS && ptr.offset_from(start) == Some(len);
            let len = len.checked_add(handle.size).filter(|_| is_next).ok_or_else(invalid)?;
            range = Some(DeviceRange::new(wanted.device, start, len));
        }
        Ok(Self::new(wanted, range.ok_or_else(invalid)?, Content::None, None))
    }

    fn close(&self) {
        let mut content = self.content.lock().unwrap_or_else(PoisonError::into_inner);
        let content = std::mem::replace(&mut *content, Content::None);
        let runtime = self.runtime.here().filter(|_| !matches!(content, Content::None));
        let closed = match content {
            Content::None => Ok(()),
            Content::Opened(opened) => {
                if let Some(runtime) = runtime {
                    runtime.metrics.mapped_bytes.subtract(self.range.len);
                    // Before the driver may assign the addresses again.
                    runtime.imports.addresses.remove(self.range);
                }
                self.backend.close(opened)
            }
            Content::Imported(import) => self.close_import(import),
        };
        if let Err(error) = closed {
            tracing::warn!(target: crate::os::log::IMPORT, %error, "a mapping could not be closed");
        }
        // Whoever waits for this count relies on the close: a driver may import a handle once at a time.
        if let Some(runtime) = runtime {
            runtime.metrics.driver_closes_total.add(1);
        }
    }
}

/// The driver mappings of a lease so far; closed again if a further one fails.
struct Opening<'a> {
    table: &'a ImportTable,
    ranges: Vec<RangeRef>,
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        self.table.release_ranges(&self.ranges);
    }
}
