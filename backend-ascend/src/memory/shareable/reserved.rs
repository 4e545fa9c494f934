//! Imported physical memory that is mapped at reserved addresses, unmapped and mapped again.
//!
//! The driver lets a process import a shareable handle once for a device, so an import excludes every other open of the handle
//! there, and the physical handles are kept as long as the import.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device_ipc_core::backend::{Imported, ReceivedHandle};
use device_ipc_core::{Access, DeviceOrdinal, DevicePtr, DeviceRange, Error, Result};

use super::import::{check_homes, import_physical, parse_all};
use crate::bindings::*;
use crate::library::{AclLibrary, call};
use crate::memory::allocations::range_at;
use crate::memory::attributes::address;
use crate::memory::imports::{self, ImportHandle};
use crate::memory::kind::SHAREABLE;
use crate::memory::open;
use crate::memory::received::unsupported;
use crate::objects::driver::Driver;

/// The imports of a backend for reserved ranges.
#[derive(Debug)]
pub(crate) struct ReservationTable {
    driver: Arc<Driver>,
    imports: Mutex<Imports>,
}

#[derive(Debug, Default)]
struct Imports {
    last_cookie: u64,
    by_cookie: HashMap<u64, Arc<Mutex<Import>>>,
}

/// Physical memory side by side.
#[derive(Debug)]
struct Import {
    blocks: Vec<Block>,
    home: Option<DeviceOrdinal>,
    /// The range at which it is mapped.
    mapped: Option<DeviceRange>,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    /// The shareable handle.
    number: u64,
    /// The physical handle in this process.
    physical: usize,
    size: u64,
}

impl Block {
    const fn physical(self) -> aclrtDrvMemHandle {
        aclrtDrvMemHandle(self.physical as *mut _)
    }
}

impl ReservationTable {
    pub(crate) fn new(driver: &Arc<Driver>) -> Self {
        Self { driver: Arc::clone(driver), imports: Mutex::default() }
    }

    /// Reserves addresses for physical memory of this total size: at `at`, or of the runtime's choice if they are in use.
    pub(crate) fn reserve(
        &self,
        on: DeviceOrdinal,
        bytes: u64,
        at: Option<DevicePtr>,
    ) -> Result<DeviceRange> {
        let _current = self.driver.enter(on)?;
        let base = reserve(&self.driver, bytes, at.unwrap_or(DevicePtr::NULL))?;
        Ok(range_at(on, base, bytes))
    }

    pub(crate) fn unreserve(&self, reserved: DeviceRange) -> Result<()> {
        let _current = self.driver.enter(reserved.device)?;
        // SAFETY: reserved by `reserve`; no memory is mapped there any longer.
        let status = unsafe { call!(self.driver, aclrtReleaseMemAddress(address(reserved.ptr))) };
        self.driver.check("aclrtReleaseMemAddress", status)
    }

    /// Imports shareable handles for device `on`. Their sizes are untrusted until the driver has mapped them.
    pub(crate) fn import(
        &self,
        handles: &[ReceivedHandle],
        on: DeviceOrdinal,
        access: Access,
    ) -> Result<Imported> {
        let driver = &self.driver;
        if open::check(driver, handles, on, access)?.kind != SHAREABLE {
            return Err(unsupported(
                "map the memory of a key at reserved addresses",
                "the driver chooses its address; have the exporter share memory of kind 2 (shareable handle)",
            ));
        }
        let (parts, len) = parse_all(handles)?;
        let _opening = imports::lock_opening();
        check_homes(driver, handles, on)?;
        let numbers: Vec<u64> = parts.iter().map(|(number, _)| *number).collect();
        let is_open = imports::by_numbers(&mut imports::lock(), &numbers, on).is_some();
        if is_open || imports::any_reserved(&numbers, on) {
            return Err(in_use());
        }
        let _current = driver.enter(on)?;
        let home = handles.first().and_then(|handle| handle.home);
        // Released by its drop if a later handle fails.
        let mut import = Pending { driver, on, blocks: Vec::with_capacity(parts.len()) };
        for (handle, (number, size)) in handles.iter().zip(parts) {
            let physical = import_physical(driver, handle, number, on)?.0 as usize;
            imports::add_reserved(number, on);
            import.blocks.push(Block { number, physical, size });
        }
        tracing::debug!(target: crate::LOG, device = %on, bytes = len, "imported shareable handles");
        let import = Import { blocks: std::mem::take(&mut import.blocks), home, mapped: None };
        let mut imports = self.lock();
        imports.last_cookie += 1;
        let cookie = imports.last_cookie;
        imports.by_cookie.insert(cookie, Arc::new(Mutex::new(import)));
        Ok(Imported { device: on, len, cookie })
    }

