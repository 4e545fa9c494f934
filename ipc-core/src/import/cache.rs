//! Things that are opened once, however many threads ask, kept for a while after the last has let go, and closed once.
//!
//! ```text
//!   (absent) --acquire--> Opening --opened--> Live --last release--> Idle --evicted, recalled--> Closing --> (absent)
//!                            |                 ^  \                    |
//!                            +--failed         |   +--not to be kept---|--------> Closing
//!                                              +------- acquire -------+
//! ```
//!
//! *Revoked* is not a place in the picture but a property of the thing ([`Cached::may_be_kept`] turns false): a live one
//! goes on until it is let go and is then closed; an idle one is closed at once.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, PoisonError};
#[cfg(not(all(loom, test)))]
use std::sync::{Mutex, MutexGuard};

// The model checker decides who runs, and its waits have no timeout.
#[cfg(all(loom, test))]
use loom::sync::{Condvar, Mutex, MutexGuard};

use crate::broker::Deadline;
use crate::error::Result;
#[cfg(not(all(loom, test)))]
use crate::runtime::Condvar;

/// What can be kept.
pub(super) trait Cached {
    /// May it stay open while nobody uses it, and be used again?
    fn may_be_kept(&self) -> bool;
    /// How many bytes it keeps mapped.
    fn bytes(&self) -> u64;
    /// Would a close have to wait, so that it is better used again than closed, kept or not?
    fn is_busy(&self) -> bool {
        false
    }
}

/// How much may stay open while nobody uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLimits {
    /// How many mappings.
    pub mappings: usize,
    /// How many bytes in all of them, counted by their regions' allocations.
    pub bytes: u64,
}

impl CacheLimits {
    /// Nothing stays open.
    pub const NONE: Self = Self { mappings: 0, bytes: 0 };
}

impl Default for CacheLimits {
    /// 1024 mappings of any size.
    fn default() -> Self {
        Self { mappings: 1024, bytes: u64::MAX }
    }
}

