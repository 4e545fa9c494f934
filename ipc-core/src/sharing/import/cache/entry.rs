//! One thing of a cache, and the count of those who hold it.
//!
//! The count tells the state: opening, closing, held so many times, or idle where it is 0. Only who has the cache's lock
//! makes a thing idle, live again, or closed. Those in between, who come where others hold it already and leave it to
//! others, need no lock: they never see the count at 0, nor bring it there.

use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::OnceLock;

#[cfg(not(all(loom, test)))]
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(all(loom, test))]
use loom::sync::atomic::{AtomicU64, Ordering};

/// The bits of the word that say how many hold it. Those above count who joined, so that this costs nothing beside the
/// hold.
const HOLDS: u64 = (1 << 28) - 1;
const ONE_JOINED: u64 = HOLDS + 1;

/// Holds that say that nobody can hold it.
const OPENING: u64 = HOLDS;
const CLOSING: u64 = HOLDS - 1;

/// A thing under its key. In C's order, so that the word lies beside the counts of the [`Arc`](std::sync::Arc) around it:
/// who takes a hold changes both.
#[derive(Debug)]
#[repr(C)]
pub(in crate::sharing::import) struct CacheEntry<K, V> {
    word: AtomicU64,
    /// The tick of the table's clock at which it became idle.
    since: AtomicU64,
    key: K,
    value: OnceLock<V>,
}

impl<K, V> CacheEntry<K, V> {
    /// One that is being opened.
    pub(super) fn opening(key: K) -> Self {
        let (word, since) = (AtomicU64::new(OPENING), AtomicU64::new(0));
        Self { word, since, key, value: OnceLock::new() }
    }

    pub(in crate::sharing::import) const fn key(&self) -> &K {
        &self.key
    }

    /// Takes a further hold, where there is one, and counts that.
    pub(super) fn join_others(&self) -> bool {
        let joined = |word: u64| {
            let has_others = (1..CLOSING - 1).contains(&(word & HOLDS));
            // What cannot be counted any longer takes the lock, under which the count begins anew.
            word.checked_add(ONE_JOINED + 1).filter(|_| has_others)
        };
        // What the others have seen of the thing has happened for this one too.
        self.word.fetch_update(Ordering::Acquire, Ordering::Relaxed, joined).is_ok()
    }

    /// Lets go of a hold, where there is another one.
    pub(super) fn leave_to_others(&self) -> bool {
        let left = |word: u64| (word & HOLDS > 1).then(|| word - 1);
        // Whoever closes it comes behind everything that this one did with it.
        self.word.fetch_update(Ordering::Release, Ordering::Relaxed, left).is_ok()
    }

    fn holds(&self) -> u64 {
        self.word.load(Ordering::Acquire) & HOLDS
    }
}

/// Under the cache's lock, where what is idle, opening or closing stays so.
impl<K, V> CacheEntry<K, V> {
    /// It has been opened, for one who holds it.
    pub(super) fn opened(&self, value: V) {
        // It was opening, so there is none.
        let _ = self.value.set(value);
        self.word.store(1, Ordering::Release);
    }

    /// Is it neither being opened nor being closed?
    pub(in crate::sharing::import) fn is_open(&self) -> bool {
        self.holds() < CLOSING
    }

    pub(super) fn is_idle(&self) -> bool {
        self.holds() == 0
    }

    pub(super) fn is_live(&self) -> bool {
        (1..CLOSING).contains(&self.holds())
    }

    /// Takes a hold on what is open. True for the first.
    pub(super) fn hold(&self) -> bool {
        let before = self.word.fetch_add(1, Ordering::Acquire) & HOLDS;
        assert!(before < CLOSING - 1, "there is memory for fewer guards");
        before == 0
    }

    /// Lets go of a hold. True for the last, at this tick of the clock.
    pub(super) fn leave(&self, now: u64) -> bool {
        // Before it can be seen to be idle.
        self.since.store(now, Ordering::Relaxed);
        self.word.fetch_sub(1, Ordering::AcqRel) & HOLDS == 1
    }

    /// It was idle, and is to be closed.
    pub(super) fn closing(&self) {
        self.word.fetch_or(CLOSING, Ordering::Relaxed);
    }

    /// How many have joined others since this was taken.
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
