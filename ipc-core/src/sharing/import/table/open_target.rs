//! The parameters of an open, which begins a lease or finds one.

use std::sync::Arc;

use crate::backend::{Access, DeviceIpc};
use crate::model::device::DeviceOrdinal;
use crate::model::error::Error;
use crate::sharing::Runtime;
use crate::sharing::import::grant::UnusedGrant;
use crate::sharing::import::place::Place;
use crate::transport::{AllowList, Deadline};
use crate::wire::descriptor::NamedExport;

/// The parameters of an open.
pub(in crate::sharing::import) struct OpenTarget<'a> {
    pub(in crate::sharing::import) runtime: &'static Runtime,
    pub(in crate::sharing::import) backend: &'a Arc<dyn DeviceIpc>,
    pub(in crate::sharing::import) descriptor: NamedExport<'a>,
    pub(in crate::sharing::import) device: DeviceOrdinal,
    pub(in crate::sharing::import) home: Option<DeviceOrdinal>,
    pub(in crate::sharing::import) access: Access,
    pub(in crate::sharing::import) allow: &'a AllowList,
    pub(in crate::sharing::import) deadline: Deadline,
    /// Whether no other mapping may share the lease, and so its timeline.
    pub(in crate::sharing::import) alone: bool,
    /// The addresses, if they are reserved; then `alone` is set.
    pub(in crate::sharing::import) reserved: Option<ReservedTarget<'a>>,
    /// The grant of a message, which opens the export also after its drop.
    pub(in crate::sharing::import) grant: Option<&'a UnusedGrant>,
    /// Adds the region concerned to an error.
    pub(in crate::sharing::import) with_region_name: &'a dyn Fn(usize, Error) -> Error,
}

/// The addresses for the regions of an export, which are imported.
#[derive(Clone, Copy, Debug)]
pub(in crate::sharing::import) enum ReservedTarget<'a> {
    /// New ranges.
    New,
    /// Places in a reservation, one for each region.
    Places(&'a [Arc<Place>]),
    /// The places of a mapping, one for each region, where the caller maps the imports.
    Exchange(&'a [Arc<Place>]),
}
