//! Imports of memory by key.

use device_ipc_core::backend::{Opened, ReceivedHandle};
use device_ipc_core::{DeviceOrdinal, DeviceRange, Error, Result};

use crate::bindings::*;
use crate::library::{AclLibrary, call};
use crate::memory::allocations::range_at;
use crate::memory::imports::{self, Import, ImportHandle};
use crate::memory::received::{import_error, unsupported};
use crate::memory::wire::Key;
use crate::objects::driver::Driver;
use crate::objects::peers::Reach;

/// Opens a key on device `on`, or counts one more open of it.
pub(in crate::memory) fn open(driver: &Driver, handle: &ReceivedHandle, on: DeviceOrdinal) -> Result<Opened> {
    let (key, stated) = Key::parse(handle.bytes.as_slice(), handle.size)?;
    let _opening = imports::lock_opening();
    if let Some(import) = imports::by_key(&mut imports::lock(), &key) {
        if import.range.device != on {
            return Err(unsupported(
                &format!(
                    "open a key on device {on} that this process has open on device {}",
                    import.range.device
                ),
                "the driver lets a process open a key once; request another key from the exporter",
            ));
        }
        import.opens += 1;
        return Ok(Opened { range: import.range, cookie: import.range.ptr.get() });
    }
    let _current = driver.enter(on)?;
    let reach = handle.home.map(|home| driver.reach_of(on, home)).transpose()?;
    // The flag enables both directions, and fails between dies of one chip, which have none.
    let flags = match reach {
        Some(Reach::Itself | Reach::Chip) => ACL_RT_IPC_MEM_IMPORT_FLAG_DEFAULT,
        _ => ACL_RT_IPC_MEM_IMPORT_FLAG_ENABLE_PEER_ACCESS,
    };
    let mut mapped = std::ptr::null_mut();
    // SAFETY: writes one address; the key ends with a NUL, and the driver validates its bytes.
    let status = unsafe { call!(driver, aclrtIpcMemImportByKey(&raw mut mapped, key.as_ptr(), flags)) };
    if status != ACL_SUCCESS {
        return Err(import_error(driver, "aclrtIpcMemImportByKey", status, handle, on));
    }
    match mapped_range(driver, range_at(on, mapped, stated)) {
        Ok(range) => {
            tracing::debug!(target: crate::LOG, device = %on, bytes = range.len, ?reach, "opened an IPC key");
            let import = Import { range, home: handle.home, opens: 1, handle: ImportHandle::Key(key) };
            imports::lock().insert(range.ptr, import);
            Ok(Opened { range, cookie: range.ptr.get() })
        }
        Err(error) => {
            // SAFETY: imported above, and not shared.
            let status = unsafe { call!(driver, aclrtIpcMemClose(key.as_ptr())) };
            tracing::debug!(target: crate::LOG, status, "closed an IPC key without a known range");
            Err(error)
        }
    }
}

/// Closes a key.
pub(in crate::memory) fn close(library: &AclLibrary, key: &Key, bytes: u64) -> Result<()> {
    // SAFETY: imported once, and closed only here; the caller of `DeviceIpc::close` has finished all work on it.
    let status = unsafe { call!(library, aclrtIpcMemClose(key.as_ptr())) };
    tracing::debug!(target: crate::LOG, bytes, status, "closed an IPC key");
    library.check("aclrtIpcMemClose", status)
}

/// Returns the mapped range according to the driver, whatever the peer states. Drivers before CANN 9.0 have no query
/// for it; then only checks that the last stated byte is device memory.
fn mapped_range(library: &AclLibrary, stated: DeviceRange) -> Result<DeviceRange> {
    if let Some(reported) = library.address_range(stated)? {
        return if reported.ptr == stated.ptr {
            Ok(reported)
        } else {
            Err(Error::Protocol(format!(
                "the key was mapped at {}, inside other memory at {}",
                stated.ptr, reported.ptr
            )))
        };
    }
    let last = stated.len.checked_sub(1).and_then(|last| stated.ptr.checked_add(last));
    let is_device_memory = last.and_then(|last| library.attributes(last)).is_some_and(|attributes| {
        attributes.location.type_ == aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_DEVICE
    });
    if is_device_memory {
        return Ok(stated);
    }
    Err(Error::Protocol(format!(
        "the exporter states {} bytes, but the last of them is not device memory",
        stated.len
    )))
}
