//! The keys that this process has created, by the address of their block.
//!
//! The driver records the keys of a process by address (hicann/driver, `svm_shmem_node.c`, `svm_shmem_interprocess.c`):
//! destroying a key removes the *first* key of its block from the list by which keys are revoked when the process
//! exits, and clears the flag by which `aclrtFree` detects keys to revoke. With several keys of one block, an importer
//! could be left with freed memory. So the keys of a block are destroyed together, once none of them is in use, in the
//! order of their creation. Until then an unused key remains, closed by its importers.
//!
//! One table per process, not per backend, like the driver's records. It does not contain keys that other libraries
//! create for the same memory.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use device_ipc_core::DevicePtr;

use crate::memory::wire::Key;

/// The keys of all blocks, by the base of the block.
pub(super) struct KeyTable(BTreeMap<DevicePtr, Vec<KeyEntry>>);

struct KeyEntry {
    key: Key,
    in_use: bool,
    /// The processes that the driver admits.
    listed: HashSet<i32>,
}

static KEYS: Mutex<KeyTable> = Mutex::new(KeyTable(BTreeMap::new()));

/// Locks the table. It stays locked during the calls that create and destroy keys, whose order it records.
pub(super) fn lock() -> MutexGuard<'static, KeyTable> {
    KEYS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl KeyTable {
    /// Adds the most recently created key.
    pub(super) fn add(&mut self, base: DevicePtr, key: Key) {
        self.0.entry(base).or_default().push(KeyEntry { key, in_use: true, listed: HashSet::new() });
    }

    /// Returns the listed processes of a key in use.
    pub(super) fn listed(&mut self, base: DevicePtr, key: &Key) -> Option<&mut HashSet<i32>> {
        let entry = self.0.get_mut(&base)?.iter_mut().find(|entry| entry.key == *key && entry.in_use)?;
        Some(&mut entry.listed)
    }

    /// Ends the use of a key, and returns the keys to destroy now: all keys of the block, or none. Returns `None` for a
    /// key that was not in use.
    pub(super) fn release(&mut self, base: DevicePtr, key: &Key) -> Option<Vec<Key>> {
        let keys = self.0.get_mut(&base)?;
        keys.iter_mut().find(|entry| entry.key == *key && entry.in_use)?.in_use = false;
        let in_use = keys.iter().any(|entry| entry.in_use);
        Some(if in_use { Vec::new() } else { self.take(base) })
    }

    /// Removes all keys of a block, in use or not, and returns them in the order of their creation.
    pub(super) fn take(&mut self, base: DevicePtr) -> Vec<Key> {
        self.0.remove(&base).into_iter().flatten().map(|entry| entry.key).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> Key {
        let mut bytes = [0; 65];
        bytes[0] = byte;
        Key::new(bytes).expect("a key")
    }

    #[test]
    fn keys_of_one_block_are_destroyed_together_in_order() {
        let mut keys = KeyTable(BTreeMap::new());
        let (one, other) = (DevicePtr::new(1), DevicePtr::new(2));
        for byte in [1, 2, 3] {
            keys.add(one, key(byte));
        }
        keys.add(other, key(9));
        assert_eq!(keys.release(one, &key(2)), Some(Vec::new()));
        assert_eq!(keys.release(one, &key(2)), None, "released once");
        assert!(keys.listed(one, &key(2)).is_none() && keys.listed(one, &key(1)).is_some());
        assert_eq!(keys.release(one, &key(1)), Some(Vec::new()));
        assert_eq!(keys.release(one, &key(3)), Some(vec![key(1), key(2), key(3)]));
        assert_eq!(keys.take(one), Vec::new());
        assert_eq!(keys.release(other, &key(9)), Some(vec![key(9)]));
    }
}
