//! Imports of physical memory by shareable handle, mapped side by side at reserved addresses.

use device_ipc_core::backend::{Opened, ReceivedHandle};
use device_ipc_core::{DeviceOrdinal, DevicePtr, Error, Result};

use super::reserved::{in_use, reserve};
use crate::bindings::*;
use crate::library::{AclLibrary, VISIBLE_DEVICES, call};
use crate::memory::allocations::range_at;
use crate::memory::attributes::address;
use crate::memory::imports::{self, Import, ImportHandle, ImportedBlock};
use crate::memory::received::{import_error, unsupported};
use crate::memory::wire::parse_shareable;
use crate::objects::driver::Driver;

/// Opens shareable handles as one range on device `on`, or counts one more open of it.
pub(in crate::memory) fn open(
    driver: &Driver,
    handles: &[ReceivedHandle],
    on: DeviceOrdinal,
) -> Result<Opened> {
    let (parts, total) = parse_all(handles)?;
    let _opening = imports::lock_opening();
    check_homes(driver, handles, on)?;
    let numbers: Vec<u64> = parts.iter().map(|(number, _)| *number).collect();
    if imports::any_reserved(&numbers, on) {
        return Err(in_use());
    }
    if let Some(opened) = reopen(&parts, on)? {
        return Ok(opened);
    }
    let _current = driver.enter(on)?;
    let base = reserve(driver, total, DevicePtr::NULL)?;
    let range = range_at(on, base, total);
    let mut mapping = PartialMapping { driver, base: range.ptr, blocks: Vec::new() };
    let mut at = range.ptr;
    for (handle, (number, size)) in handles.iter().zip(parts) {
        mapping.add(handle, number, size, at, on)?;
        at = at.checked_add(size).unwrap_or(DevicePtr::NULL);
    }
    tracing::debug!(target: crate::LOG, device = %on, bytes = range.len, "opened shareable handles");
    let home = handles.first().and_then(|handle| handle.home);
    let import = Import { range, home, opens: 1, handle: ImportHandle::Shareable(mapping.finish()) };
    imports::lock().insert(range.ptr, import);
    Ok(Opened { range, cookie: range.ptr.get() })
}

/// Returns the number and the size of each handle, and the total size.
pub(super) fn parse_all(handles: &[ReceivedHandle]) -> Result<(Vec<(u64, u64)>, u64)> {
    let mut parts = Vec::with_capacity(handles.len());
    let mut total = 0u64;
    for handle in handles {
        let (number, size) = parse_shareable(handle.bytes.as_slice())?;
        total = total.checked_add(size).filter(|total| i64::try_from(*total).is_ok()).ok_or_else(|| {
            Error::Protocol("the stated sizes of the shareable handles exceed the address space".into())
        })?;
        parts.push((number, size));
    }
    Ok((parts, total))
}

/// Enables access of the device to the handles' home devices.
pub(super) fn check_homes(driver: &Driver, handles: &[ReceivedHandle], on: DeviceOrdinal) -> Result<()> {
    for handle in handles {
        match handle.home {
            Some(home) => driver.enable_peers(on, home)?,
            None => {
                return Err(unsupported(
                    "open a shareable handle whose home device is hidden from this process",
                    &format!(
                        "enabling access between the cards needs both; add the home device to {VISIBLE_DEVICES}"
                    ),
                ));
            }
        }
    }
    Ok(())
}

/// Imports the physical memory of a shareable handle for device `on`.
pub(super) fn import_physical(
    driver: &Driver,
    handle: &ReceivedHandle,
    number: u64,
    on: DeviceOrdinal,
) -> Result<aclrtDrvMemHandle> {
    let mut physical = aclrtDrvMemHandle(std::ptr::null_mut());
    // SAFETY: writes one handle; the driver validates the number.
    let status = unsafe {
        call!(
            driver,
            aclrtMemImportFromShareableHandle(number, driver.device(on)?.number(), &raw mut physical)
        )
    };
    if status != ACL_SUCCESS {
        return Err(import_error(driver, "aclrtMemImportFromShareableHandle", status, handle, on));
    }
    Ok(physical)
}

