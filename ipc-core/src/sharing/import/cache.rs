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

mod entry;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::{Arc, PoisonError};
#[cfg(not(all(loom, test)))]
use std::sync::{Mutex, MutexGuard};

// The model checker decides who runs, and its waits have no timeout.
#[cfg(all(loom, test))]
use loom::sync::{Condvar, Mutex, MutexGuard};

use entry::ByKey;
pub(super) use entry::CacheEntry;

use crate::model::error::Result;
#[cfg(not(all(loom, test)))]
use crate::os::Condvar;
use crate::transport::Deadline;

/// What can be kept.
pub(super) trait Cached {
    /// May it stay open while nobody uses it, and be used again?
    fn may_be_kept(&self) -> bool;
    /// How many bytes it keeps mapped.
    fn bytes(&self) -> u64;
    /// Called when the last reference to it has been released, under the cache's lock.
    fn rest(&self) {}
    /// Called when an idle one is to be used again, under the cache's lock. Returns false where it has been taken back while it was
    /// idle: it may only be closed then.
    fn resume(&self) -> bool {
        true
    }
    /// Would a close have to wait, so that it is better used again than closed, kept or not?
    fn is_busy(&self) -> bool {
        false
    }
}

/// How much may stay open while nobody uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheLimits {
    /// How many mappings.
    pub mappings: usize,
    /// How many bytes in all of them, counted by their regions' allocations.
    pub bytes: u64,
}

impl CacheLimits {
    /// Nothing stays open.
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

/// The model checker repeats what happened, so the order of the table is always the same.
#[cfg(all(loom, test))]
type Hashing = std::hash::BuildHasherDefault<std::hash::DefaultHasher>;

/// A table of opened things. While one is being opened or closed, those who ask for it wait: some vendors cannot open a
/// handle a second time, and none likes a close that races with an open.
#[derive(Debug)]
pub(super) struct Cache<K, V> {
    state: Mutex<State<K, V>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<K, V> {
    entries: HashSet<ByKey<K, V>, Hashing>,
    limits: CacheLimits,
    idle: usize,
    idle_bytes: u64,
    clock: u64,
    /// How many holds were taken again, where what is held does not count them itself.
    again: u64,
}

impl<K, V> Default for Cache<K, V> {
    fn default() -> Self {
        let (entries, limits) = (HashSet::default(), CacheLimits::default());
        Self {
            state: Mutex::new(State { entries, limits, idle: 0, idle_bytes: 0, clock: 0, again: 0 }),
            changed: Condvar::new(),
        }
    }
}

impl<K: Eq + Hash, V: Cached> Cache<K, V> {
    /// A hold on the thing, opened by `open` unless it is open already; and whether it was. `close` closes an idle thing
    /// that may no longer be used.
    ///
    /// # Errors
    ///
    /// That of `open`, or a timeout where another thread is still opening or closing it.
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
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
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

    /// A hold on the thing where it is open and `usable`; opens, closes and waits for nothing.
    pub(super) fn acquire_open(&self, key: &K, usable: impl Fn(&V) -> bool) -> Option<Arc<CacheEntry<K, V>>> {
        let mut state = self.lock();
        let known = state.get(key).filter(|known| known.is_open() && usable(known))?;
        state.hold_again(known)
    }

    /// The same for one that had been open before. Where others hold it this meets no other thread.
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

    /// A hold on one that had been open before, or is being opened, for who opens another thing: it does not count as an
    /// open.
    pub(super) fn hold_known(
        &self,
        known: Arc<CacheEntry<K, V>>,
        usable: impl Fn(&V) -> bool,
    ) -> Option<Arc<CacheEntry<K, V>>> {
        let mut state = self.lock();
        let held = known.is_open() && usable(&known) && state.hold_where_usable(&known);
        held.then_some(known)
    }

    /// Lets go of a hold where nothing has to be closed for that: others have holds too, or it stays open. Gives it back
    /// otherwise, for [`release`](Self::release). Where others have holds this meets no other thread.
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

    /// Lets go of a hold. After the last one the thing becomes idle, or is closed where it may not be kept; and what has
    /// been idle for longest is closed where the limits are passed.
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

