//! Imports of pointers into pools of other processes.
//!
//! A pool is opened with its first pointer and closed after its last one, and a pointer has one address for all devices
//! with access to the pool; so both are counted here. The driver does not count imports of a pointer reliably.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device_ipc_core::backend::{Generation, ReceivedHandle};
use device_ipc_core::{DeviceOrdinal, DevicePtr, DeviceRange, Error, ProcessIdentity, Result};

use super::handle::{HANDLE_BYTES, PointerBytes, PoolName, api, decode};
use crate::bindings::api::{Pool, PoolApi};
use crate::bindings::layout::{
    ACCESS_READ_WRITE, AccessDescription, HANDLE_TYPE_POSIX_FD, Location, PoolPointer,
};
use crate::library::CudaLibrary;
use crate::library::status::number;
use crate::memory::received::{import_error, no_peer_access, out_of_memory, parts, single};
use crate::objects::driver::Driver;

/// The identity of a pool: names are unique per exporter.
type PoolKey = (ProcessIdentity, PoolName);

/// The open pools of other processes.
#[derive(Debug, Default)]
pub(crate) struct ImportedPools(Mutex<HashMap<PoolKey, Arc<Mutex<ImportedPool>>>>);

/// A pool, while one of its pointers is open. Stays locked during driver calls, so that no import runs concurrently
/// with the free of the same pointer.
#[derive(Debug, Default)]
struct ImportedPool {
    handle: Option<Pool>,
    /// The devices with access.
    devices: Vec<DeviceOrdinal>,
    pointers: HashMap<PointerBytes, ImportedPointer>,
}

#[derive(Clone, Copy, Debug)]
struct ImportedPointer {
    address: DevicePtr,
    len: u64,
    generation: Option<Generation>,
    /// The number of opens.
    opened: usize,
}

/// An open pointer, to be closed by [`ImportedPools::close`].
#[derive(Debug)]
pub(crate) struct OpenPointer {
    pool: PoolKey,
    pointer: PointerBytes,
}

impl ImportedPools {
    /// Opens one pointer on device `on`, whose context must be current.
    pub(crate) fn open(
        &self,
        driver: &Driver,
        handles: &[ReceivedHandle],
        on: DeviceOrdinal,
    ) -> Result<(DeviceRange, OpenPointer)> {
        let handle = single(handles)?;
        let (bytes, [fd]) = parts::<HANDLE_BYTES, 1>(handle)?;
        let (name, pointer) = decode(bytes)?;
        let key = (handle.exporter, name);
        let shared = self.entry(key);
        let opened = {
            let mut pool = lock(&shared);
            pool.open(driver, fd, pointer, handle, on).inspect_err(|_| pool.close_if_unused(driver))
        };
        if opened.is_err() {
            self.remove_if_unused(&key, &shared);
        }
        opened.map(|range| (range, OpenPointer { pool: key, pointer }))
    }

    /// Closes a pointer. A context must be current, and all work on the memory must have finished.
    pub(crate) fn close(&self, library: &CudaLibrary, open: &OpenPointer) -> Result<()> {
        let shared = self.entry(open.pool);
        let closed = {
            let mut pool = lock(&shared);
            let closed = pool.close(library, &open.pointer);
            pool.close_if_unused(library);
            closed
        };
        self.remove_if_unused(&open.pool, &shared);
        closed
    }

    fn entry(&self, key: PoolKey) -> Arc<Mutex<ImportedPool>> {
        Arc::clone(self.lock().entry(key).or_default())
    }