/// Returns this device's mapping of the same shareable handles, with one more open: the driver lets a process import a
/// handle once per device. (The manual's "one-to-one" applies to the handles of one device.)
fn reopen(parts: &[(u64, u64)], on: DeviceOrdinal) -> Result<Option<Opened>> {
    let numbers: Vec<u64> = parts.iter().map(|(number, _)| *number).collect();
    let mut table = imports::lock();
    let Some(import) = imports::by_numbers(&mut table, &numbers, on) else { return Ok(None) };
    let ImportHandle::Shareable(blocks) = &import.handle else { return Ok(None) };
    if !blocks.iter().map(|block| (block.number, block.size)).eq(parts.iter().copied()) {
        return Err(unsupported(
            "open shareable handles, some of which this process has open on the device in another order or number",
            "the driver imports each once per device; open the same region, or drop the other mapping",
        ));
    }
    import.opens += 1;
    Ok(Some(Opened { range: import.range, cookie: import.range.ptr.get() }))
}

/// Unmaps the blocks, releases the physical memory, and then releases the addresses: in this order.
pub(in crate::memory) fn unmap(
    library: &AclLibrary,
    base: DevicePtr,
    blocks: &[ImportedBlock],
) -> Result<()> {
    let mut outcome = Ok(());
    let mut record =
        |call, status| outcome = std::mem::replace(&mut outcome, Ok(())).and(library.check(call, status));
    for block in blocks {
        // SAFETY: mapped by `PartialMapping::add`; no work uses it any longer.
        record("aclrtUnmapMem", unsafe { call!(library, aclrtUnmapMem(address(block.at))) });
        let physical = aclrtDrvMemHandle(block.physical as *mut _);
        // SAFETY: the handle is of `PartialMapping::add`, and is no longer mapped.
        record("aclrtFreePhysical", unsafe { call!(library, aclrtFreePhysical(physical)) });
    }
    // SAFETY: reserved by `open`; no memory is mapped there any longer.
    record("aclrtReleaseMemAddress", unsafe { call!(library, aclrtReleaseMemAddress(address(base))) });
    outcome
}

/// Reserved addresses with blocks mapped so far. Dropping it undoes them, unless it was finished.
struct PartialMapping<'a> {
    driver: &'a Driver,
    base: DevicePtr,
    blocks: Vec<ImportedBlock>,
}

impl PartialMapping<'_> {
    fn add(
        &mut self,
        handle: &ReceivedHandle,
        number: u64,
        size: u64,
        at: DevicePtr,
        on: DeviceOrdinal,
    ) -> Result<()> {
        let driver = self.driver;
        let physical = import_physical(driver, handle, number, on)?;
        // SAFETY: the addresses were reserved and no memory is mapped there; the driver checks the size against the
        // physical memory's.
        let status = unsafe { call!(driver, aclrtMapMem(address(at), size as usize, 0, physical, 0)) };
        if status != ACL_SUCCESS {
            let error = driver.error(
                "aclrtMapMem",
                status,
                "The exporter must state the whole size of the physical memory",
            );
            driver.release_physical(physical);
            return Err(error);
        }
        self.blocks.push(ImportedBlock { number, physical: physical.0 as usize, at, size });
        Ok(())
    }

    fn finish(mut self) -> Vec<ImportedBlock> {
        let blocks = std::mem::take(&mut self.blocks);
        std::mem::forget(self);
        blocks
    }
}

impl Drop for PartialMapping<'_> {
    fn drop(&mut self) {
        if let Err(error) = unmap(self.driver, self.base, &self.blocks) {
            tracing::warn!(target: crate::LOG, %error, "cannot undo a failed mapping");
        }
    }
}
