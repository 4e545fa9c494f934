//! Handles of this process's allocations, of every kind.

use device_ipc_core::backend::{Exported, Extent, HandleBytes, HandleKind};
use device_ipc_core::{DeviceRange, Result};

use super::kind::{FABRIC, LEGACY, POOL, VIRTUAL_MEMORY};
use super::pool::export::ExportedPools;
use super::source::MemorySource;
use super::{fabric, legacy, lookup_cache, virtual_memory};
use crate::objects::driver::Driver;

/// Exports an allocation.
pub(crate) fn export(
    driver: &Driver,
    pools: &ExportedPools,
    extent: &Extent,
    requested: Option<HandleKind>,
) -> Result<Exported> {
    let ptr = extent.allocation.ptr;
    let _current = driver.enter(extent.allocation.device)?;
    let source = match lookup_cache::get(ptr) {
        Some(source) => source,
        None => MemorySource::of(driver, ptr, &driver.known_pointer(ptr)?)?,
    };
    let kind = source.choose_kind(ptr, requested)?;
    let (bytes, fds) = match (kind, source) {
        (VIRTUAL_MEMORY, _) => (Vec::new(), vec![virtual_memory::export::export(driver, ptr)?]),
        (POOL, MemorySource::Pool(pool, _)) => {
            let (bytes, fd) = pools.export(driver, pool, ptr)?;
            (bytes, vec![fd])
        }
        (FABRIC, _) => (fabric::export::export(driver, ptr)?.to_vec(), Vec::new()),
        _ => (legacy::export(driver, ptr)?.to_vec(), Vec::new()),
    };
    Ok(Exported { extent: *extent, kind, bytes: HandleBytes::new(bytes), fds })
}

/// Ends an export. The driver counts no exports; a pool's file descriptor is closed with its last one.
pub(crate) fn unexport(pools: &ExportedPools, exported: &Exported) {
    if exported.kind == POOL {
        pools.unexport(exported.bytes.as_slice());
    }
}

/// Returns the bytes that kernels of an importer can reach. See
/// [`DeviceIpc::reach`](device_ipc_core::backend::DeviceIpc::reach).
pub(crate) fn reach(exported: &Exported) -> Option<DeviceRange> {
    match exported.kind {
        LEGACY => legacy::reach(exported.extent.allocation),
        POOL => None,
        _ => Some(exported.extent.allocation),
    }
}