    /// Removes a pool without open pointers. A thread with a further reference is about to open or close a pointer, and
    /// calls this function afterwards.
    fn remove_if_unused(&self, key: &PoolKey, shared: &Arc<Mutex<ImportedPool>>) {
        let mut pools = self.lock();
        // One reference is the table's, one the caller's; new ones are created under the table's lock only.
        if Arc::strong_count(shared) == 2 && lock(shared).handle.is_none() {
            pools.remove(key);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PoolKey, Arc<Mutex<ImportedPool>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ImportedPool {
    fn open(
        &mut self,
        driver: &Driver,
        fd: &OwnedFd,
        pointer: PointerBytes,
        handle: &ReceivedHandle,
        on: DeviceOrdinal,
    ) -> Result<DeviceRange> {
        let api = api(driver)?;
        let pool = match self.handle {
            Some(pool) => pool,
            None => *self.handle.insert(import(driver, api, fd)?),
        };
        self.grant_access(driver, api, pool, handle, on)?;
        if let Some(known) = self.pointers.get_mut(&pointer) {
            if known.generation != handle.generation {
                return Err(Error::OverlapsInUse {
                    detail: "the exporter freed the pool's block and allocated another one in its place"
                        .into(),
                });
            }
            known.opened += 1;
            return Ok(DeviceRange::new(on, known.address, known.len));
        }
        let range = import_pointer(driver, api, pool, pointer, handle.size, on)?;
        let (address, len, generation) = (range.ptr, range.len, handle.generation);
        self.pointers.insert(pointer, ImportedPointer { address, len, generation, opened: 1 });
        Ok(range)
    }

    /// Grants a device access to all pointers of the pool, once. The pool's home device has access without a grant.
    fn grant_access(
        &mut self,
        driver: &Driver,
        api: &PoolApi,
        pool: Pool,
        handle: &ReceivedHandle,
        on: DeviceOrdinal,
    ) -> Result<()> {
        if handle.home == Some(on) || self.devices.contains(&on) {
            return Ok(());
        }
        let description = AccessDescription {
            location: Location::device(driver.device(on)?.handle),
            flags: ACCESS_READ_WRITE,
        };
        // SAFETY: the pool is open; the description is read.
        let status = unsafe { (api.set_access)(pool, &raw const description, 1) };
        match status {
            number::SUCCESS => {
                self.devices.push(on);
                Ok(())
            }
            _ => {
                let hint = "The device may not have peer access to the pool's home device";
                let other = || driver.error("cuMemPoolSetAccess", status, hint);
                Err(no_peer_access(handle, on, status).unwrap_or_else(other))
            }
        }
    }

    fn close(&mut self, library: &CudaLibrary, pointer: &PointerBytes) -> Result<()> {
        let Some(known) = self.pointers.get_mut(pointer) else { return Ok(()) };
        known.opened -= 1;
        if known.opened > 0 {
            return Ok(());
        }
        let address = known.address.get();
        self.pointers.remove(pointer);
        // SAFETY: imported by this table, not open elsewhere in it, and no work uses it any longer.
        library.check("cuMemFree", unsafe { (library.api.mem_free)(address) })
    }

    fn close_if_unused(&mut self, library: &CudaLibrary) {
        if !self.pointers.is_empty() {
            return;
        }
        self.devices.clear();
        let (Some(pool), Ok(api)) = (self.handle.take(), api(library)) else { return };
        // SAFETY: imported by this table, and none of its pointers is open any longer.
        let status = unsafe { (api.destroy)(pool) };
        if !matches!(status, number::SUCCESS | number::ERROR_DEINITIALIZED) {
            tracing::warn!(target: crate::LOG, status, "cuMemPoolDestroy failed");
        }
    }
}

fn lock(pool: &Mutex<ImportedPool>) -> MutexGuard<'_, ImportedPool> {
    pool.lock().unwrap_or_else(PoisonError::into_inner)
}

fn import(library: &CudaLibrary, api: &PoolApi, fd: &OwnedFd) -> Result<Pool> {
    let mut pool = Pool::NULL;
    // The descriptor's number itself, as a pointer.
    let number = std::ptr::without_provenance_mut(fd.as_raw_fd() as usize);
    // SAFETY: writes one pool; a descriptor of another origin is an error.
    let status = unsafe { (api.import)(&raw mut pool, number, HANDLE_TYPE_POSIX_FD, 0) };
    if status == number::SUCCESS {
        return Ok(pool);
    }
    Err(import_error(library, "cuMemPoolImportFromShareableHandle", status))
}

fn import_pointer(
    driver: &Driver,
    api: &PoolApi,
    pool: Pool,
    pointer: PointerBytes,
    size: u64,
    on: DeviceOrdinal,
) -> Result<DeviceRange> {
    let (mut address, mut data) = (0, PoolPointer(pointer));
    // SAFETY: writes one address; reads `CUmemPoolPtrExportData`, whose bytes the driver validates.
    let status = unsafe { (api.import_pointer)(&raw mut address, pool, &raw mut data) };
    match status {
        number::SUCCESS => {}
        number::ERROR_OUT_OF_MEMORY => return Err(out_of_memory(on, size, "cuMemPoolImportPointer")),
        number::ERROR_ALREADY_MAPPED => {
            let error = driver.error("cuMemPoolImportPointer", status, "");
            return Err(Error::OverlapsInUse { detail: error.to_string() });
        }
        _ => {
            let hint = "The handle is corrupt, or its block was freed";
            return Err(driver.error("cuMemPoolImportPointer", status, hint));
        }
    }
    // Only the driver knows the mapped range.
    let range = driver.allocation_of(DeviceRange::new(on, DevicePtr::new(address), 0));
    if range.is_err() {
        // SAFETY: imported above, and not shared.
        let status = unsafe { (driver.api.mem_free)(address) };
        tracing::debug!(target: crate::LOG, status, "closed a pool's block without a known range");
    }
    range
}
