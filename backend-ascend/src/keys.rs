//! The keys that this process has made, by the memory that they are for.
//!
//! The driver's books of a process go by address (hicann/driver, `svm_shmem_node.c`, `svm_shmem_interprocess.c`): to destroy a key
//! takes the *first* key of its memory out of the list by which keys are revoked when the process dies, and clears the
//! mark by which `aclrtFree` knows that there are keys to revoke. With several keys of one memory, an importer could be left on
//! freed memory. So the keys of a memory are destroyed together, once none of them is in use, and in the order of their
//! making. Until then a key that is not in use any longer stays; its importers have closed it.
//!
//! One table for the process, not for a backend: the driver's books are the process's. Keys that other libraries make of the
//! same memory are not in it.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use device_ipc_core::DevicePtr;

use crate::wire::Key;

/// The keys of all memory, by its base.
pub(crate) struct Keys(BTreeMap<DevicePtr, Vec<Made>>);

struct Made {
    key: Key,
    in_use: bool,
    /// The processes that the driver admits.
    listed: HashSet<i32>,
}

static KEYS: Mutex<Keys> = Mutex::new(Keys(BTreeMap::new()));

/// The table. It stays locked over the calls that make and destroy keys, whose order it records.
pub(crate) fn table() -> MutexGuard<'static, Keys> {
    KEYS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Keys {
    /// Adds a key that was made last.
    pub(crate) fn add(&mut self, base: DevicePtr, key: Key) {
        self.0.entry(base).or_default().push(Made { key, in_use: true, listed: HashSet::new() });
    }

    /// The processes that were listed for a key that is in use.
    pub(crate) fn listed(&mut self, base: DevicePtr, key: &Key) -> Option<&mut HashSet<i32>> {
        let made = self.0.get_mut(&base)?.iter_mut().find(|made| made.key == *key && made.in_use)?;
        Some(&mut made.listed)
    }

    /// Ends the use of a key, and returns the keys that are to be destroyed now: all of its memory, or none. `None` for a key
    /// that was not in use.
    pub(crate) fn release(&mut self, base: DevicePtr, key: &Key) -> Option<Vec<Key>> {
        let keys = self.0.get_mut(&base)?;
        keys.iter_mut().find(|made| made.key == *key && made.in_use)?.in_use = false;
        let in_use = keys.iter().any(|made| made.in_use);
        Some(if in_use { Vec::new() } else { self.take(base) })
    }

    /// Takes all keys of a memory out, in use or not, in the order of their making.
    pub(crate) fn take(&mut self, base: DevicePtr) -> Vec<Key> {
        self.0.remove(&base).into_iter().flatten().map(|made| made.key).collect()
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
    fn keys_of_one_memory_are_destroyed_together_and_in_order() {
        let mut keys = Keys(BTreeMap::new());
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
