//! A cache of values that are opened once for any number of threads, kept idle after the last use, and closed once.
//!
//! ```text
//!   (absent) --acquire--> Opening --opened--> Live --last release--> Idle --evicted, recalled--> Closing --> (absent)
//!                            |                 ^  \                    |
//!                            +--failed         |   +--not to be kept---|--------> Closing
//!                                              +------- acquire -------+
//! ```
//!
//! *Revoked* is not a state but a property of the value ([`Cached::may_be_kept`] turns false): a live value is closed after its
//! last use, and an idle one immediately.

mod entry;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::{Arc, PoisonError};
#[cfg(not(all(loom, test)))]
use std::sync::{Mutex, MutexGuard};

// Under the model checker, waits have no timeout.
#[cfg(all(loom, test))]
use loom::sync::{Condvar, Mutex, MutexGuard};

use entry::ByKey;
pub(super) use entry::CacheEntry;

use crate::model::error::Result;
#[cfg(not(all(loom, test)))]
use crate::os::Condvar;
use crate::transport::Deadline;

/// A value that the cache can keep.
pub(super) trait Cached {
    /// Returns whether it may be kept idle and used again.
    fn may_be_kept(&self) -> bool;
    /// Returns the number of bytes that it keeps mapped.
    fn bytes(&self) -> u64;
    /// Called when the last reference to it has been released, under the cache's lock.
    fn rest(&self) {}
    /// Called when an idle value is to be used again, under the cache's lock. Returns false if it was reclaimed while it was
    /// idle: then it may only be closed.
    fn resume(&self) -> bool {
        true
    }
    /// Returns whether a close would have to wait, so that using it again is better even if it is not kept.
    fn is_busy(&self) -> bool {
        false
    }
}

/// Limits of the idle mappings in the import cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheLimits {
    /// Maximum number of idle mappings.
    pub mappings: usize,
    /// Maximum total size of their allocations in bytes.
    pub bytes: u64,
}

impl CacheLimits {
    /// Keeps nothing idle.
    pub const NONE: Self = Self { mappings: 0, bytes: 0 };

    /// Sets [`mappings`](Self::mappings).
    pub const fn with_mappings(mut self, mappings: usize) -> Self {
        self.mappings = mappings;
        self
    }

    /// Sets [`bytes`](Self::bytes).
    pub const fn with_bytes(mut self, bytes: u64) -> Self {
        self.bytes = bytes;
        self
    }
}

impl Default for CacheLimits {
    /// 1024 mappings of any size.
    fn default() -> Self {
        Self { mappings: 1024, bytes: u64::MAX }
    }
}

#[cfg(not(all(loom, test)))]
type Hashing = std::hash::RandomState;

/// The model checker replays executions, so the order of the table must be the same each time.
#[cfg(all(loom, test))]
type Hashing = std::hash::BuildHasherDefault<std::hash::DefaultHasher>;

/// A table of opened values. Threads that request a value wait while another thread opens or closes it: some vendors cannot
/// open a handle twice, and none supports a close that races with an open.
#[derive(Debug)]
pub(super) struct Cache<K, V> {
    state: Mutex<CacheState<K, V>>,
    changed: Condvar,
}

#[derive(Debug)]
struct CacheState<K, V> {
    entries: HashSet<ByKey<K, V>, Hashing>,
    limits: CacheLimits,
    idle: usize,
    idle_bytes: u64,
    clock: u64,
    /// The number of references taken again, except those that the entries count.
    again: u64,
}

impl<K, V> Default for Cache<K, V> {
    fn default() -> Self {
        let (entries, limits) = (HashSet::default(), CacheLimits::default());
        Self {
            state: Mutex::new(CacheState { entries, limits, idle: 0, idle_bytes: 0, clock: 0, again: 0 }),
            changed: Condvar::new(),
        }
    }
}

impl<K: Eq + Hash, V: Cached> Cache<K, V> {
    /// Returns a reference to the value, which `open` opens unless it is open already; and whether it was open. `close` closes
    /// an idle value that may no longer be used.
    ///
    /// # Errors
    ///
    /// The error of `open`, or a timeout while another thread opens or closes it.
    pub(super) fn acquire(
        &self,
        key: K,
        deadline: Deadline,
        open: impl FnOnce(&Arc<CacheEntry<K, V>>) -> Result<V>,
        close: impl FnOnce(&Arc<CacheEntry<K, V>>),
    ) -> Result<(Arc<CacheEntry<K, V>>, bool)> {
        let mut state = self.lock();
        let stale = loop {
            let Some(known) = state.get(&key) else { break None };
            if known.is_open() {
                if known.is_live() || (known.may_be_kept() || known.is_busy()) && known.resume() {
                    state.hold(&known);
                    return Ok((known, true));
                }
                state.take_idle(&known);
                break Some(known);
            }
            let left = deadline.left();
            if left.is_zero() {
                return Err(deadline.passed("the open or close of the same memory by another thread", ""));
            }
            #[cfg(not(all(loom, test)))]
            let waited = self.changed.wait_timeout(&self.state, state, left);
            #[cfg(all(loom, test))]
            let waited = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state = waited;
        };
        let opening = Arc::new(CacheEntry::opening(key));
        state.entries.replace(ByKey(Arc::clone(&opening)));
        drop(state);
        let unfinished = Unfinished { cache: self, key: opening.key() };
        if let Some(stale) = stale {
            close(&stale);
        }
        let value = open(&opening)?;
        std::mem::forget(unfinished);
        let state = self.lock();
        opening.opened(value);
        drop(state);
        self.changed.notify_all();
        Ok((opening, false))
    }

