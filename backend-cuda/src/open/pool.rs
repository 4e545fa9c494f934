//! Memory of another process's pool ("Stream Ordered Memory Allocator", `group__CUDA__MALLOC__ASYNC`).
//!
//! A pool is opened with its first pointer and closed after its last one, and a pointer has one address for all devices
//! that may access the pool; so both are counted here. The driver does not count imports of a pointer dependably.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device_ipc_core::{
    DeviceOrdinal, DevicePtr, DeviceRange, Error, Generation, ProcessIdentity, ReceivedHandle, Result,
};

use super::{import_error, out_of_memory, parts, the_only_one};
use crate::api::{Pool, PoolApi};
use crate::driver::Driver;
use crate::export::pool::{HANDLE_BYTES, NAME_BYTES, PoolName, VERSION, api};
use crate::layout::{
    ACCESS_READ_WRITE, AccessDescription, HANDLE_TYPE_POSIX_FD, Location, POINTER_BYTES, PoolPointer,
};
use crate::status::number;

/// Which pool: the exporter's names are its own.
type PoolKey = (ProcessIdentity, PoolName);

/// The pools of other processes that are open here.
#[derive(Debug, Default)]
pub(crate) struct ImportedPools(Mutex<HashMap<PoolKey, Arc<Mutex<ImportedPool>>>>);

/// A pool, while one of its pointers is open. Its lock is held over the driver's calls: an import beside the free of the
/// same pointer is not for the driver to sort out.
#[derive(Debug, Default)]
struct ImportedPool {
    handle: Option<Pool>,
    /// The devices that were let in.
    devices: Vec<DeviceOrdinal>,
    pointers: HashMap<[u8; POINTER_BYTES], ImportedPointer>,
}

#[derive(Clone, Copy, Debug)]
struct ImportedPointer {
    address: DevicePtr,
    len: u64,
    generation: Option<Generation>,
    opened: usize,
}

/// A pointer that was opened, to be closed by [`ImportedPools::close`].
#[derive(Debug)]
pub(super) struct OpenPointer {
    pool: PoolKey,
    pointer: [u8; POINTER_BYTES],
}

/// Opens one pointer for `on`, whose context is current.
pub(super) fn open(
    pools: &ImportedPools,
    driver: &Driver,
    handles: &[ReceivedHandle],
    on: DeviceOrdinal,
) -> Result<(DeviceRange, OpenPointer)> {
    let handle = the_only_one(handles)?;
    let (bytes, [fd]) = parts::<HANDLE_BYTES, 1>(handle)?;
    let (name, pointer) = read(bytes)?;
    let key = (handle.exporter, name);
    let shared = pools.entry(key);
    let opened = {
        let mut pool = lock(&shared);
        pool.open(driver, fd, pointer, handle, on).inspect_err(|_| pool.close_if_unused(driver))
    };
    if opened.is_err() {
        pools.forget_if_unused(&key, &shared);
    }
    opened.map(|range| (range, OpenPointer { pool: key, pointer }))
}

impl ImportedPools {
    /// Closes what [`open`] opened; a context is current, and all work on it has finished.
    pub(super) fn close(&self, driver: &Driver, open: &OpenPointer) -> Result<()> {
        let shared = self.entry(open.pool);
        let closed = {
            let mut pool = lock(&shared);
            let closed = pool.close(driver, &open.pointer);
            pool.close_if_unused(driver);
            closed
        };
        self.forget_if_unused(&open.pool, &shared);
        closed
    }

    fn entry(&self, key: PoolKey) -> Arc<Mutex<ImportedPool>> {
        Arc::clone(self.lock().entry(key).or_default())
    }

