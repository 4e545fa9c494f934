//! What this process has open of others: the links to their brokers, the leases, the driver's mappings.
//!
//! A lease is held once for an export, device and access, however many mappings there are of it: the second open costs
//! neither a message nor a driver call. The driver's mapping is held once for the allocations, device and access: another
//! export of an allocation that is open costs a message and no driver call.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::slots::Slots;
use crate::address::DeviceRange;
use crate::backend::{Access, DeviceEvent, DeviceIpc, HandleBytes, Opened, ReceivedHandle};
use crate::broker::{AllocationId, AllowList, Deadline, Grant, Link, Token};
use crate::descriptor::{Descriptor, ExportId};
use crate::device::DeviceOrdinal;
use crate::error::{Error, Result};
use crate::lease::LeaseId;
use crate::process::ProcessIdentity;
use crate::runtime::Runtime;

/// Everything of others that this process has open.
#[derive(Debug, Default)]
pub(crate) struct ImportTable {
    links: Mutex<HashMap<ProcessIdentity, Arc<LinkSlot>>>,
    leases: Slots<LeaseKey, Lease>,
    ranges: Slots<RangeKey, OpenRange>,
}

/// Held while the link is being made, so that an exporter that does not answer delays no other one's opens.
type LinkSlot = Mutex<Option<Arc<Link>>>;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct LeaseKey {
    exporter: ProcessIdentity,
    export: ExportId,
    on: OnDevice,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct RangeKey {
    exporter: ProcessIdentity,
    allocations: Vec<AllocationId>,
    on: OnDevice,
}

/// Where and how something is open. Two instances of a backend share nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct OnDevice {
    backend: usize,
    device: DeviceOrdinal,
    access: Access,
}

/// A lease and what it opened.
#[derive(Debug)]
pub(super) struct Lease {
    id: LeaseId,
    export: ExportId,
    token: Token,
    pub(super) link: Arc<Link>,
    range: Option<(RangeKey, Arc<OpenRange>)>,
    pub(super) ready: Option<Box<dyn DeviceEvent>>,
}

/// The driver's mapping.
#[derive(Debug)]
struct OpenRange {
    backend: Arc<dyn DeviceIpc>,
    opened: Option<Opened>,
    range: DeviceRange,
}

/// What an open needs to know.
pub(super) struct Wanted<'a> {
    pub(super) backend: &'a Arc<dyn DeviceIpc>,
    pub(super) descriptor: &'a Descriptor,
    pub(super) device: DeviceOrdinal,
    pub(super) home: Option<DeviceOrdinal>,
    pub(super) access: Access,
    pub(super) allow: &'a AllowList,
    pub(super) deadline: Deadline,
}

impl Lease {
    /// The allocations as the driver mapped them.
    pub(super) fn mapped(&self) -> DeviceRange {
        self.range.as_ref().expect("taken when the lease ends").1.range
    }
}

impl ImportTable {
    /// A hold on the lease of the descriptor's export, begun unless there is one already.
    pub(super) fn acquire(&'static self, wanted: &Wanted<'_>) -> Result<(LeaseKey, Arc<Lease>)> {
        let descriptor = wanted.descriptor;
        let on = OnDevice {
            backend: Arc::as_ptr(wanted.backend).cast::<()>() as usize,
            device: wanted.device,
            access: wanted.access,
        };
        let key = LeaseKey { exporter: descriptor.exporter, export: descriptor.export, on };
        let lease = self.leases.acquire(&key, wanted.deadline, || self.begin(wanted, on))?;
        // A lease that was there already may be one that the exporter has ended for newcomers.
        let pid = descriptor.exporter.pid;
        let ended = if lease.link.is_gone() {
            Err(Error::ExporterGone { pid })
        } else if lease.link.has_dropped(descriptor.export) {
            Err(Error::ExportDropped { pid })
        } else if lease.token != descriptor.token {
            Err(Error::wrong_token(pid))
        } else {
            Ok(())
        };
        match ended {
            Ok(()) => Ok((key, lease)),
            Err(error) => {
                Runtime::get()?.worker.submit(move || self.release(&key, lease));
                Err(error)
            }
        }
    }

    /// Lets go of a hold. The last one closes the driver's mapping and gives the lease back; it may block.
    pub(super) fn release(&self, key: &LeaseKey, lease: Arc<Lease>) {
        self.leases.release(key, lease, |lease| self.end(lease));
    }

    /// Does this range lie in memory of another process?
    pub(crate) fn holds(&self, range: DeviceRange) -> bool {
        let overlaps = |open: &OpenRange| match (open.range.end(), range.end()) {
            (Some(open_end), Some(end)) => open.range.ptr < end && range.ptr < open_end,
            _ => false,
        };
        self.ranges.any(overlaps)
    }