/// A table of opened things. While one is being opened or closed, those who ask for it wait: some vendors cannot open a
/// handle a second time, and none likes a close that races with an open.
#[derive(Debug)]
pub(super) struct Cache<K, V> {
    state: Mutex<State<K, V>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<K, V> {
    entries: HashMap<K, Entry<V>>,
    limits: CacheLimits,
    idle: usize,
    idle_bytes: u64,
    clock: u64,
}

#[derive(Debug)]
enum Entry<V> {
    Opening,
    /// Held so many times.
    Live {
        value: Arc<V>,
        holds: usize,
    },
    /// Held by nobody since that tick of the table's clock.
    Idle {
        value: Arc<V>,
        since: u64,
    },
    Closing,
}

impl<K, V> Default for Cache<K, V> {
    fn default() -> Self {
        let (entries, limits) = (HashMap::new(), CacheLimits::default());
        Self {
            state: Mutex::new(State { entries, limits, idle: 0, idle_bytes: 0, clock: 0 }),
            changed: Condvar::new(),
        }
    }
}

impl<K: Clone + Eq + Hash, V: Cached> Cache<K, V> {
    /// A hold on the thing, opened by `open` unless it is open already; and whether it was. `close` closes an idle thing
    /// that may no longer be used.
    ///
    /// # Errors
    ///
    /// That of `open`, or a timeout where another thread is still opening or closing it.
    pub(super) fn acquire(
        &self,
        key: &K,
        deadline: Deadline,
        open: impl FnOnce() -> Result<V>,
        close: impl FnOnce(&V),
    ) -> Result<(Arc<V>, bool)> {
        let mut state = self.lock();
        let stale = loop {
            match state.entries.get_mut(key) {
                None => break None,
                Some(Entry::Live { value, holds }) => {
                    *holds += 1;
                    return Ok((Arc::clone(value), true));
                }
                Some(Entry::Idle { value, .. }) => {
                    if value.may_be_kept() || value.is_busy() {
                        return Ok((state.use_again(key).expect("it was there just now"), true));
                    }
                    break state.take_idle(key);
                }
                Some(Entry::Opening | Entry::Closing) => {
                    let left = deadline.left();
                    if left.is_zero() {
                        return Err(
                            deadline.passed("the open or close of the same memory by another thread", "")
                        );
                    }
                    state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        };
        state.entries.insert(key.clone(), Entry::Opening);
        drop(state);
        let unfinished = Unfinished { cache: self, key };
        if let Some(value) = stale {
            close(&value);
        }
        let value = Arc::new(open()?);
        std::mem::forget(unfinished);
        if let Some(entry) = self.lock().entries.get_mut(key) {
            *entry = Entry::Live { value: Arc::clone(&value), holds: 1 };
        }
        self.changed.notify_all();
        Ok((value, false))
    }

    /// A hold on the thing where it is open and `usable`; opens, closes and waits for nothing.
    pub(super) fn acquire_open(&self, key: &K, usable: impl Fn(&V) -> bool) -> Option<Arc<V>> {
        let mut state = self.lock();
        match state.entries.get_mut(key)? {
            Entry::Live { value, holds } if usable(value) => {
                *holds += 1;
                Some(Arc::clone(value))
            }
            Entry::Idle { value, .. } if value.may_be_kept() && usable(value) => state.use_again(key),
            _ => None,
        }
    }

    /// Lets go of a hold where nothing has to be closed for that: others have holds too, or it stays open. Gives it back
    /// otherwise, for [`release`](Self::release).
    pub(super) fn let_go(&self, key: &K, held: Arc<V>) -> Result<(), Arc<V>> {
        let mut state = self.lock();
        let Some(Entry::Live { holds, .. }) = state.entries.get_mut(key) else { return Err(held) };
        if *holds > 1 {
            *holds -= 1;
        } else if held.may_be_kept() && state.has_room_for(held.bytes()) {
            state.put_idle(key, held);
        } else {
            return Err(held);
        }
        Ok(())
    }

    /// Lets go of a hold. After the last one the thing becomes idle, or is closed where it may not be kept; and what has
    /// been idle for longest is closed where the limits are passed.
    pub(super) fn release(&self, key: &K, held: Arc<V>, mut close: impl FnMut(&V)) {
        drop(held);
        let mut state = self.lock();
        let Some(Entry::Live { holds, value }) = state.entries.get_mut(key) else { return };
        *holds -= 1;
        if *holds > 0 {
            return;
        }
        let value = Arc::clone(value);
        state.put_idle(key, value);
        let mut victims = Vec::new();
        if !state.may_keep(key) {
            victims.push(key.clone());
        }
        victims.extend(state.over_the_limits());
        for victim in victims {
            state = self.close_idle_entry(state, &victim, &mut close);
        }
    }

    /// Closes the thing if it is idle.
    pub(super) fn close_idle(&self, key: &K, mut close: impl FnMut(&V)) {
        drop(self.close_idle_entry(self.lock(), key, &mut close));
    }

    /// Closes everything that is idle, until the limits are kept.
    pub(super) fn set_limits(&self, limits: CacheLimits, mut close: impl FnMut(&V)) {
        let mut state = self.lock();
        state.limits = limits;
        for victim in state.over_the_limits() {
            state = self.close_idle_entry(state, &victim, &mut close);
        }
    }

    /// The keys of everything that is idle.
    pub(super) fn idle_keys(&self) -> Vec<K> {
        let state = self.lock();
        let idle = |(key, entry): (&K, &Entry<V>)| matches!(entry, Entry::Idle { .. }).then(|| key.clone());
        state.entries.iter().filter_map(idle).collect()
    }

    /// Everything that is in use.
    pub(super) fn live(&self) -> Vec<Arc<V>> {
        let state = self.lock();
        let live = |entry: &Entry<V>| match entry {
            Entry::Live { value, .. } => Some(Arc::clone(value)),
            _ => None,
        };
        state.entries.values().filter_map(live).collect()
    }

    /// Is there one like this among what is open?
    #[cfg(all(loom, test))]
    pub(super) fn any(&self, is_so: impl Fn(&V) -> bool) -> bool {
        self.lock().entries.values().any(|entry| match entry {
            Entry::Live { value, .. } | Entry::Idle { value, .. } => is_so(value),
            Entry::Opening | Entry::Closing => false,
        })
    }

    fn close_idle_entry<'a>(
        &'a self,
        mut state: MutexGuard<'a, State<K, V>>,
        key: &K,
        close: &mut impl FnMut(&V),
    ) -> MutexGuard<'a, State<K, V>> {
        let Some(value) = state.take_idle(key) else { return state };
        state.entries.insert(key.clone(), Entry::Closing);
        drop(state);
        let unfinished = Unfinished { cache: self, key };
        close(&value);
        drop(unfinished);
        self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, State<K, V>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Clone + Eq + Hash, V: Cached> State<K, V> {
    /// What is in use is so no longer.
    fn put_idle(&mut self, key: &K, value: Arc<V>) {
        let Some(entry) = self.entries.get_mut(key) else { return };
        self.clock += 1;
        self.idle += 1;
        self.idle_bytes = self.idle_bytes.saturating_add(value.bytes());
        *entry = Entry::Idle { value, since: self.clock };
    }

    /// A first hold on what is idle.
    fn use_again(&mut self, key: &K) -> Option<Arc<V>> {
        let entry = self.entries.get_mut(key)?;
        let Entry::Idle { value, .. } = entry else { return None };
        let value = Arc::clone(value);
        *entry = Entry::Live { value: Arc::clone(&value), holds: 1 };
        self.idle -= 1;
        self.idle_bytes = self.idle_bytes.saturating_sub(value.bytes());
        Some(value)
    }

    /// Takes an idle thing out of the table.
    fn take_idle(&mut self, key: &K) -> Option<Arc<V>> {
        if !matches!(self.entries.get(key), Some(Entry::Idle { .. })) {
            return None;
        }
        let Some(Entry::Idle { value, .. }) = self.entries.remove(key) else { return None };
        self.idle -= 1;
        self.idle_bytes = self.idle_bytes.saturating_sub(value.bytes());
        Some(value)
    }

    fn may_keep(&self, key: &K) -> bool {
        matches!(self.entries.get(key), Some(Entry::Idle { value, .. }) if value.may_be_kept())
    }

    /// May so many bytes become idle without anything being closed for it?
    fn has_room_for(&self, bytes: u64) -> bool {
        self.idle < self.limits.mappings && self.idle_bytes.saturating_add(bytes) <= self.limits.bytes
    }

    /// What has to be closed, the longest unused first; never what is in use.
    fn over_the_limits(&self) -> Vec<K> {
        let (mut count, mut bytes) = (self.idle, self.idle_bytes);
        if count <= self.limits.mappings && bytes <= self.limits.bytes {
            return Vec::new();
        }
        let idle = |(key, entry): (&K, &Entry<V>)| match entry {
            Entry::Idle { value, since } => Some((*since, value.bytes(), key.clone())),
            _ => None,
        };
        let mut candidates: Vec<_> = self.entries.iter().filter_map(idle).collect();
        candidates.sort_unstable_by_key(|(since, ..)| *since);
        let mut victims = Vec::new();
        for (_, size, key) in candidates {
            if count <= self.limits.mappings && bytes <= self.limits.bytes {
                break;
            }
            count -= 1;
            bytes = bytes.saturating_sub(size);
            victims.push(key);
        }
        victims
    }
}

/// Removes an entry that is being opened or closed, also when that panics.
struct Unfinished<'a, K: Clone + Eq + Hash, V: Cached> {
    cache: &'a Cache<K, V>,
    key: &'a K,
}

impl<K: Clone + Eq + Hash, V: Cached> Drop for Unfinished<'_, K, V> {
    fn drop(&mut self) {
        self.cache.lock().entries.remove(self.key);
        self.cache.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::error::Error;

    struct Thing {
        bytes: u64,
        kept: AtomicBool,
    }

    impl Cached for Thing {
        fn may_be_kept(&self) -> bool {
            self.kept.load(Ordering::SeqCst)
        }
        fn bytes(&self) -> u64 {
            self.bytes
        }
    }

    fn thing(bytes: u64) -> Thing {
        Thing { bytes, kept: AtomicBool::new(true) }
    }

    fn deadline() -> Deadline {
        Deadline::after(Duration::from_secs(10))
    }

    fn counts(cache: &Cache<i32, Thing>) -> (usize, usize) {
        (cache.live().len(), cache.idle_keys().len())
    }

    fn never(_: &Thing) {
        panic!("it is not to be closed");
    }

    #[test]
    fn what_nobody_uses_stays_open_and_is_used_again() {
        let cache = Cache::default();
        let (first, was_open) = cache.acquire(&1, deadline(), || Ok(thing(10)), never).unwrap();
        assert!(!was_open);
        let (second, was_open) = cache.acquire(&1, deadline(), || panic!("it is open"), never).unwrap();
        assert!(was_open);
        cache.release(&1, first, never);
        cache.release(&1, second, never);
        assert_eq!(counts(&cache), (0, 1));
        let (again, was_open) = cache.acquire(&1, deadline(), || panic!("it is open"), never).unwrap();
        assert!(was_open);
        assert_eq!(counts(&cache), (1, 0));
        cache.release(&1, again, never);
        let mut closed = 0;
        cache.close_idle(&1, |_| closed += 1);
        cache.close_idle(&1, |_| closed += 1);
        assert_eq!((closed, counts(&cache)), (1, (0, 0)));
    }

    #[test]
    fn what_is_open_and_usable_is_held_and_nothing_else_happens() {
        let cache = Cache::default();
        assert!(cache.acquire_open(&1, |_: &Thing| true).is_none(), "it is not open");
        let (held, _) = cache.acquire(&1, deadline(), || Ok(thing(10)), never).unwrap();
        assert!(cache.acquire_open(&1, |_| false).is_none(), "it is not usable");
        let second = cache.acquire_open(&1, |_| true).unwrap();
        cache.release(&1, held, never);
        assert_eq!(counts(&cache), (1, 0), "the second hold counts");
        cache.release(&1, second, never);
        let again = cache.acquire_open(&1, |_| true).unwrap();
        assert_eq!(counts(&cache), (1, 0), "an idle one is used again");
        cache.release(&1, Arc::clone(&again), never);
        again.kept.store(false, Ordering::SeqCst);
        assert!(cache.acquire_open(&1, |_| true).is_none(), "it was revoked while it was idle");
        let closed = AtomicUsize::new(0);
        cache.close_idle(&1, |_| {
            closed.fetch_add(1, Ordering::SeqCst);
        });
        assert_eq!(closed.into_inner(), 1, "it was left to be closed");
    }

    #[test]
    fn a_hold_is_let_go_of_where_nothing_has_to_be_closed() {
        let cache = Cache::default();
        cache.set_limits(CacheLimits { mappings: 1, bytes: 100 }, never);
        let hold = |key: i32, bytes| cache.acquire(&key, deadline(), || Ok(thing(bytes)), never).unwrap().0;
        let (first, second) = (hold(1, 60), hold(1, 60));
        first.kept.store(false, Ordering::SeqCst);
        assert!(cache.let_go(&1, first).is_ok(), "another hold is left");
        let revoked = cache.let_go(&1, second).unwrap_err();
        assert_eq!(counts(&cache), (1, 0), "the last hold on what may not be kept is given back");
        revoked.kept.store(true, Ordering::SeqCst);
        assert!(cache.let_go(&1, revoked).is_ok());
        assert_eq!(counts(&cache), (0, 1), "it stays open");
        let other = cache.let_go(&2, hold(2, 10)).unwrap_err();
        assert_eq!(counts(&cache), (1, 1), "there is room for one");
        cache.set_limits(CacheLimits { mappings: 2, bytes: 69 }, never);
        let other = cache.let_go(&2, other).unwrap_err();
        cache.set_limits(CacheLimits { mappings: 2, bytes: 70 }, never);
        assert!(cache.let_go(&2, other).is_ok(), "there is room for its bytes");
        assert_eq!(counts(&cache), (0, 2));
    }

    #[test]
    fn one_that_is_busy_is_used_again_rather_than_closed() {
        struct Busy(AtomicBool);
        impl Cached for Busy {
            fn may_be_kept(&self) -> bool {
                self.0.load(Ordering::SeqCst)
            }
            fn bytes(&self) -> u64 {
                1
            }
            fn is_busy(&self) -> bool {
                true
            }
        }
        let close = |_: &Busy| panic!("it is not to be closed");
        let cache = Cache::default();
        let (held, _) = cache.acquire(&1, deadline(), || Ok(Busy(AtomicBool::new(true))), close).unwrap();
        assert!(cache.let_go(&1, Arc::clone(&held)).is_ok());
        held.0.store(false, Ordering::SeqCst);
        assert!(cache.acquire(&1, deadline(), || panic!("it is open"), close).unwrap().1);
        assert!(cache.let_go(&1, held).is_err(), "it may still not be kept");
    }

    #[test]
    fn the_longest_unused_is_closed_first_and_never_one_in_use() {
        let cache = Cache::default();
        cache.set_limits(CacheLimits { mappings: 2, bytes: 100 }, never);
        let mut closed = Vec::new();
        let hold = |key: i32, bytes| cache.acquire(&key, deadline(), || Ok(thing(bytes)), never).unwrap().0;
        let used = hold(0, 90);
        for key in 1..=3 {
            cache.release(&key, hold(key, 30), |one| closed.push(one.bytes));
        }
        assert_eq!((closed.len(), counts(&cache)), (1, (1, 2)), "by number");
        let mut keys = cache.idle_keys();
        keys.sort_unstable();
        assert_eq!(keys, [2, 3], "the one that was used first has gone");
        cache.release(&4, hold(4, 80), |one| closed.push(one.bytes));
        assert_eq!((closed.len(), cache.idle_keys()), (3, vec![4]), "by bytes");
        cache.release(&0, used, |one| closed.push(one.bytes));
        assert_eq!(cache.idle_keys(), [0], "what was let go last is kept");
        cache.set_limits(CacheLimits::NONE, |one| closed.push(one.bytes));
        assert_eq!((closed.len(), counts(&cache)), (5, (0, 0)));
    }

    #[test]
    fn a_revoked_one_goes_on_until_it_is_let_go_and_is_then_closed() {
        let cache = Cache::default();
        let (held, _) = cache.acquire(&1, deadline(), || Ok(thing(1)), never).unwrap();
        held.kept.store(false, Ordering::SeqCst);
        let mut closed = 0;
        cache.close_idle(&1, |_| closed += 1);
        assert_eq!(closed, 0, "it is in use");
        cache.release(&1, held, |_| closed += 1);
        assert_eq!((closed, counts(&cache)), (1, (0, 0)));
    }

    #[test]
    fn an_idle_one_that_was_revoked_is_closed_before_it_is_opened_again() {
        let cache = Cache::default();
        let (held, _) = cache.acquire(&1, deadline(), || Ok(thing(1)), never).unwrap();
        let revoke = Arc::clone(&held);
        cache.release(&1, held, never);
        revoke.kept.store(false, Ordering::SeqCst);
        drop(revoke);
        let closed = AtomicUsize::new(0);
        let open = || {
            assert_eq!(closed.load(Ordering::SeqCst), 1);
            Ok(thing(2))
        };
        let (again, was_open) = cache
            .acquire(&1, deadline(), open, |_: &Thing| {
                closed.fetch_add(1, Ordering::SeqCst);
            })
            .unwrap();
        assert_eq!((again.bytes, was_open), (2, false));
    }

    #[test]
    fn a_failed_open_leaves_nothing_behind() {
        let cache = Cache::<i32, Thing>::default();
        let failed = cache.acquire(&1, deadline(), || Err(Error::Rebooted), never);
        assert!(matches!(failed, Err(Error::Rebooted)));
        let panicked = std::panic::catch_unwind(|| {
            cache.acquire(&1, deadline(), || panic!("part of the test"), never).is_ok()
        });
        assert!(panicked.is_err());
        cache.acquire(&1, deadline(), || Ok(thing(0)), never).unwrap();
    }

    #[test]
    fn an_open_waits_for_another_threads_and_not_for_ever() {
        let cache = Cache::default();
        let open = || {
            let soon = Deadline::after(Duration::from_millis(1));
            assert!(matches!(cache.acquire(&1, soon, || Ok(thing(0)), never), Err(Error::Timeout { .. })));
            Ok(thing(0))
        };
        cache.acquire(&1, deadline(), open, never).unwrap();
    }

    #[test]
    fn many_threads_never_have_two_open_at_a_time() {
        let cache = Cache::default();
        let open = AtomicUsize::new(0);
        let close = |_: &Thing| assert_eq!(open.fetch_sub(1, Ordering::SeqCst), 1);
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (cache, open) = (&cache, &open);
                scope.spawn(move || {
                    for round in 0..500 {
                        let acquired = cache.acquire(
                            &(),
                            deadline(),
                            || {
                                assert_eq!(open.fetch_add(1, Ordering::SeqCst), 0);
                                Ok(thing(1))
                            },
                            close,
                        );
                        let held = acquired.unwrap().0;
                        held.kept.store((round + thread) % 3 != 0, Ordering::SeqCst);
                        cache.release(&(), held, close);
                        if round % 7 == 0 {
                            cache.close_idle(&(), close);
                        }
                    }
                });
            }
        });
        cache.close_idle(&(), close);
        assert_eq!(open.load(Ordering::SeqCst), 0);
    }
}
