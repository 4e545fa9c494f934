//! Opens and closes memory of other processes, of every kind.

use device_ipc_core::backend::{Opened, ReceivedHandle};
use device_ipc_core::{Access, DeviceOrdinal, DevicePtr, Error, Result};

use super::imports::{self, ImportHandle};
use super::kind::{KEY, SHAREABLE};
use super::received::unsupported;
use super::{key, shareable};
use crate::objects::driver::Driver;
use crate::objects::peers::Reach;

/// Opens a key, or one or more shareable handles as one range, on device `on`.
pub(crate) fn open(
    driver: &Driver,
    handles: &[ReceivedHandle],
    on: DeviceOrdinal,
    access: Access,
) -> Result<Opened> {
    match (check(driver, handles, on, access)?.kind, handles) {
        (KEY, [handle]) => key::import::open(driver, handle, on),
        (KEY, _) => Err(unsupported(
            &format!("open {} keys as one range", handles.len()),
            "a key is one whole allocation at an address that the driver chooses; open each separately",
        )),
        _ => shareable::import::open(driver, handles, on),
    }
}

/// Checks handles of one kind that are to be opened as one range. Returns the first.
pub(super) fn check<'h>(
    driver: &Driver,
    handles: &'h [ReceivedHandle],
    on: DeviceOrdinal,
    access: Access,
) -> Result<&'h ReceivedHandle> {
    driver.device(on)?;
    let Some(first) = handles.first() else {
        return Err(unsupported("open 0 handles as one range", "a range has at least one allocation"));
    };
    for handle in handles {
        check_handle(handle, first)?;
    }
    if !access.is_writable() {
        return Err(unsupported(
            "open memory read-only",
            "ACL maps keys and shareable handles read-write only; open it read-write, or receive a copy",
        ));
    }
    for home in handles.iter().filter_map(|handle| handle.home) {
        if driver.reach_of(on, home)? == Reach::None {
            return Err(driver.no_peer_access(on, home));
        }
    }
    Ok(first)
}

fn check_handle(handle: &ReceivedHandle, first: &ReceivedHandle) -> Result<()> {
    if !matches!(handle.kind, KEY | SHAREABLE) {
        return Err(unsupported(
            &format!("open a handle of kind {}", handle.kind.0),
            "this version supports kinds 1 (key) and 2 (shareable handle); update the importer",
        ));
    }
    if handle.kind != first.kind {
        return Err(unsupported("open handles of several kinds as one range", "open each separately"));
    }
    if !handle.fds.is_empty() {
        return Err(Error::Protocol(format!(
            "received an Ascend handle with {} file descriptors, expected 0",
            handle.fds.len()
        )));
    }
    Ok(())
}

/// Closes a range that [`open`] opened.
pub(crate) fn close(driver: &Driver, opened: &Opened) -> Result<()> {
    let base = DevicePtr::new(opened.cookie);
    let _opening = imports::lock_opening();
    let import = {
        let mut table = imports::lock();
        if let Some(import) = table.get_mut(&base).filter(|import| import.opens > 1) {
            import.opens -= 1;
            return Ok(());
        }
        // Before the vendor's close, after which another import may get the address.
        table.remove(&base)
    };
    let Some(import) = import else {
        return Err(Error::InvalidRegion(format!("the range at {base} is already closed")));
    };
    let _current = driver.enter(import.range.device)?;
    match import.handle {
        ImportHandle::Key(key) => key::import::close(driver, &key, import.range.len),
        ImportHandle::Shareable(blocks) => shareable::import::unmap(driver, base, &blocks),
        ImportHandle::Reserved => {
            Err(Error::InvalidRegion(format!("the memory at {base} belongs to an import; release that")))
        }
    }
}
