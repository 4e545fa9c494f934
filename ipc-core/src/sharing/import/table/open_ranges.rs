//! The open of the driver mappings of an export's regions, with the handles of the exporter's reply.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::ImportTable;
use super::ahead::AheadPlace;
use super::keys::{LeaseKey, OnDevice, RangeKey};
use super::open_target::OpenTarget;
use super::range::{Content, OpenRange, RangeRef};
use super::regions::MappedRegions;
use crate::backend::{Access, DeviceIpc, ReceivedHandle};
use crate::model::address::{DevicePtr, DeviceRange};
use crate::model::device::{DeviceIdentity, DeviceOrdinal};
use crate::model::error::{Error, Result};
use crate::model::lease::LeaseId;
use crate::os::process::ProcessIdentity;
use crate::sharing::Runtime;
use crate::sharing::import::link::Link;
use crate::wire::WireHandle;
use crate::wire::descriptor::DescribedExtent;

impl ImportTable {
    /// Returns references to the driver mappings of all regions, opened with the handles of the reply.
    pub(super) fn open_ranges(
        &self,
        wanted: &OpenTarget<'_>,
        lease_key: &LeaseKey,
        link: &Link,
        id: LeaseId,
        (handles, fds): (Vec<WireHandle>, Vec<OwnedFd>),
    ) -> Result<MappedRegions> {
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
        place: &AheadPlace,
        lease_key: &LeaseKey,
        handle: &WireHandle,
    ) -> Result<RangeRef> {
        if handle.fds != 0 || handle.kind == WireHandle::OWN_ADDRESS {
            return Err(Error::Protocol("it sent a handle ahead that cannot be opened".into()));
        }
        let LeaseKey { exporter, on, .. } = lease_key;
        let (home, identity) = (place.home, place.home_identity);
        let received = received(handle.clone(), Vec::new(), (home, identity, **exporter));
        let (exporter, allocations) = (Arc::clone(exporter), [handle.allocation].into());
        let key = RangeKey { exporter, allocations, on: *on, alone: 0 };
        let open = |_: &RangeRef| {
            self.open_by_driver(place.runtime, &place.backend, vec![received], place.device, place.access)
        };
        let (range, _) = self.ranges.acquire(key, place.deadline, open, |range| range.close())?;
        Ok(range)
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
            let fds = fds.by_ref().take(usize::from(handle.fds)).collect();
            received(
                handle,
                fds,
                (wanted.home, wanted.descriptor.part.home, wanted.descriptor.contents.exporter),
            )
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
            self.open_by_driver(wanted.runtime, wanted.backend, received, wanted.device, wanted.access)
        };
        let (range, _) = self.ranges.acquire(key, wanted.deadline, open, |range| range.close())?;
        Ok(range)
    }

    fn open_by_driver(
        &self,
        runtime: &'static Runtime,
        backend: &Arc<dyn DeviceIpc>,
        received: Vec<ReceivedHandle>,
        device: DeviceOrdinal,
        access: Access,
    ) -> Result<OpenRange> {
        let opened = backend.open(received, device, access)?;
        runtime.metrics.driver_opens_total.add(1);
        runtime.metrics.mapped_bytes.add(opened.range.len);
        self.addresses.add(opened.range);
        Ok(OpenRange::new(runtime, backend, opened.range, Content::Opened(opened), None))
    }

    pub(super) fn release_ranges(&self, ranges: &[RangeRef]) {
        for range in ranges {
            self.ranges.release(Arc::clone(range), |range| range.close());
        }
    }
}

impl OpenRange {
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
        let range = range.ok_or_else(invalid)?;
        Ok(Self::new(wanted.runtime, wanted.backend, range, Content::None, None))
    }
}

/// Returns a handle for the backend.
fn received(
    handle: WireHandle,
    fds: Vec<OwnedFd>,
    (home, home_identity, exporter): (Option<DeviceOrdinal>, DeviceIdentity, ProcessIdentity),
) -> ReceivedHandle {
    let WireHandle { kind, bytes, size, generation, .. } = handle;
    let home_identity = Some(home_identity);
    ReceivedHandle { kind, bytes, fds, size, generation, home, home_identity, exporter }
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

/// Checks that the exporter's reply fits the descriptor.
fn check_opened(wanted: &OpenTarget<'_>, handles: &[WireHandle], fds: usize) -> Result<()> {
    let misfit = |why: String| Err(Error::Protocol(why));
    let allocations = wanted.descriptor.regions().allocations();
    if handles.len() != allocations {
        return misfit(format!("it sent {} handles for {allocations} allocations", handles.len()));
    }
    let claimed: usize = handles.iter().map(|handle| usize::from(handle.fds)).sum();
    if fds < claimed {
        return Err(Error::io(
            format!(
                "receiving the memory's {claimed} file descriptors, of which {fds} arrived (this process may have too few left; \
                 raise its limit, ulimit -n)"
            ),
            rustix::io::Errno::MFILE,
        ));
    }
    if fds > claimed {
        return misfit(format!("it sent {fds} file descriptors and stated {claimed}"));
    }
    let mut handles = handles.iter();
    for (index, region) in wanted.descriptor.regions().iter().enumerate() {
        for (extent, handle) in region.iter().zip(handles.by_ref()) {
            check_handle(extent, handle).map_err(|error| (wanted.with_region_name)(index, error))?;
        }
    }
    Ok(())
}

fn check_handle(extent: &DescribedExtent, handle: &WireHandle) -> Result<()> {
    let generation = handle.generation.map_or(0, |generation| generation.0);
    if handle.size == extent.size && generation == extent.generation {
        return Ok(());
    }
    Err(Error::StaleGeneration(format!(
        "the descriptor names an allocation of {} bytes with number {}, the exporter one of {} bytes with number \
         {generation}",
        extent.size, extent.generation, handle.size
    )))
}
