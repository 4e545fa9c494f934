//! The resource behind a part of a mapping: a lease of another process or of this one, a copy, or reserved addresses.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::place::Place;
use super::table::LeaseRef;
use crate::backend::stream::BorrowedStream;
use crate::backend::{Buffer, DeviceIpc};
use crate::model::address::DeviceRange;
use crate::model::error::{Error, Result};
use crate::model::lease::LeaseId;
use crate::os::kill::kill_point;
use crate::sharing::Runtime;
use crate::sharing::export::Shared;
use crate::sharing::staging::CopyLayout;
use crate::sharing::timeline::{Termination, Timeline};
use crate::wire::descriptor::ExportId;

/// The resource that keeps the memory mapped.
#[derive(Debug)]
pub(super) enum MappingSource {
    /// A lease of another process's broker.
    Remote(LeaseRef),
    /// A lease within the exporting process.
    Local(Box<LocalLease>),
    /// A copy of the memory, in a buffer of this process.
    Copy(Box<Copied>),
    /// Reserved addresses without memory.
    Suspended(Box<Suspended>),
}

/// Reserved addresses without memory.
#[derive(Debug)]
pub(super) struct Suspended {
    pub(super) backend: Arc<dyn DeviceIpc>,
    pub(super) places: Vec<Arc<Place>>,
    pub(super) regions: Box<[DeviceRange]>,
}

/// A copy through host memory, or from another host.
#[derive(Debug)]
pub(super) struct Copied {
    pub(super) buffer: Buffer,
    /// The place of the export's bytes in the buffer.
    pub(super) layout: CopyLayout,
}

/// A lease within the exporting process.
#[derive(Debug)]
pub(super) struct LocalLease {
    pub(super) backend: Arc<dyn DeviceIpc>,
    pub(super) export: ExportId,
    pub(super) lease: LeaseId,
    pub(super) shared: Arc<Shared>,
}

impl MappingSource {
    pub(super) fn backend(&self) -> &Arc<dyn DeviceIpc> {
        match self {
            Self::Remote(lease) => lease.backend(),
            Self::Local(local) => &local.backend,
            Self::Copy(copy) => copy.buffer.backend(),
            Self::Suspended(suspended) => &suspended.backend,
        }
    }

    /// Returns the regions: of another process, the mapped allocations; in the exporting process, the shared regions; of a
    /// copy, the buffer.
    #[inline]
    pub(super) fn regions(&self) -> &[DeviceRange] {
        match self {
            Self::Remote(lease) => lease.mapped(),
            Self::Local(local) => &local.shared.regions,
            Self::Copy(copy) => copy.buffer.as_region(),
            Self::Suspended(suspended) => &suspended.regions,
        }
    }

    /// Returns whether the regions are whole allocations, as the driver mapped them.
    pub(super) fn has_allocations(&self) -> bool {
        matches!(self, Self::Remote(_))
    }

    #[inline]
    pub(super) fn is_ready_by_itself(&self) -> bool {
        match self {
            Self::Remote(lease) => lease.ready.is_none() || lease.seen_ready.load(Ordering::Acquire),
            Self::Local(local) => local.shared.ready.is_none(),
            Self::Copy(_) | Self::Suspended(_) => true,
        }
    }

    pub(super) fn wait_ready_on(&self, stream: BorrowedStream<'_>) -> Result<()> {
        match self {
            Self::Remote(lease) => lease.ready.as_ref().map_or(Ok(()), |ready| ready.wait_on(stream)),
            Self::Local(local) => {
                local.shared.ready.as_ref().map_or(Ok(()), |ready| ready.event.wait_on(stream))
            }
            Self::Copy(_) => Ok(()),
            Self::Suspended(_) => Err(Error::Suspended),
        }
    }

    pub(super) fn wait_ready(&self, timeout: Duration) -> Result<()> {
        match self {
            Self::Remote(lease) => lease.ready.as_ref().map_or(Ok(()), |ready| ready.synchronize(timeout)),
            Self::Local(local) => {
                local.shared.ready.as_ref().map_or(Ok(()), |ready| ready.event.wait(timeout))
            }
            Self::Copy(_) => Ok(()),
            Self::Suspended(_) => Err(Error::Suspended),
        }
    }

    /// Returns the exporter's side of the timeline within the exporting process.
    pub(super) fn far_timeline(&self, runtime: &Runtime) -> Option<Timeline> {
        match self {
            Self::Local(local) => runtime.exports.known_timeline(local.export, local.lease),
            Self::Remote(_) | Self::Copy(_) | Self::Suspended(_) => None,
        }
    }

    /// Releases a lease of another process's broker on this thread, unless something has to be closed. Returns any other
    /// source.
    pub(super) fn return_lease(self, runtime: &'static Runtime, finished: bool) -> Option<Self> {
        let Self::Remote(lease) = self else { return Some(self) };
        kill_point!("importer:releasing");
        runtime.imports.return_lease(runtime, lease, finished);
        None
    }

    pub(super) fn end(self, runtime: &'static Runtime) {
        kill_point!("importer:releasing");
        match self {
            Self::Remote(lease) => runtime.imports.release(lease),
            Self::Local(local) => {
                let LocalLease { export, lease, shared, .. } = *local;
                drop(shared);
                runtime.exports.release(export, lease, Termination::Released);
            }
            Self::Copy(copy) => drop(copy),
            Self::Suspended(suspended) => drop(suspended),
        }
    }
}
