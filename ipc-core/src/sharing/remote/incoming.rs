//! The export of another host that is pulled from: by a copy, or by the reader of a ring.

use std::sync::Arc;
use std::time::Duration;

use super::settings::Remote;
use crate::backend::DeviceIpc;
use crate::backend::engine::MemorySpace;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::sharing::Runtime;
use crate::wire::descriptor::NamedExport;

/// The export to pull.
pub(crate) struct IncomingPull<'a> {
    pub(crate) runtime: &'static Runtime,
    pub(crate) remote: &'a Remote,
    pub(crate) backend: &'a Arc<dyn DeviceIpc>,
    pub(crate) named: NamedExport<'a>,
    /// The device of the destinations.
    pub(crate) device: DeviceOrdinal,
    /// The timeout for the lease, and for each later sign of life of the exporter.
    pub(crate) timeout: Duration,
    /// Called with the number of bytes that have arrived.
    pub(crate) report: &'a dyn Fn(u64),
}

impl IncomingPull<'_> {
    /// Returns the kind of memory of the destinations.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if the engine does not support it.
    pub(super) fn space(&self) -> Result<MemorySpace> {
        let Self { backend, device, .. } = *self;
        let (engine, space) = (self.remote.engine(), backend.transfer_space(device));
        if engine.supports(space) {
            return Ok(space);
        }
        Err(Error::Unsupported {
            backend: engine.info().name,
            what: format!("copy to device {device} of the backend {}", backend.info().name),
            why: "it does not support this kind of memory".into(),
        })
    }
}