    /// Adds a value that is open and idle. Returns it if there is one of its key, or no room.
    pub(super) fn add_idle(&self, entry: &Arc<CacheEntry<K, V>>, value: V) -> Result<(), V> {
        let mut state = self.lock();
        let bytes = value.bytes();
        if state.get(entry.key()).is_some() || !state.has_room_for(bytes) {
            return Err(value);
        }
        state.clock += 1;
        entry.opened_idle(value, state.clock);
        state.idle += 1;
        state.idle_bytes = state.idle_bytes.saturating_add(bytes);
        state.entries.insert(ByKey(Arc::clone(entry)));
        Ok(())
    }

    /// Returns a reference to the value if it is open and `usable`. Never opens, closes or waits.
    pub(super) fn acquire_open(&self, key: &K, usable: impl Fn(&V) -> bool) -> Option<Arc<CacheEntry<K, V>>> {
        let mut state = self.lock();
        let known = state.get(key).filter(|known| known.is_open() && usable(known))?;
        state.hold_again(known)
    }

    /// Returns a reference to a known entry. Contends with no other thread if there are other references.
    pub(super) fn acquire_known(
        &self,
        known: Arc<CacheEntry<K, V>>,
        usable: impl Fn(&V) -> bool,
    ) -> Option<Arc<CacheEntry<K, V>>> {
        if !usable(&known) {
            return None;
        }
        if known.join_others() {
            return Some(known);
        }
        self.lock().hold_again(known)
    }

    /// Returns a reference to a known entry for the open of another value. It does not count as an open.
    pub(super) fn hold_known(
        &self,
        known: Arc<CacheEntry<K, V>>,
        usable: impl Fn(&V) -> bool,
    ) -> Option<Arc<CacheEntry<K, V>>> {
        let mut state = self.lock();
        let held = known.is_open() && usable(&known) && state.hold_where_usable(&known);
        held.then_some(known)
    }

    /// Releases a reference if nothing has to be closed: there are others, or the value may be kept idle. Otherwise returns it,
    /// for [`release`](Self::release). Contends with no other thread if there are other references.
    pub(super) fn leave_idle(&self, held: Arc<CacheEntry<K, V>>) -> Result<(), Arc<CacheEntry<K, V>>> {
        if held.leave_to_others() {
            return Ok(());
        }
        let mut state = self.lock();
        if !held.may_be_kept() || !state.has_room_for(held.bytes()) {
            return Err(held);
        }
        state.leave(&held);
        Ok(())
    }

    /// Releases a reference. After the last one the value becomes idle, or is closed if it may not be kept; and the least
    /// recently used idle values are closed until the limits hold.
    pub(super) fn release(&self, held: Arc<CacheEntry<K, V>>, mut close: impl FnMut(&Arc<CacheEntry<K, V>>)) {
        if held.leave_to_others() {
            return;
        }
        let mut state = self.lock();
        if !state.leave(&held) {
            return;
        }
        let mut victims = Vec::new();
        if !held.may_be_kept() {
            victims.push(held);
        }
        victims.extend(state.over_the_limits());
        for victim in victims {
            state = self.close_if_idle(state, &victim, &mut close);
        }
    }

    /// Closes the value if it is idle.
    pub(super) fn close_idle(
        &self,
        known: &Arc<CacheEntry<K, V>>,
        mut close: impl FnMut(&Arc<CacheEntry<K, V>>),
    ) {
        drop(self.close_if_idle(self.lock(), known, &mut close));
    }

    /// Closes the least recently used idle values until the limits hold.
    pub(super) fn set_limits(&self, limits: CacheLimits, mut close: impl FnMut(&Arc<CacheEntry<K, V>>)) {
        let mut state = self.lock();
        state.limits = limits;
        for victim in state.over_the_limits() {
            state = self.close_if_idle(state, &victim, &mut close);
        }
    }

    /// Removes all idle values.
    pub(super) fn idle(&self) -> Vec<Arc<CacheEntry<K, V>>> {
        self.lock().those(CacheEntry::is_idle).cloned().collect()
    }

    /// Returns the number of idle values, and their total size in bytes.
    pub(super) fn idle_amount(&self) -> (u64, u64) {
        let state = self.lock();
        (state.idle as u64, state.idle_bytes)
    }

