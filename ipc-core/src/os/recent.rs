//! The last few values that were created, decoded or opened repeatedly, on either side: a state dict is the same each time
//! except for its bytes.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, TryLockError};

/// Number of remembered values: a process may hand over several in turn.
const REMEMBERED: usize = 4;

/// The last few values of a kind, newest first.
#[derive(Debug)]
pub(crate) struct Recent<T>(Mutex<VecDeque<Arc<T>>>);

impl<T> Recent<T> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }

    /// Returns the newest value for which `is_it` is true; `None` if another thread has the lock. It never waits, so a forked
    /// child cannot wait for a thread that does not exist.
    pub(crate) fn find(&self, is_it: impl Fn(&T) -> bool) -> Option<Arc<T>> {
        let mut all = self.try_lock()?;
        let position = all.iter().position(|known| is_it(known))?;
        let found = all.remove(position)?;
        all.push_front(Arc::clone(&found));
        Some(found)
    }

    /// Remembers a value in place of one for which `replaces` is true, or of the oldest.
    pub(crate) fn remember(&self, new: Arc<T>, replaces: impl Fn(&T) -> bool) {
        let forgotten = self.try_lock().and_then(|mut all| {
            let replaced =
                all.iter().position(|known| replaces(known)).and_then(|position| all.remove(position));
            all.push_front(new);
            replaced.or_else(|| if all.len() > REMEMBERED { all.pop_back() } else { None })
        });
        // Dropped without the lock, as it may be large.
        drop(forgotten);
    }

    fn try_lock(&self) -> Option<std::sync::MutexGuard<'_, VecDeque<Arc<T>>>> {
        match self.0.try_lock() {
            Ok(all) => Some(all),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl<T> Default for Recent<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests;
