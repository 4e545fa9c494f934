//! An entry of the cache, and its reference count.
//!
//! The count determines the state: opening, closing, referenced, or idle at 0. Changes to and from 0, and closing, need the
//! cache's lock. References that are taken and released while others exist need no lock: they never see the count at 0, and
//! never change it to 0.

use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::OnceLock;

#[cfg(not(all(loom, test)))]
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(all(loom, test))]
use loom::sync::atomic::{AtomicU64, Ordering};

/// The bits of the word that count references. The bits above count the references that were taken while others existed, at no
/// extra cost.
const HOLDS: u64 = (1 << 28) - 1;
const ONE_JOINED: u64 = HOLDS + 1;

/// The count of an entry that cannot be referenced.
const OPENING: u64 = HOLDS;
const CLOSING: u64 = HOLDS - 1;

/// A value with its key. In C's order, so that the word is beside the counts of the enclosing [`Arc`](std::sync::Arc): taking a
/// reference changes both.
#[derive(Debug)]
#[repr(C)]
pub(in crate::sharing::import) struct CacheEntry<K, V> {
    word: AtomicU64,
    /// The tick of the table's clock at which the value became idle.
    since: AtomicU64,
    key: K,
    value: OnceLock<V>,
}

impl<K, V> CacheEntry<K, V> {
    /// Creates an entry that is being opened.
    pub(in crate::sharing::import) fn opening(key: K) -> Self {
        let (word, since) = (AtomicU64::new(OPENING), AtomicU64::new(0));
        Self { word, since, key, value: OnceLock::new() }
    }

    pub(in crate::sharing::import) const fn key(&self) -> &K {
        &self.key
    }

    /// Takes a further reference if there is one, and counts that.
    pub(super) fn join_others(&self) -> bool {
        let joined = |word: u64| {
            let has_others = (1..CLOSING - 1).contains(&(word & HOLDS));
            // On overflow the lock is taken, under which the count begins at 0.
            word.checked_add(ONE_JOINED + 1).filter(|_| has_others)
        };
        // Acquires the effects that other references have seen.
        self.word.fetch_update(Ordering::Acquire, Ordering::Relaxed, joined).is_ok()
    }

    /// Releases a reference if there is another one.
    pub(super) fn leave_to_others(&self) -> bool {
        let left = |word: u64| (word & HOLDS > 1).then(|| word - 1);
        // Releases the effects of this reference to the thread that closes the value.
        self.word.fetch_update(Ordering::Release, Ordering::Relaxed, left).is_ok()
    }

    fn holds(&self) -> u64 {
        self.word.load(Ordering::Acquire) & HOLDS
    }
}

/// Called under the cache's lock, so that an idle, opening or closing entry stays so.
impl<K, V> CacheEntry<K, V> {
    /// Marks the value as open, with one reference.
    pub(super) fn opened(&self, value: V) {
        // It was opening, so there is no value yet.
        let _ = self.value.set(value);
        self.word.store(1, Ordering::Release);
    }

    /// Marks the value as open and idle at this tick of the clock.
    pub(super) fn opened_idle(&self, value: V, now: u64) {
        let _ = self.value.set(value);
        self.since.store(now, Ordering::Relaxed);
        self.word.store(0, Ordering::Release);
    }

    /// Returns whether the value is neither being opened nor being closed.
    pub(in crate::sharing::import) fn is_open(&self) -> bool {
        self.holds() < CLOSING
    }

    pub(super) fn is_idle(&self) -> bool {
        self.holds() == 0
    }

    pub(super) fn is_live(&self) -> bool {
        (1..CLOSING).contains(&self.holds())
    }

    /// Takes a reference to an open value. Returns whether it is the first.
    pub(super) fn hold(&self) -> bool {
        let before = self.word.fetch_add(1, Ordering::Acquire) & HOLDS;
        assert!(before < CLOSING - 1, "there is memory for fewer guards");
        before == 0
    }

    /// Releases a reference at this tick of the clock. Returns whether it was the last.
    pub(super) fn leave(&self, now: u64) -> bool {
        // Before the entry becomes visibly idle.
        self.since.store(now, Ordering::Relaxed);
        self.word.fetch_sub(1, Ordering::AcqRel) & HOLDS == 1
    }

    /// Marks an idle value as closing.
    pub(super) fn closing(&self) {
        self.word.fetch_or(CLOSING, Ordering::Relaxed);
    }

    /// Returns the number of references taken beside others since the last call.
    pub(super) fn joined(&self) -> u64 {
        self.word.load(Ordering::Relaxed) / ONE_JOINED
    }

    pub(super) fn take_joined(&self) -> u64 {
        self.word.fetch_and(HOLDS, Ordering::AcqRel) / ONE_JOINED
    }

    pub(super) fn idle_since(&self) -> u64 {
        self.since.load(Ordering::Relaxed)
    }
}

impl<K, V> Deref for CacheEntry<K, V> {
    type Target = V;

    fn deref(&self) -> &V {
        self.value.get().expect("nobody holds what has not been opened")
    }
}

/// Found by its key.
#[derive(Debug)]
pub(super) struct ByKey<K, V>(pub(super) std::sync::Arc<CacheEntry<K, V>>);

impl<K, V> std::borrow::Borrow<K> for ByKey<K, V> {
    fn borrow(&self) -> &K {
        &self.0.key
    }
}

impl<K: Hash, V> Hash for ByKey<K, V> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.key.hash(state);
    }
}

impl<K: PartialEq, V> PartialEq for ByKey<K, V> {
    fn eq(&self, other: &Self) -> bool {
        self.0.key == other.0.key
    }
}

impl<K: Eq, V> Eq for ByKey<K, V> {}