    /// Returns the values in use and the idle ones.
    pub(super) fn open(&self) -> Vec<Arc<CacheEntry<K, V>>> {
        self.lock().those(CacheEntry::is_open).cloned().collect()
    }

    /// Returns the values in use.
    #[cfg(test)]
    pub(super) fn live(&self) -> Vec<Arc<CacheEntry<K, V>>> {
        self.lock().those(CacheEntry::is_live).cloned().collect()
    }

    /// Returns the number of references from [`acquire_open`](Self::acquire_open) and [`acquire_known`](Self::acquire_known).
    pub(super) fn taken_again(&self) -> u64 {
        let state = self.lock();
        state.again + state.those(|_| true).map(|kept| kept.joined()).sum::<u64>()
    }

    fn close_if_idle<'a>(
        &'a self,
        mut state: MutexGuard<'a, CacheState<K, V>>,
        known: &Arc<CacheEntry<K, V>>,
        close: &mut impl FnMut(&Arc<CacheEntry<K, V>>),
    ) -> MutexGuard<'a, CacheState<K, V>> {
        if !known.is_idle() {
            return state;
        }
        state.take_idle(known);
        drop(state);
        let unfinished = Unfinished { cache: self, key: known.key() };
        close(known);
        drop(unfinished);
        self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, CacheState<K, V>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Eq + Hash, V: Cached> CacheState<K, V> {
    fn get(&self, key: &K) -> Option<Arc<CacheEntry<K, V>>> {
        self.entries.get(key).map(|found| Arc::clone(&found.0))
    }

    fn those(
        &self,
        are_so: impl Fn(&CacheEntry<K, V>) -> bool,
    ) -> impl Iterator<Item = &Arc<CacheEntry<K, V>>> {
        self.entries.iter().map(|entry| &entry.0).filter(move |entry| are_so(entry))
    }

    /// Takes a reference to an open value.
    fn hold(&mut self, known: &CacheEntry<K, V>) {
        self.again += known.take_joined();
        if known.hold() {
            self.end_idleness(known);
        }
    }

    /// Takes a reference to a value in use, or to an idle one that may be used again.
    fn hold_where_usable(&mut self, known: &CacheEntry<K, V>) -> bool {
        let usable = known.is_live() || known.is_idle() && known.may_be_kept() && known.resume();
        if usable {
            self.hold(known);
        }
        usable
    }

    /// Takes such a reference, and counts it.
    fn hold_again(&mut self, known: Arc<CacheEntry<K, V>>) -> Option<Arc<CacheEntry<K, V>>> {
        let held = self.hold_where_usable(&known);
        self.again += u64::from(held);
        held.then_some(known)
    }

    /// Releases a reference. Returns whether it was the last one.
    fn leave(&mut self, held: &CacheEntry<K, V>) -> bool {
        self.clock += 1;
        let last = held.leave(self.clock);
        if last {
            held.rest();
            self.idle += 1;
            self.idle_bytes = self.idle_bytes.saturating_add(held.bytes());
        }
        last
    }

    /// Marks an idle value as closing: it can no longer be used.
    fn take_idle(&mut self, known: &CacheEntry<K, V>) {
        self.again += known.take_joined();
        known.closing();
        self.end_idleness(known);
    }

    fn end_idleness(&mut self, known: &CacheEntry<K, V>) {
        self.idle -= 1;
        self.idle_bytes = self.idle_bytes.saturating_sub(known.bytes());
    }

    /// Returns whether this many bytes may become idle without closing anything.
    fn has_room_for(&self, bytes: u64) -> bool {
        self.idle < self.limits.mappings && self.idle_bytes.saturating_add(bytes) <= self.limits.bytes
    }

    /// Removes the idle values to be closed, least recently used first.
    fn over_the_limits(&self) -> Vec<Arc<CacheEntry<K, V>>> {
        let (mut count, mut bytes) = (self.idle, self.idle_bytes);
        if count <= self.limits.mappings && bytes <= self.limits.bytes {
            return Vec::new();
        }
        let mut candidates: Vec<_> = self.those(CacheEntry::is_idle).collect();
        candidates.sort_unstable_by_key(|idle| idle.idle_since());
        let mut victims = Vec::new();
        for candidate in candidates {
            if count <= self.limits.mappings && bytes <= self.limits.bytes {
                break;
            }
            count -= 1;
            bytes = bytes.saturating_sub(candidate.bytes());
            victims.push(Arc::clone(candidate));
        }
        victims
    }
}

/// Removes an entry that is being opened or closed, also on a panic.
struct Unfinished<'a, K: Eq + Hash, V: Cached> {
    cache: &'a Cache<K, V>,
    key: &'a K,
}

impl<K: Eq + Hash, V: Cached> Drop for Unfinished<'_, K, V> {
    fn drop(&mut self) {
        self.cache.lock().entries.remove(self.key);
        self.cache.changed.notify_all();
    }
}
