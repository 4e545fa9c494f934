//! Imported blocks that are mapped at reserved addresses, unmapped and mapped again.
//!
//! The handles are kept as long as the import: a handle that is released is gone with the mapping, and the memory could not be
//! mapped again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device_ipc_core::backend::{Imported, ReceivedHandle, ReservationGranularity};
use device_ipc_core::{Access, DeviceIdentity, DeviceOrdinal, DevicePtr, DeviceRange, Error, Result};

use super::block::{self, KeptBlock, Mapping};
use super::import::{check_block, import_block, total_bytes};
use crate::bindings::layout::{HANDLE_TYPE_FABRIC, HANDLE_TYPE_POSIX_FD};
use crate::library::status::number;
use crate::memory::fabric;
use crate::memory::kind::{self, FABRIC, VIRTUAL_MEMORY};
use crate::memory::open::check_peer_access;
use crate::memory::received::{common_kind, unsupported};
use crate::objects::driver::Driver;

/// The reserved ranges of a backend, and the imports for them.
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

/// Blocks side by side.
#[derive(Debug)]
struct Import {
    /// Unmapped first.
    mapping: Option<Mapping>,
    blocks: Vec<KeptBlock>,
    access: Access,
    /// The home device, if it is not the device of the import.
    elsewhere: Option<DeviceIdentity>,
}

impl ReservationTable {
    pub(crate) fn new(driver: &Arc<Driver>) -> Self {
        Self { driver: Arc::clone(driver), imports: Mutex::default() }
    }

    /// Returns the granularity of blocks and that of addresses.
    pub(crate) fn granularity(&self, on: DeviceOrdinal) -> Result<ReservationGranularity> {
        let _current = self.driver.enter(on)?;
        let block = block::granularity(&self.driver, on, HANDLE_TYPE_POSIX_FD)?;
        Ok(ReservationGranularity { place: block, address: block.max(block::RANGE_ALIGNMENT) })
    }

    /// Reserves addresses for blocks of this total size: at `at` if the driver finds them free, which takes it as a hint.
    pub(crate) fn reserve(
        &self,
        on: DeviceOrdinal,
        bytes: u64,
        at: Option<DevicePtr>,
    ) -> Result<DeviceRange> {
        let _current = self.driver.enter(on)?;
        let base = block::reserve(&self.driver, bytes, at.unwrap_or(DevicePtr::NULL))?;
        Ok(DeviceRange::new(on, base, bytes))
    }

    pub(crate) fn unreserve(&self, reserved: DeviceRange) -> Result<()> {
        let _current = self.driver.enter(reserved.device)?;
        block::unreserve(&self.driver, reserved.ptr, reserved.len)
    }

    /// Imports the handles' blocks. Their sizes are untrusted until the driver has mapped them.
    pub(crate) fn import(
        &self,
        handles: &[ReceivedHandle],
        on: DeviceOrdinal,
        access: Access,
    ) -> Result<Imported> {
        let driver = &self.driver;
        driver.device(on)?;
        let handle_type = match common_kind(handles)? {
            VIRTUAL_MEMORY => HANDLE_TYPE_POSIX_FD,
            FABRIC => HANDLE_TYPE_FABRIC,
            other => {
                return Err(unsupported(
                    &format!("map memory of kind {} ({}) at reserved addresses", other.0, kind::name(other)),
                    "the driver chooses its address; have the exporter share memory of kind 2 (virtual-memory) or 4 (fabric)",
                ));
            }
        };
        for handle in handles {
            check_peer_access(driver, on, handle)?;
        }
        let _current = driver.enter(on)?;
        let len = total_bytes(handles, block::granularity(driver, on, handle_type)?)?;
        let blocks = handles.iter().map(|handle| {
            let block = match handle_type {
                HANDLE_TYPE_FABRIC => fabric::import::import_block(driver, handle),
                _ => import_block(driver, handle),
            }?;
            check_block(driver, &block)?;
            Ok(block.keep(driver, handle.size))
        });
        let blocks = blocks.collect::<Result<Vec<_>>>()?;
        let first = handles.first().filter(|handle| handle.home != Some(on));
        let elsewhere = first.and_then(|handle| handle.home_identity);
        tracing::debug!(target: crate::LOG, device = %on, bytes = len, %access, "imported CUDA blocks");
        let import = Import { mapping: None, blocks, access, elsewhere };
        let mut imports = self.lock();
        imports.last_cookie += 1;
        let cookie = imports.last_cookie;
        imports.by_cookie.insert(cookie, Arc::new(Mutex::new(import)));
        Ok(Imported { device: on, len, cookie })
    }

    /// Maps the blocks at an address of a reserved range.
    pub(crate) fn map(&self, imported: &Imported, at: DevicePtr) -> Result<()> {
        let import = self.get(imported)?;
        let mut import = import.lock().unwrap_or_else(PoisonError::into_inner);
        if import.mapping.is_some() {
            return Err(Error::InvalidRegion(format!("the import for {at} is mapped already")));
        }
        let _current = self.driver.enter(imported.device)?;
        let mut mapping = Mapping::at(&self.driver, imported.device, at);
        for block in &import.blocks {
            mapping.map(block.handle(), block.bytes())?;
        }
        let granted = mapping.grant_access(&[imported.device], import.access);
        granted.map_err(|error| no_peer_access(error, imported.device, import.elsewhere))?;
        import.mapping = Some(mapping);
        Ok(())
    }

    /// Unmaps the blocks. All work on them must have finished.
    pub(crate) fn unmap(&self, imported: &Imported) -> Result<()> {
        let import = self.get(imported)?;
        let mut import = import.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(mapping) = &mut import.mapping else {
            return Err(Error::InvalidRegion("the import is not mapped".into()));
        };
        let _current = self.driver.enter(imported.device)?;
        mapping.unmap()?;
        import.mapping = None;
        Ok(())
    }

    /// Unmaps the blocks, if they are mapped, and releases the handles.
    pub(crate) fn release(&self, imported: &Imported) -> Result<()> {
        let import = self.lock().by_cookie.remove(&imported.cookie).ok_or_else(|| unknown(imported))?;
        let mut import = import.lock().unwrap_or_else(PoisonError::into_inner);
        let _current = self.driver.enter(imported.device)?;
        let unmapped = import.mapping.take().map_or(Ok(()), Mapping::close);
        import.blocks.clear();
        unmapped
    }

    fn get(&self, imported: &Imported) -> Result<Arc<Mutex<Import>>> {
        self.lock().by_cookie.get(&imported.cookie).cloned().ok_or_else(|| unknown(imported))
    }

    fn lock(&self) -> MutexGuard<'_, Imports> {
        self.imports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unknown(imported: &Imported) -> Error {
    Error::InvalidRegion(format!(
        "no import of this backend for device {} has the number {}; it may already be released",
        imported.device, imported.cookie
    ))
}

/// Returns the reason of a refused access: the driver has no status for a hidden home device.
fn no_peer_access(error: Error, from: DeviceOrdinal, elsewhere: Option<DeviceIdentity>) -> Error {
    let is_refused = matches!(&error, Error::Vendor(vendor)
        if matches!(vendor.status.0, number::ERROR_INVALID_DEVICE | number::ERROR_PEER_ACCESS_UNSUPPORTED));
    match elsewhere.filter(|_| is_refused) {
        Some(to) => Error::NoPeerAccess { from, to },
        None => error,
    }
}
