//! The last few of what is made, read or opened again and again, on either side: a state dict is the same each time but for its
//! bytes.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, TryLockError};

/// How many are remembered: a process may hand over several in turn.
const REMEMBERED: usize = 4;

/// The last few things of a kind, the newest first.
#[derive(Debug)]
pub(crate) struct Recent<T>(Mutex<VecDeque<Arc<T>>>);

impl<T> Recent<T> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(VecDeque::new()))
    }

    /// The newest that `is_it`. None where another thread is looking just now: it waits for nobody, also not in a forked
    /// child for a thread that is not there.
    pub(crate) fn find(&self, is_it: impl Fn(&T) -> bool) -> Option<Arc<T>> {
        let mut all = self.try_lock()?;
        let position = all.iter().position(|known| is_it(known))?;
        let found = all.remove(position)?;
        all.push_front(Arc::clone(&found));
        Some(found)
    }

    /// Remembers this one, in the place of one that it `replaces` or of the oldest.
    pub(crate) fn remember(&self, new: Arc<T>, replaces: impl Fn(&T) -> bool) {
        let forgotten = self.try_lock().and_then(|mut all| {
            let replaced =
                all.iter().position(|known| replaces(known)).and_then(|position| all.remove(position));
            all.push_front(new);
            replaced.or_else(|| if all.len() > REMEMBERED { all.pop_back() } else { None })
        });
        // Not under the lock, as it may be large.
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
mod tests {
    use super::*;

    #[test]
    fn the_last_few_are_found_and_the_one_that_was_used_last_stays_longest() {
        let recent = Recent::new();
        let find = |wanted: u32| recent.find(|known| *known == wanted).is_some();
        for number in 0..REMEMBERED as u32 {
            recent.remember(Arc::new(number), |_| false);
        }
        assert!(find(0), "the oldest, which is the newest now");
        recent.remember(Arc::new(100), |_| false);
        assert!(find(0) && find(100) && !find(1));
        recent.remember(Arc::new(200), |known| *known == 100);
        assert!(find(200) && find(0) && find(2) && !find(100), "it has taken the place of its like");
    }

    #[test]
    fn nobody_waits_for_who_looks() {
        let recent = Recent::new();
        recent.remember(Arc::new(1), |_| false);
        let inner = |_: &u32| recent.find(|_| true).is_none();
        assert!(recent.find(inner).is_some(), "the inner look found nothing and did not wait");
    }
}
