//! Allocations by the library, which has the memory that it is about to free.

use std::sync::Arc;

use super::Runtime;
use crate::backend::{Buffer, DeviceIpc, MemoryUse};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};

/// Allocates memory as [`Buffer::allocate`] does. If the device has not enough, waits until the worker has freed the memory of this
/// process's dropped exports and released mappings, and tries again.
pub(crate) fn allocate(
    backend: &Arc<dyn DeviceIpc>,
    device: DeviceOrdinal,
    bytes: u64,
    wanted: MemoryUse,
) -> Result<Buffer> {
    let allocate = || Buffer::allocate(Arc::clone(backend), device, bytes, wanted);
    match (allocate(), Runtime::existing()) {
        (Err(Error::OutOfMemory { .. }), Some(runtime)) if runtime.worker.wait_for_jobs() => allocate(),
        (allocated, _) => allocated,
    }
}