    fn begin(&self, wanted: &Wanted<'_>, on: OnDevice) -> Result<Lease> {
        let descriptor = wanted.descriptor;
        let link = self.link(descriptor, wanted.allow, wanted.deadline)?;
        let peer = wanted.backend.local_peer_id(wanted.device)?;
        let (grant, fds) =
            link.open(descriptor.export, descriptor.token, wanted.access, peer, wanted.deadline)?;
        let id = grant.lease;
        let begun = self.open_granted(wanted, on, &link, grant, fds);
        if begun.is_err() {
            link.release(id);
        }
        begun
    }

    fn open_granted(
        &self,
        wanted: &Wanted<'_>,
        on: OnDevice,
        link: &Arc<Link>,
        grant: Grant,
        fds: Vec<OwnedFd>,
    ) -> Result<Lease> {
        check_grant(wanted.descriptor, &grant, fds.len())?;
        let exporter = wanted.descriptor.exporter;
        let allocations = grant.handles.iter().map(|handle| handle.allocation).collect();
        let key = RangeKey { exporter, allocations, on };
        let mut fds = fds.into_iter();
        let handles = grant.handles.into_iter().map(|handle| ReceivedHandle {
            kind: handle.kind,
            bytes: HandleBytes::new(handle.bytes),
            fds: fds.by_ref().take(usize::from(handle.fds)).collect(),
            size: handle.size,
            generation: handle.generation,
            home: wanted.home,
        });
        let range = self.ranges.acquire(&key, wanted.deadline, || {
            let opened = wanted.backend.open(handles.collect(), wanted.device, wanted.access)?;
            Ok(OpenRange { backend: Arc::clone(wanted.backend), range: opened.range, opened: Some(opened) })
        })?;
        let mut lease = Lease {
            id: grant.lease,
            export: wanted.descriptor.export,
            token: wanted.descriptor.token,
            link: Arc::clone(link),
            range: Some((key, range)),
            ready: None,
        };
        match grant.ready.map(|handle| wanted.backend.open_event(&handle, wanted.device)).transpose() {
            Ok(ready) => {
                lease.ready = ready;
                Ok(lease)
            }
            Err(error) => {
                self.close_range(&mut lease);
                Err(error)
            }
        }
    }

    fn end(&self, mut lease: Lease) {
        drop(lease.ready.take());
        self.close_range(&mut lease);
        lease.link.release(lease.id);
        lease.link.forget_dropped(lease.export);
    }

    fn close_range(&self, lease: &mut Lease) {
        if let Some((key, range)) = lease.range.take() {
            self.ranges.release(&key, range, OpenRange::close);
        }
    }

    /// The link to the descriptor's exporter, connected unless there is one already.
    fn link(&self, descriptor: &Descriptor, allow: &AllowList, deadline: Deadline) -> Result<Arc<Link>> {
        let slot = Arc::clone(self.lock_links().entry(descriptor.exporter).or_default());
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(link) = slot.as_ref().filter(|link| !link.is_gone()) {
            return Ok(Arc::clone(link));
        }
        let link = Arc::new(Link::connect(descriptor, allow, deadline)?);
        Runtime::get()?.poller.watch(&link)?;
        *slot = Some(Arc::clone(&link));
        Ok(link)
    }

    /// The exporter has gone, and its socket with it.
    pub(crate) fn forget_link(&self, exporter: &ProcessIdentity) {
        self.lock_links().remove(exporter);
    }

    fn lock_links(&self) -> MutexGuard<'_, HashMap<ProcessIdentity, Arc<LinkSlot>>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenRange {
    fn close(mut self) {
        if let Some(opened) = self.opened.take()
            && let Err(error) = self.backend.close(opened)
        {
            tracing::warn!(%error, "a mapping could not be closed");
        }
    }
}

/// The grant is the exporter's word; it must fit the descriptor.
fn check_grant(descriptor: &Descriptor, grant: &Grant, fds: usize) -> Result<()> {
    let misfit = |why: String| Err(Error::Protocol(why));
    if grant.handles.len() != descriptor.extents.len() {
        return misfit(format!(
            "it sent {} handles for {} allocations",
            grant.handles.len(),
            descriptor.extents.len()
        ));
    }
    let claimed: usize = grant.handles.iter().map(|handle| usize::from(handle.fds)).sum();
    if claimed != fds {
        return misfit(format!("it sent {fds} descriptors and spoke of {claimed}"));
    }
    for (handle, extent) in grant.handles.iter().zip(&descriptor.extents) {
        let generation = handle.generation.map_or(0, |generation| generation.0);
        if handle.size != extent.size || generation != extent.generation {
            return Err(Error::StaleGeneration(format!(
                "the descriptor names an allocation of {} bytes with number {}, the exporter one of {} bytes with \
                 number {generation}",
                extent.size, extent.generation, handle.size
            )));
        }
    }
    Ok(())
}