    /// Maps the memory at an address of a reserved range, with access of its device.
    pub(crate) fn map(&self, imported: &Imported, at: DevicePtr) -> Result<()> {
        let import = self.get(imported)?;
        let mut import = import.lock().unwrap_or_else(PoisonError::into_inner);
        if import.mapped.is_some() {
            return Err(Error::InvalidRegion(format!("the import for {at} is mapped already")));
        }
        let driver = &self.driver;
        let _current = driver.enter(imported.device)?;
        let mut next = at;
        for (index, block) in import.blocks.iter().enumerate() {
            // SAFETY: the addresses are reserved, and nothing is mapped there; the driver checks the size against the physical
            // memory's.
            let status = unsafe {
                call!(driver, aclrtMapMem(address(next), block.size as usize, 0, block.physical(), 0))
            };
            if status != ACL_SUCCESS {
                let hint = "The exporter must state the whole size of the physical memory";
                let error = driver.error("aclrtMapMem", status, hint);
                if let Err(error) = unmap(driver, at, &import.blocks[..index]) {
                    tracing::warn!(target: crate::LOG, %error, "cannot undo a failed mapping");
                }
                return Err(error);
            }
            next = next.checked_add(block.size).unwrap_or(DevicePtr::NULL);
        }
        let range = DeviceRange::new(imported.device, at, imported.len);
        let entry = imports::Import { range, home: import.home, opens: 1, handle: ImportHandle::Reserved };
        imports::lock().insert(at, entry);
        import.mapped = Some(range);
        Ok(())
    }

    /// Unmaps the memory. All work on it must have finished.
    pub(crate) fn unmap(&self, imported: &Imported) -> Result<()> {
        let import = self.get(imported)?;
        let mut import = import.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(range) = import.mapped else {
            return Err(Error::InvalidRegion("the import is not mapped".into()));
        };
        let _current = self.driver.enter(imported.device)?;
        unmap(&self.driver, range.ptr, &import.blocks)?;
        imports::lock().remove(&range.ptr);
        import.mapped = None;
        Ok(())
    }

    /// Unmaps the memory, if it is mapped, and releases it.
    pub(crate) fn release(&self, imported: &Imported) -> Result<()> {
        let import = self.lock().by_cookie.remove(&imported.cookie).ok_or_else(|| unknown(imported))?;
        let mut import = import.lock().unwrap_or_else(PoisonError::into_inner);
        let _opening = imports::lock_opening();
        let _current = self.driver.enter(imported.device)?;
        let mut unmapped = Ok(());
        if let Some(range) = import.mapped.take() {
            imports::lock().remove(&range.ptr);
            unmapped = unmap(&self.driver, range.ptr, &import.blocks);
        }
        let blocks = std::mem::take(&mut import.blocks);
        drop(Pending { driver: &self.driver, on: imported.device, blocks });
        unmapped
    }

    fn get(&self, imported: &Imported) -> Result<Arc<Mutex<Import>>> {
        self.lock().by_cookie.get(&imported.cookie).cloned().ok_or_else(|| unknown(imported))
    }

    fn lock(&self) -> MutexGuard<'_, Imports> {
        self.imports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The error for a handle that another mapping of this process has.
pub(super) fn in_use() -> Error {
    let detail =
        "the driver imports a shareable handle once for each device, and this process has it open there"
            .into();
    Error::OverlapsInUse { detail }
}

/// Reserves addresses: from `at` on, or of the runtime's choice if that is null or in use. A context must be current.
pub(super) fn reserve(library: &AclLibrary, bytes: u64, at: DevicePtr) -> Result<*mut std::ffi::c_void> {
    let mut base = std::ptr::null_mut();
    // SAFETY: writes one address; alignment and flags are reserved.
    let status =
        unsafe { call!(library, aclrtReserveMemAddress(&raw mut base, bytes as usize, 0, address(at), 0)) };
    match status {
        ACL_SUCCESS => Ok(base),
        ACL_ERROR_RT_MEMORY_ALLOCATION if !at.is_null() => reserve(library, bytes, DevicePtr::NULL),
        ACL_ERROR_RT_PARAM_INVALID if !at.is_null() => Err(library.error(
            "aclrtReserveMemAddress",
            status,
            "CANN before 8.5 has no addresses of the caller's choice, or only those from 16 TiB to 24 TiB",
        )),
        _ => Err(library.error("aclrtReserveMemAddress", status, "")),
    }
}

/// Unmaps blocks that are mapped side by side from `base` on.
fn unmap(library: &AclLibrary, base: DevicePtr, blocks: &[Block]) -> Result<()> {
    let mut at = base;
    for block in blocks {
        // SAFETY: mapped by `ReservationTable::map`; no work uses it any longer.
        library.check("aclrtUnmapMem", unsafe { call!(library, aclrtUnmapMem(address(at))) })?;
        at = at.checked_add(block.size).unwrap_or(DevicePtr::NULL);
    }
    Ok(())
}

/// Physical memory that no import has, which is released.
struct Pending<'a> {
    driver: &'a Driver,
    on: DeviceOrdinal,
    blocks: Vec<Block>,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        for block in self.blocks.drain(..) {
            self.driver.release_physical(block.physical());
            imports::remove_reserved(block.number, self.on);
        }
    }
}

fn unknown(imported: &Imported) -> Error {
    Error::InvalidRegion(format!(
        "no import of this backend for device {} has the number {}; it may already be released",
        imported.device, imported.cookie
    ))
}
