//! Handles of memory of pools ("Stream Ordered Memory Allocator", `group__CUDA__MALLOC__ASYNC`).
//!
//! A pool travels as a file descriptor, an allocation in it as 64 bytes that are good only together with the pool. An
//! importer opens a pool once, so that the bytes begin with a name by which it knows the pool again:
//!
//! | bytes | |
//! |---|---|
//! | 1 | the version of this layout, 1 |
//! | 16 | the pool's name, drawn at random when its first allocation is exported |
//! | 64 | `CUmemPoolPtrExportData` |

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use device_ipc_core::{DevicePtr, Error, Result};

use crate::api::{Pool, PoolApi};
use crate::driver::Driver;
use crate::export::too_old;
use crate::fd;
use crate::layout::{HANDLE_TYPE_POSIX_FD, POINTER_BYTES, PoolPointer};
use crate::status::number;

/// The version of the layout.
pub(crate) const VERSION: u8 = 1;
/// The length of a pool's name.
pub(crate) const NAME_BYTES: usize = 16;
/// The length of the bytes.
pub(crate) const HANDLE_BYTES: usize = 1 + NAME_BYTES + POINTER_BYTES;

/// A pool's name. Not given twice, also where the driver puts a new pool in the place of one that is gone.
pub(crate) type PoolName = [u8; NAME_BYTES];

/// The pools of this process that have exported allocations.
#[derive(Debug, Default)]
pub(crate) struct ExportedPools(Mutex<HashMap<usize, ExportedPool>>);

#[derive(Debug)]
struct ExportedPool {
    name: PoolName,
    fd: OwnedFd,
    exports: usize,
}

impl ExportedPools {
    /// The handle of the allocation at `base`, which is of `pool`. A context is current.
    ///
    /// The driver refuses the pointer of a pool that has not been exported itself.
    pub(super) fn export(&self, driver: &Driver, pool: Pool, base: DevicePtr) -> Result<(Vec<u8>, OwnedFd)> {
        let api = api(driver)?;
        let mut pools = self.lock();
        let mut new = None;
        let exported = match pools.get_mut(&pool.0) {
            Some(known) => known,
            None => {
                new.insert(ExportedPool { name: new_name()?, fd: export_pool(driver, pool)?, exports: 0 })
            }
        };
        let pointer = export_pointer(driver, api, base)?;
        let fd = exported.fd.try_clone();
        let fd = fd.map_err(|error| Error::io("duplicating the file descriptor of a memory pool", error))?;
        exported.exports += 1;
        let mut bytes = Vec::with_capacity(HANDLE_BYTES);
        bytes.push(VERSION);
        bytes.extend(exported.name);
        bytes.extend(pointer.0);
        if let Some(new) = new {
            pools.insert(pool.0, new);
        }
        Ok((bytes, fd))
    }

    /// One export of [`export`](Self::export)'s bytes has ended.
    pub(super) fn unexport(&self, bytes: &[u8]) {
        let mut pools = self.lock();
        let Some(name) = bytes.get(1..1 + NAME_BYTES) else { return };
        let found = pools.iter_mut().find(|(_, pool)| pool.name == name);
        let Some((pool, exported)) = found.map(|(pool, exported)| (*pool, exported)) else { return };
        exported.exports -= 1;
        if exported.exports == 0 {
            pools.remove(&pool);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<usize, ExportedPool>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The functions of pools.
pub(crate) fn api(driver: &Driver) -> Result<&PoolApi> {
    driver.api.pools.as_ref().ok_or_else(|| too_old("share memory pools", "11.3"))
}

/// A file descriptor of a pool. A context is current.
pub(crate) fn export_pool(driver: &Driver, pool: Pool) -> Result<OwnedFd> {
    let mut raw = -1;
    // SAFETY: for this type of handle writes one int; the pool lives, as one of its allocations does.
    let status = unsafe { (api(driver)?.export)((&raw mut raw).cast(), pool, HANDLE_TYPE_POSIX_FD, 0) };
    let hint = match status {
        // SAFETY: the driver made the descriptor for this call.
        number::SUCCESS => return unsafe { fd::adopt("cuMemPoolExportToShareableHandle", raw) },
        number::ERROR_INVALID_VALUE => {
            "The pool was made without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR (the default pool is), or was itself \
             opened from another process: forward the descriptor then (Mapping::descriptor)"
        }
        _ => fd::LIMIT_HINT,
    };
    Err(driver.error("cuMemPoolExportToShareableHandle", status, hint))
}

fn export_pointer(driver: &Driver, api: &PoolApi, base: DevicePtr) -> Result<PoolPointer> {
    let mut pointer = PoolPointer([0; POINTER_BYTES]);
    // SAFETY: writes one `CUmemPoolPtrExportData`; an address that is of no exported pool is an error.
    let status = unsafe { (api.export_pointer)(&raw mut pointer, base.get()) };
    let hint = match status {
        number::SUCCESS => return Ok(pointer),
        number::ERROR_INVALID_VALUE => "The block was freed, or its pool cannot be exported",
        _ => "",
    };
    Err(driver.error("cuMemPoolExportPointer", status, hint))
}

fn new_name() -> Result<PoolName> {
    let mut name = [0; NAME_BYTES];
    getrandom::fill(&mut name)
        .map_err(|error| Error::io("reading random bytes", std::io::Error::other(error.to_string())))?;
    Ok(name)
}
