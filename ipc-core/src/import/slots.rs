//! Things that are opened once, however many threads ask, and closed after the last has let go.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::broker::Deadline;
use crate::error::Result;

/// A table of opened things. While one is being opened or closed, those who ask for it wait: some vendors cannot open
/// a handle a second time, and none likes a close that races with an open.
#[derive(Debug)]
pub(super) struct Slots<K, V> {
    map: Mutex<HashMap<K, Slot<V>>>,
    changed: Condvar,
}

#[derive(Debug)]
enum Slot<V> {
    /// Being opened or closed by some thread.
    Busy,
    /// Open, and held so many times.
    Live { value: Arc<V>, holds: usize },
}

impl<K, V> Default for Slots<K, V> {
    fn default() -> Self {
        Self { map: Mutex::default(), changed: Condvar::new() }
    }
}

impl<K: Clone + Eq + Hash, V> Slots<K, V> {
    /// A hold on the thing, opened by `open` unless it is open already.
    ///
    /// # Errors
    ///
    /// That of `open`, or a timeout where another thread is still opening or closing it.
    pub(super) fn acquire(
        &self,
        key: &K,
        deadline: Deadline,
        open: impl FnOnce() -> Result<V>,
    ) -> Result<Arc<V>> {
        let mut map = self.lock();
        loop {
            match map.get_mut(key) {
                Some(Slot::Live { value, holds }) => {
                    *holds += 1;
                    return Ok(Arc::clone(value));
                }
                Some(Slot::Busy) => {
                    let left = deadline.left();
                    if left.is_zero() {
                        return Err(
                            deadline.passed("the open or close of the same memory by another thread", "")
                        );
                    }
                    map = self.changed.wait_timeout(map, left).unwrap_or_else(PoisonError::into_inner).0;
                }
                None => break,
            }
        }
        map.insert(key.clone(), Slot::Busy);
        drop(map);
        let busy = Busy { slots: self, key };
        let value = Arc::new(open()?);
        self.lock().insert(key.clone(), Slot::Live { value: Arc::clone(&value), holds: 1 });
        std::mem::forget(busy);
        self.changed.notify_all();
        Ok(value)
    }

    /// Lets go of a hold; the last one closes the thing by `close`.
    pub(super) fn release(&self, key: &K, held: Arc<V>, close: impl FnOnce(V)) {
        // Before the count goes down, so that the last holder finds the table's own reference alone.
        drop(held);
        let mut map = self.lock();
        let Some(Slot::Live { holds, .. }) = map.get_mut(key) else { return };
        *holds -= 1;
        if *holds > 0 {
            return;
        }
        let Some(Slot::Live { value, .. }) = map.insert(key.clone(), Slot::Busy) else { return };
        drop(map);
        let _busy = Busy { slots: self, key };
        if let Some(value) = Arc::into_inner(value) {
            close(value);
        }
    }

    /// Is there an open thing like this?
    pub(super) fn any(&self, like: impl Fn(&V) -> bool) -> bool {
        self.lock().values().any(|slot| matches!(slot, Slot::Live { value, .. } if like(value)))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<K, Slot<V>>> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Empties a busy slot, also when an open fails or panics.
struct Busy<'a, K: Clone + Eq + Hash, V> {
    slots: &'a Slots<K, V>,
    key: &'a K,
}

impl<K: Clone + Eq + Hash, V> Drop for Busy<'_, K, V> {
    fn drop(&mut self) {
        self.slots.lock().remove(self.key);
        self.slots.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::error::Error;

    fn deadline() -> Deadline {
        Deadline::after(Duration::from_secs(10))
    }

    #[test]
    fn nested_holds_open_once_and_close_once() {
        let slots = Slots::default();
        let first = slots.acquire(&1, deadline(), || Ok("one")).unwrap();
        let second = slots.acquire(&1, deadline(), || panic!("it is open")).unwrap();
        slots.release(&1, first, |_| panic!("it is held"));
        let mut closed = None;
        slots.release(&1, second, |value| closed = Some(value));
        assert_eq!(closed, Some("one"));
        assert!(slots.lock().is_empty());
    }

    #[test]
    fn a_failed_open_leaves_nothing_behind() {
        let slots = Slots::default();
        assert!(matches!(
            slots.acquire(&1, deadline(), || Err::<(), _>(Error::Rebooted)),
            Err(Error::Rebooted)
        ));
        let panicked =
            std::panic::catch_unwind(|| slots.acquire(&1, deadline(), || panic!("part of the test")));
        assert!(panicked.is_err());
        slots.acquire(&1, deadline(), || Ok(())).unwrap();
    }

    #[test]
    fn an_open_waits_for_another_threads_and_not_for_ever() {
        let slots = Slots::<i32, ()>::default();
        let open = slots.acquire(&1, deadline(), || {
            let soon = Deadline::after(Duration::from_millis(1));
            assert!(matches!(slots.acquire(&1, soon, || Ok(())), Err(Error::Timeout { .. })));
            Ok(())
        });
        open.unwrap();
    }

    #[test]
    fn many_threads_never_have_two_open_at_a_time() {
        let slots = Slots::default();
        let open = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let held = slots.acquire(&(), deadline(), || {
                            assert_eq!(open.fetch_add(1, Ordering::SeqCst), 0);
                            Ok(())
                        });
                        slots.release(&(), held.unwrap(), |()| {
                            assert_eq!(open.fetch_sub(1, Ordering::SeqCst), 1);
                        });
                    }
                });
            }
        });
        assert_eq!(open.load(Ordering::SeqCst), 0);
    }
}
