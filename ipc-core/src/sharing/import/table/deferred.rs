//! Values that one thread opens later, or another one that needs them before.
//!
//! ```text
//!   (absent) --add--> queued --a thread opens it--> opening --> (absent)
//!                       |
//!                       +--taken back--> (absent)
//! ```

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::os::{Condvar, SPIN, clock};
use crate::transport::Deadline;

/// What has yet to be opened, by its key.
#[derive(Debug)]
pub(super) struct DeferredOpens<K, V> {
    by_key: Mutex<HashMap<K, DeferredOpen<V>>>,
    opened: Condvar,
}

#[derive(Debug)]
enum DeferredOpen<V> {
    Queued(V),
    /// A thread is opening it.
    Opening,
}

impl<K, V> Default for DeferredOpens<K, V> {
    fn default() -> Self {
        Self { by_key: Mutex::default(), opened: Condvar::new() }
    }
}

impl<K: Eq + Hash, V> DeferredOpens<K, V> {
    /// Adds a value. Returns it if there is one of this key.
    pub(super) fn add(&self, key: K, value: V) -> Result<(), V> {
        let mut states = self.lock();
        if states.contains_key(&key) {
            return Err(value);
        }
        states.insert(key, DeferredOpen::Queued(value));
        Ok(())
    }

    /// Opens a value if it is queued. Returns whether it was.
    pub(super) fn open(&self, key: &K, open: impl FnOnce(V)) -> bool {
        let begin = || {
            let mut states = self.lock();
            let state = states.get_mut(key).filter(|state| matches!(state, DeferredOpen::Queued(_)))?;
            Some(std::mem::replace(state, DeferredOpen::Opening))
        };
        let Some(DeferredOpen::Queued(value)) = begin() else { return false };
        let _opening = OpenInProgress { opens: self, key };
        open(value);
        true
    }

    /// Opens a value if it is queued. Otherwise waits for a thread that is opening it.
    pub(super) fn open_or_wait(&self, key: &K, deadline: Deadline, open: impl FnOnce(V)) {
        if !self.open(key, open) {
            self.wait_while_opening(key, deadline);
        }
    }

    /// Waits for a call of the driver, so it spins first.
    fn wait_while_opening(&self, key: &K, deadline: Deadline) {
        let is_opening =
            |states: &mut HashMap<K, DeferredOpen<V>>| matches!(states.get(key), Some(DeferredOpen::Opening));
        let mut states = self.lock();
        if !is_opening(&mut states) {
            return;
        }
        let begin = clock::now();
        while is_opening(&mut states) && clock::elapsed(begin) < SPIN {
            drop(states);
            std::hint::spin_loop();
            states = self.lock();
        }
        drop(self.opened.wait_timeout_while(&self.by_key, states, deadline.left(), is_opening));
    }

    /// Takes back the queued values with these keys.
    pub(super) fn take_queued(&self, is_meant: impl Fn(&K) -> bool) -> Vec<V> {
        let mut states = self.lock();
        let queued =
            states.extract_if(|key, state| is_meant(key) && matches!(state, DeferredOpen::Queued(_)));
        let values = queued.filter_map(|(_, state)| match state {
            DeferredOpen::Queued(value) => Some(value),
            DeferredOpen::Opening => None,
        });
        values.collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<K, DeferredOpen<V>>> {
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The open of a value, which ends with the drop, also on a panic.
struct OpenInProgress<'a, K: Eq + Hash, V> {
    opens: &'a DeferredOpens<K, V>,
    key: &'a K,
}

impl<K: Eq + Hash, V> Drop for OpenInProgress<'_, K, V> {
    fn drop(&mut self) {
        self.opens.lock().remove(self.key);
        self.opens.opened.notify_all();
    }
}

#[cfg(test)]
mod tests;
