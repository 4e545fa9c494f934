//! Exports of allocations in memory pools of this process.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use device_ipc_core::{DevicePtr, Error, Result};

use super::handle::{NAME_BYTES, PoolName, api, encode, name_in};
use crate::bindings::api::{Pool, PoolApi};
use crate::bindings::layout::{HANDLE_TYPE_POSIX_FD, POINTER_BYTES, PoolPointer};
use crate::library::status::number;
use crate::library::{CudaLibrary, fd};

/// The pools of this process with exported allocations, by pool.
#[derive(Debug, Default)]
pub(crate) struct ExportedPools(Mutex<HashMap<usize, ExportedPool>>);

#[derive(Debug)]
struct ExportedPool {
    name: PoolName,
    fd: OwnedFd,
    exports: usize,
}

impl ExportedPools {
    /// Exports the allocation at `base` in `pool`. A context must be current.
    ///
    /// The driver refuses a pointer whose pool has not been exported.
    pub(crate) fn export(
        &self,
        library: &CudaLibrary,
        pool: Pool,
        base: DevicePtr,
    ) -> Result<(Vec<u8>, OwnedFd)> {
        let api = api(library)?;
        let mut pools = self.lock();
        let mut new = None;
        let exported = match pools.get_mut(&pool.0) {
            Some(known) => known,
            None => {
                new.insert(ExportedPool { name: new_name()?, fd: export_pool(library, pool)?, exports: 0 })
            }
        };
        let pointer = export_pointer(library, api, base)?;
        let fd = exported.fd.try_clone();
        let fd = fd.map_err(|error| Error::io("duplicating the file descriptor of a memory pool", error))?;
        exported.exports += 1;
        let bytes = encode(exported.name, pointer.0);
        if let Some(new) = new {
            pools.insert(pool.0, new);
        }
        Ok((bytes, fd))
    }

    /// Ends one export, identified by the bytes that [`export`](Self::export) returned.
    pub(crate) fn unexport(&self, bytes: &[u8]) {
        let mut pools = self.lock();
        let Some(name) = name_in(bytes) else { return };
        let found = pools.iter_mut().find(|(_, pool)| pool.name == name);
        let Some((pool, exported)) = found.map(|(pool, exported)| (*pool, exported)) else { return };
        exported.exports -= 1;
        if exported.exports == 0 {
            pools.remove(&pool);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<usize, ExportedPool>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Exports a pool as a file descriptor. A context must be current.
pub(super) fn export_pool(library: &CudaLibrary, pool: Pool) -> Result<OwnedFd> {
    let mut raw = -1;
    // SAFETY: writes one int for this type of handle; the pool lives, as one of its allocations does.
    let status = unsafe { (api(library)?.export)((&raw mut raw).cast(), pool, HANDLE_TYPE_POSIX_FD, 0) };
    let hint = match status {
        // SAFETY: the driver created the descriptor for this call.
        number::SUCCESS => return unsafe { fd::adopt("cuMemPoolExportToShareableHandle", raw) },
        number::ERROR_INVALID_VALUE => {
            "The pool was created without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR (like the default pool), or was \
             itself opened from another process: then forward the descriptor that it was opened with"
        }
        _ => fd::LIMIT_HINT,
    };
    Err(library.error("cuMemPoolExportToShareableHandle", status, hint))
}

fn export_pointer(library: &CudaLibrary, api: &PoolApi, base: DevicePtr) -> Result<PoolPointer> {
    let mut pointer = PoolPointer([0; POINTER_BYTES]);
    // SAFETY: writes one `CUmemPoolPtrExportData`; an address outside exported pools is an error.
    let status = unsafe { (api.export_pointer)(&raw mut pointer, base.get()) };
    let hint = match status {
        number::SUCCESS => return Ok(pointer),
        number::ERROR_INVALID_VALUE => "The block was freed, or its pool cannot be exported",
        _ => "",
    };
    Err(library.error("cuMemPoolExportPointer", status, hint))
}

fn new_name() -> Result<PoolName> {
    let mut name = [0; NAME_BYTES];
    getrandom::fill(&mut name)
        .map_err(|error| Error::io("reading random bytes", std::io::Error::other(error.to_string())))?;
    Ok(name)
}