    /// Whoever has a second reference is about to open or to close, and looks himself afterwards.
    fn forget_if_unused(&self, key: &PoolKey, shared: &Arc<Mutex<ImportedPool>>) {
        let mut pools = self.lock();
        // One is the table's, one the caller's; new ones are made under the table's lock alone.
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
        pointer: [u8; POINTER_BYTES],
        handle: &ReceivedHandle,
        on: DeviceOrdinal,
    ) -> Result<DeviceRange> {
        let api = api(driver)?;
        let pool = match self.handle {
            Some(pool) => pool,
            None => *self.handle.insert(import(driver, api, fd)?),
        };
        self.let_in(driver, api, pool, handle.home, on)?;
        if let Some(known) = self.pointers.get_mut(&pointer) {
            if known.generation != handle.generation {
                return Err(Error::OverlapsInUse {
                    detail: "the pool's block was freed by its owner and is another one now".into(),
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

    /// The device that a pool lives on has access anyway; others get it once, for all of the pool's pointers.
    fn let_in(
        &mut self,
        driver: &Driver,
        api: &PoolApi,
        pool: Pool,
        home: Option<DeviceOrdinal>,
        on: DeviceOrdinal,
    ) -> Result<()> {
        if home == Some(on) || self.devices.contains(&on) {
            return Ok(());
        }
        let description = AccessDescription {
            location: Location::device(driver.device(on)?.handle),
            flags: ACCESS_READ_WRITE,
        };
        // SAFETY: the pool is open; the description is read.
        let status = unsafe { (api.set_access)(pool, &raw const description, 1) };
        let hint = match (status, home) {
            (number::SUCCESS, _) => {
                self.devices.push(on);
                return Ok(());
            }
            (number::ERROR_INVALID_DEVICE | number::ERROR_PEER_ACCESS_UNSUPPORTED, Some(home)) => {
                return Err(driver.no_peer_access(on, home));
            }
            _ => "The device may have no access to the memory of the device that the pool lives on",
        };
        Err(driver.error("cuMemPoolSetAccess", status, hint))
    }

    fn close(&mut self, driver: &Driver, pointer: &[u8; POINTER_BYTES]) -> Result<()> {
        let Some(known) = self.pointers.get_mut(pointer) else { return Ok(()) };
        known.opened -= 1;
        if known.opened > 0 {
            return Ok(());
        }
        let address = known.address.get();
        self.pointers.remove(pointer);
        // SAFETY: imported by this table, open nowhere else in it, and no work uses it any longer.
        driver.check("cuMemFree", unsafe { (driver.api.mem_free)(address) })
    }

    fn close_if_unused(&mut self, driver: &Driver) {
        if !self.pointers.is_empty() {
            return;
        }
        self.devices.clear();
        let (Some(pool), Ok(api)) = (self.handle.take(), api(driver)) else { return };
        // SAFETY: imported by this table, and none of its pointers is open any longer.
        let status = unsafe { (api.destroy)(pool) };
        if !matches!(status, number::SUCCESS | number::ERROR_DEINITIALIZED) {
            tracing::warn!(status, "cuMemPoolDestroy failed");
        }
    }
}

fn lock(pool: &Mutex<ImportedPool>) -> MutexGuard<'_, ImportedPool> {
    pool.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The pool's name and the pointer, out of bytes that may be anything.
fn read(bytes: &[u8; HANDLE_BYTES]) -> Result<(PoolName, [u8; POINTER_BYTES])> {
    if bytes[0] != VERSION {
        return Err(Error::Protocol(format!(
            "a CUDA handle of kind pool is of version {}, and this one knows {VERSION}; update the older of the two \
             processes",
            bytes[0]
        )));
    }
    let (mut name, mut pointer) = ([0; NAME_BYTES], [0; POINTER_BYTES]);
    name.copy_from_slice(&bytes[1..1 + NAME_BYTES]);
    pointer.copy_from_slice(&bytes[1 + NAME_BYTES..]);
    Ok((name, pointer))
}

fn import(driver: &Driver, api: &PoolApi, fd: &OwnedFd) -> Result<Pool> {
    let mut pool = Pool::NULL;
    // The descriptor's number itself, as a pointer.
    let number = std::ptr::without_provenance_mut(fd.as_raw_fd() as usize);
    // SAFETY: writes one pool; a descriptor that is none of the driver's is an error.
    let status = unsafe { (api.import)(&raw mut pool, number, HANDLE_TYPE_POSIX_FD, 0) };
    if status == number::SUCCESS {
        return Ok(pool);
    }
    Err(import_error(driver, "cuMemPoolImportFromShareableHandle", status))
}

fn import_pointer(
    driver: &Driver,
    api: &PoolApi,
    pool: Pool,
    pointer: [u8; POINTER_BYTES],
    size: u64,
    on: DeviceOrdinal,
) -> Result<DeviceRange> {
    let (mut address, mut data) = (0, PoolPointer(pointer));
    // SAFETY: writes one address; reads `CUmemPoolPtrExportData`, whose bytes the driver checks.
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
    // What is mapped is the driver's word.
    let range = driver.allocation_of(DeviceRange::new(on, DevicePtr::new(address), 0));
    if range.is_err() {
        // SAFETY: imported above, and known to nobody else.
        let status = unsafe { (driver.api.mem_free)(address) };
        tracing::debug!(status, "closed a pool's block whose range could not be told");
    }
    range
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_are_a_version_a_name_and_a_pointer() {
        let mut bytes = [0; HANDLE_BYTES];
        bytes[0] = VERSION;
        bytes[1..17].fill(0xaa);
        bytes[17..].fill(0xbb);
        assert_eq!(read(&bytes).unwrap(), ([0xaa; 16], [0xbb; 64]));
        bytes[0] = 2;
        assert!(read(&bytes).unwrap_err().to_string().contains("version 2"));
    }
}