    /// Closes the thing if it is idle.
    pub(super) fn close_idle(
        &self,
        known: &Arc<CacheEntry<K, V>>,
        mut close: impl FnMut(&Arc<CacheEntry<K, V>>),
    ) {
        drop(self.close_if_idle(self.lock(), known, &mut close));
    }

    /// Closes everything that is idle, until the limits are kept.
    pub(super) fn set_limits(&self, limits: CacheLimits, mut close: impl FnMut(&Arc<CacheEntry<K, V>>)) {
        let mut state = self.lock();
        state.limits = limits;
        for victim in state.over_the_limits() {
            state = self.close_if_idle(state, &victim, &mut close);
        }
    }

    /// Everything that is idle.
    pub(super) fn idle(&self) -> Vec<Arc<CacheEntry<K, V>>> {
        self.lock().those(CacheEntry::is_idle).cloned().collect()
    }

    /// Returns the number of idle ones, and their bytes.
    pub(super) fn idle_amount(&self) -> (u64, u64) {
        let state = self.lock();
        (state.idle as u64, state.idle_bytes)
    }

    /// Everything that is in use or idle.
    pub(super) fn open(&self) -> Vec<Arc<CacheEntry<K, V>>> {
        self.lock().those(CacheEntry::is_open).cloned().collect()
    }

    /// Everything that is in use.
    #[cfg(test)]
    pub(super) fn live(&self) -> Vec<Arc<CacheEntry<K, V>>> {
        self.lock().those(CacheEntry::is_live).cloned().collect()
    }

    /// How many holds [`acquire_open`](Self::acquire_open) and [`acquire_known`](Self::acquire_known) have given.
    pub(super) fn taken_again(&self) -> u64 {
        let state = self.lock();
        state.again + state.those(|_| true).map(|kept| kept.joined()).sum::<u64>()
    }

    fn close_if_idle<'a>(
        &'a self,
        mut state: MutexGuard<'a, State<K, V>>,
        known: &Arc<CacheEntry<K, V>>,
        close: &mut impl FnMut(&Arc<CacheEntry<K, V>>),
    ) -> MutexGuard<'a, State<K, V>> {
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

    fn lock(&self) -> MutexGuard<'_, State<K, V>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Eq + Hash, V: Cached> State<K, V> {
    fn get(&self, key: &K) -> Option<Arc<CacheEntry<K, V>>> {
        self.entries.get(key).map(|found| Arc::clone(&found.0))
    }

    fn those(
        &self,
        are_so: impl Fn(&CacheEntry<K, V>) -> bool,
    ) -> impl Iterator<Item = &Arc<CacheEntry<K, V>>> {
        self.entries.iter().map(|entry| &entry.0).filter(move |entry| are_so(entry))
    }

    /// Takes a hold on what is open.
    fn hold(&mut self, known: &CacheEntry<K, V>) {
        self.again += known.take_joined();
        if known.hold() {
            self.end_idleness(known);
        }
    }

    /// A hold on what is in use, or is idle and may be used again.
    fn hold_where_usable(&mut self, known: &CacheEntry<K, V>) -> bool {
        let usable = known.is_live() || known.is_idle() && known.may_be_kept() && known.resume();
        if usable {
            self.hold(known);
        }
        usable
    }

    /// The same, counted.
    fn hold_again(&mut self, known: Arc<CacheEntry<K, V>>) -> Option<Arc<CacheEntry<K, V>>> {
        let held = self.hold_where_usable(&known);
        self.again += u64::from(held);
        held.then_some(known)
    }

    /// Lets go of a hold. Is nobody left?
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

    /// Nobody gets what was idle any longer: it is to be closed.
    fn take_idle(&mut self, known: &CacheEntry<K, V>) {
        self.again += known.take_joined();
        known.closing();
        self.end_idleness(known);
    }

    fn end_idleness(&mut self, known: &CacheEntry<K, V>) {
        self.idle -= 1;
        self.idle_bytes = self.idle_bytes.saturating_sub(known.bytes());
    }

    /// May so many bytes become idle without anything being closed for it?
    fn has_room_for(&self, bytes: u64) -> bool {
        self.idle < self.limits.mappings && self.idle_bytes.saturating_add(bytes) <= self.limits.bytes
    }

    /// What has to be closed, the longest unused first; never what is in use.
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

/// Removes an entry that is being opened or closed, also when that panics.
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
