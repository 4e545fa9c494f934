//! The imported memory of this process.
//!
//! One table per process, not per backend, like the driver's rules. Importing a key again returns the same address and
//! a count that runtimes up to CANN 9.1.0 lose, so that the second close becomes an attempt to destroy the export
//! (`IpcCloseMemoryByName` of the runtime's sources); so a key is imported once, counted here, and closed once. The
//! table also identifies memory on other cards, to which special rules for copies apply ([`copies`](super::copies)).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use device_ipc_core::{DeviceOrdinal, DevicePtr, DeviceRange};

use super::wire::Key;

/// An imported range.
#[derive(Debug)]
pub(super) struct Import {
    /// The mapped range, on the device that it was opened for.
    pub(super) range: DeviceRange,
    /// The home device, if it is visible here.
    pub(super) home: Option<DeviceOrdinal>,
    /// The number of opens.
    pub(super) opens: usize,
    /// The handle that it was opened by.
    pub(super) handle: ImportHandle,
}

/// The handle of an imported range, which determines how it is closed.
#[derive(Debug)]
pub(super) enum ImportHandle {
    /// A key.
    Key(Key),
    /// Shareable handles, mapped side by side into one reservation.
    Shareable(Vec<ImportedBlock>),
    /// Shareable handles, mapped at reserved addresses that outlive the mapping.
    Reserved,
}

/// Physical memory of another process, mapped here.
#[derive(Clone, Copy, Debug)]
pub(super) struct ImportedBlock {
    /// The shareable handle.
    pub(super) number: u64,
    /// The physical handle in this process.
    pub(super) physical: usize,
    /// The address of the mapping.
    pub(super) at: DevicePtr,
    /// The size in bytes.
    pub(super) size: u64,
}

static IMPORTS: Mutex<BTreeMap<DevicePtr, Import>> = Mutex::new(BTreeMap::new());
static OPENING: Mutex<()> = Mutex::new(());

/// The shareable handles that are imported for reserved addresses, mapped or not, with their devices.
static RESERVED: Mutex<BTreeSet<(u64, DeviceOrdinal)>> = Mutex::new(BTreeSet::new());

fn lock_reserved() -> MutexGuard<'static, BTreeSet<(u64, DeviceOrdinal)>> {
    RESERVED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Records that a shareable handle is imported for reserved addresses.
pub(super) fn add_reserved(number: u64, on: DeviceOrdinal) {
    lock_reserved().insert((number, on));
}

/// Removes a shareable handle that was released.
pub(super) fn remove_reserved(number: u64, on: DeviceOrdinal) {
    lock_reserved().remove(&(number, on));
}

/// Returns whether any of the shareable handles is imported for reserved addresses of the device.
pub(super) fn any_reserved(numbers: &[u64], on: DeviceOrdinal) -> bool {
    let reserved = lock_reserved();
    numbers.iter().any(|number| reserved.contains(&(*number, on)))
}

/// Locks the vendor's calls that open and close, so that two threads never open one key concurrently. Separate from the
/// table's lock: a close may wait for work that another thread still submits, and every copy reads the table.
pub(super) fn lock_opening() -> MutexGuard<'static, ()> {
    OPENING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks the table, for no longer than a lookup.
pub(super) fn lock() -> MutexGuard<'static, BTreeMap<DevicePtr, Import>> {
    IMPORTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns whether the address lies in imported memory.
pub(super) fn contains(ptr: DevicePtr) -> bool {
    find(&lock(), ptr).is_some()
}

/// Returns whether the address lies in imported memory whose home is another card than `device`.
pub(super) fn is_remote(ptr: DevicePtr, device: DeviceOrdinal) -> bool {
    find(&lock(), ptr).is_some_and(|import| import.home != Some(device))
}

/// Returns the import of a key.
pub(super) fn by_key<'a>(table: &'a mut BTreeMap<DevicePtr, Import>, key: &Key) -> Option<&'a mut Import> {
    table.values_mut().find(|import| matches!(&import.handle, ImportHandle::Key(known) if known == key))
}

/// Returns the import for device `on` that contains one of these shareable handles.
pub(super) fn by_numbers<'a>(
    table: &'a mut BTreeMap<DevicePtr, Import>,
    numbers: &[u64],
    on: DeviceOrdinal,
) -> Option<&'a mut Import> {
    table.values_mut().filter(|import| import.range.device == on).find(|import| match &import.handle {
        ImportHandle::Shareable(blocks) => blocks.iter().any(|block| numbers.contains(&block.number)),
        ImportHandle::Key(_) | ImportHandle::Reserved => false,
    })
}

fn find(table: &BTreeMap<DevicePtr, Import>, ptr: DevicePtr) -> Option<&Import> {
    let (_, import) = table.range(..=ptr).next_back()?;
    (import.range.end()? > ptr).then_some(import)
}
