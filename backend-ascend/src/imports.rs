//! What this process has opened from others.
//!
//! One table for the process, not for a backend: the driver's rules count processes. Re-importing a key gives the same
//! address and a count that runtimes up to CANN 9.1.0 lose, so that the second close becomes an attempt to destroy the
//! export (`IpcCloseMemoryByName` of the runtime's sources); so a key is imported once, counted here, and closed once.
//! The table also tells which memory lies on another card, where copies have rules of their own ([`copies`](crate::copies)).

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use device_ipc_core::{DeviceOrdinal, DevicePtr, DeviceRange};

use crate::wire::Key;

/// A range that was opened.
#[derive(Debug)]
pub(crate) struct Import {
    /// Where it is mapped, and for which device.
    pub(crate) range: DeviceRange,
    /// Where the memory lives, if that is seen here.
    pub(crate) home: Option<DeviceOrdinal>,
    /// How often it is open.
    pub(crate) opens: usize,
    /// By what it was opened.
    pub(crate) by: Way,
}

/// How a range was opened, and so how it is closed.
#[derive(Debug)]
pub(crate) enum Way {
    /// By a key.
    Key(Key),
    /// By shareable handles, mapped one behind the other into one reservation.
    Shareable(Vec<Block>),
}

/// Physical memory of another process, mapped here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    /// The shareable handle.
    pub(crate) number: u64,
    /// The physical handle that it became here.
    pub(crate) physical: usize,
    /// Where it is mapped.
    pub(crate) at: DevicePtr,
    /// Its bytes.
    pub(crate) size: u64,
}

static IMPORTS: Mutex<BTreeMap<DevicePtr, Import>> = Mutex::new(BTreeMap::new());
static OPENING: Mutex<()> = Mutex::new(());

/// Held over the vendor's calls that open and close, so that no two threads open one key at once. Not the table's own
/// lock: a close may wait for work that another thread still submits, and every copy looks into the table.
pub(crate) fn opening() -> MutexGuard<'static, ()> {
    OPENING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The table, for a moment.
pub(crate) fn table() -> MutexGuard<'static, BTreeMap<DevicePtr, Import>> {
    IMPORTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Does the address lie in memory that was opened from another process?
pub(crate) fn contains(ptr: DevicePtr) -> bool {
    find(&table(), ptr).is_some()
}

/// Does the address lie in memory that was opened from another process, and lives on another card than `device`?
pub(crate) fn is_remote(ptr: DevicePtr, device: DeviceOrdinal) -> bool {
    find(&table(), ptr).is_some_and(|import| import.home != Some(device))
}

/// The import of a key, if there is one.
pub(crate) fn by_key<'a>(table: &'a mut BTreeMap<DevicePtr, Import>, key: &Key) -> Option<&'a mut Import> {
    table.values_mut().find(|import| matches!(&import.by, Way::Key(known) if known == key))
}

/// The import for a device that has one of these shareable handles, if there is one.
pub(crate) fn by_numbers<'a>(
    table: &'a mut BTreeMap<DevicePtr, Import>,
    numbers: &[u64],
    on: DeviceOrdinal,
) -> Option<&'a mut Import> {
    table.values_mut().filter(|import| import.range.device == on).find(|import| match &import.by {
        Way::Shareable(blocks) => blocks.iter().any(|block| numbers.contains(&block.number)),
        Way::Key(_) => false,
    })
}

fn find(table: &BTreeMap<DevicePtr, Import>, ptr: DevicePtr) -> Option<&Import> {
    let (_, import) = table.range(..=ptr).next_back()?;
    (import.range.end()? > ptr).then_some(import)
}
