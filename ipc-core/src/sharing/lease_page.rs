//! The states of leases, in memory that an importer and an exporter share.
//!
//! When the last mapping of a lease is released, the lease stays in the import cache. Neither this nor the next open sends a
//! message, so the exporter could not tell a lease in use from an idle one, and could not end an idle one without the importer.
//! So each connection has a page with one word for each lease:
//!
//! ```text
//!             last mapping released,               last mapping released,
//!             device work finished                 device work perhaps running
//!    idle <------------------------- in use -------------------------> draining
//!     | \----------opened again------->^ ^<---------opened again---------/
//!     |
//!     +--ended by the exporter--> reclaimed
//! ```
//!
//! The importer makes every change but the last. The exporter ends an idle lease by a compare-exchange from idle to reclaimed, and
//! the importer uses an idle lease again by one from idle to in use, so exactly one of them succeeds. An importer that finds its
//! lease reclaimed opens the export again, as if it had not cached it.
//!
//! A bit of the word states that the exporter has dropped the export. The importer is notified of that by a message, which an
//! exporter that exits at once may not send any more; the bit is in the page when the drop of the export returns.
//!
//! The exporter takes no other decision from a word than whether this importer uses this lease, now or at its death: then only the
//! end of an idle lease is a release. An importer that states a wrong
//! state harms itself: the word "idle" for memory that it uses is a lease that it has returned, any other value one that it keeps.

#![allow(unsafe_code, reason = "words in shared memory")]

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::host_pages::{GRANULE, HostPages};
use crate::model::error::Result;
use crate::model::lease::{LeaseId, LeaseState};

/// Bytes of a page.
const BYTES: usize = 4 * GRANULE;

/// Number of words of a page. A lease beyond them has none, and counts as in use until it is returned.
const WORDS: u32 = (BYTES / size_of::<u32>()) as u32;

/// The states, in the lowest bits. A new page is zeros, and a new lease is in use.
const IN_USE: u32 = 0;
const DRAINING: u32 = 1;
const IDLE: u32 = 2;
const RECLAIMED: u32 = 3;
const STATE: u32 = 3;

/// Set by the exporter: the importer reports its next change by a message, and clears the bit.
const WATCHED: u32 = 4;

/// Set by the exporter when it drops the export. No change of the state clears the bit.
const DROPPED: u32 = 8;

/// Set by the exporter in the word of an idle lease that the importer has not used yet. Each change by the importer clears it.
const AHEAD: u32 = 16;

/// Maximum number of attempts at a change that the peer gets in the way of. An honest peer does so twice at most.
const ATTEMPTS: u32 = 8;

/// An atomic word of a page. The model checker has a type of its own.
pub(crate) trait AtomicWord {
    /// Loads it, with acquire ordering.
    fn load(&self) -> u32;
    /// Replaces it, with acquire and release ordering. Returns the value before.
    fn swap(&self, new: u32) -> u32;
    /// Sets bits, with acquire and release ordering. Returns the value before.
    fn set(&self, bits: u32) -> u32;
    /// Replaces one value, with acquire and release ordering. The error is the value found.
    fn exchange(&self, expected: u32, new: u32) -> Result<u32, u32>;
}

macro_rules! word {
    ($atomic:ty) => {
        impl AtomicWord for $atomic {
            fn load(&self) -> u32 {
                self.load(Ordering::Acquire)
            }

            fn swap(&self, new: u32) -> u32 {
                self.swap(new, Ordering::AcqRel)
            }

            fn set(&self, bits: u32) -> u32 {
                self.fetch_or(bits, Ordering::AcqRel)
            }

            fn exchange(&self, expected: u32, new: u32) -> Result<u32, u32> {
                self.compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire)
            }
        }
    };
}

word!(AtomicU32);
#[cfg(all(loom, test))]
word!(loom::sync::atomic::AtomicU32);

/// The importer's: no mapping uses the lease any longer; device work has finished or not. Returns whether to notify the exporter.
pub(crate) fn rest(word: &impl AtomicWord, finished: bool) -> bool {
    let before = word.swap(if finished { IDLE } else { DRAINING });
    if before & DROPPED != 0 {
        word.set(DROPPED);
    }
    before & WATCHED != 0
}

/// The importer's: uses the lease again. Returns whether to notify the exporter; `None` where the exporter has reclaimed it.
pub(crate) fn resume(word: &impl AtomicWord) -> Option<bool> {
    let mut expected = IDLE;
    for _ in 0..ATTEMPTS {
        match word.exchange(expected, IN_USE | expected & DROPPED) {
            Ok(before) => return Some(before & WATCHED != 0),
            Err(found) if found & STATE == RECLAIMED => return None,
            Err(found) => expected = found,
        }
    }
    None
}

/// The exporter's: ends the lease if it is idle. Returns whether it was.
pub(crate) fn reclaim(word: &impl AtomicWord) -> bool {
    let mut expected = IDLE;
    for _ in 0..ATTEMPTS {
        match word.exchange(expected, RECLAIMED | expected & DROPPED) {
            Ok(_) => return true,
            Err(found) if found & STATE == IDLE => expected = found,
            Err(_) => return false,
        }
    }
    false
}

/// The exporter's: requests a notification of the next change.
pub(crate) fn watch(word: &impl AtomicWord) {
    word.set(WATCHED);
}

/// The exporter's: states that the export has been dropped.
pub(crate) fn note_drop(word: &impl AtomicWord) {
    word.set(DROPPED);
}

/// The exporter's: returns whether the importer has not used the lease yet, which began ahead of its open.
pub(crate) fn is_ahead(word: &impl AtomicWord) -> bool {
    word.load() & (STATE | AHEAD) == IDLE | AHEAD
}

fn state(word: &impl AtomicWord) -> LeaseState {
    match word.load() & STATE {
        DRAINING => LeaseState::Draining,
        IDLE => LeaseState::Idle,
        // One that the importer calls reclaimed is one that it keeps.
        _ => LeaseState::InUse,
    }
}

/// The words of one connection.
#[derive(Debug)]
pub(crate) struct LeasePage(HostPages);

impl LeasePage {
    /// Creates a page, and its file, which the importer maps.
    pub(crate) fn create() -> Result<(Arc<Self>, OwnedFd)> {
        let (pages, file) = HostPages::create("device-ipc-leases", BYTES)?.into_file();
        Ok((Arc::new(Self(pages)), file))
    }

    /// Maps the page of an exporter, and closes its file.
    pub(crate) fn open(file: OwnedFd) -> Result<Arc<Self>> {
        let (pages, _) = HostPages::open(file, BYTES, "its page of lease states")?.into_file();
        Ok(Arc::new(Self(pages)))
    }

    /// Returns a lease's word. `None` for one that the page does not have.
    pub(crate) fn word(self: &Arc<Self>, slot: u32) -> Option<LeaseWord> {
        (slot < WORDS).then(|| LeaseWord { page: Arc::clone(self), slot })
    }
}

/// The word of one lease.
#[derive(Clone, Debug)]
pub(crate) struct LeaseWord {
    page: Arc<LeasePage>,
    slot: u32,
}

impl LeaseWord {
    fn atomic(&self) -> &AtomicU32 {
        // SAFETY: the slot is one of the page's (`LeasePage::word`), which is mapped as long as `self`; aligned; both processes use
        // words atomically.
        unsafe { AtomicU32::from_ptr(self.page.0.base().cast::<u32>().add(self.slot as usize).as_ptr()) }
    }

    pub(crate) const fn slot(&self) -> u32 {
        self.slot
    }

    /// See [`rest`].
    pub(crate) fn rest(&self, finished: bool) -> bool {
        rest(self.atomic(), finished)
    }

    /// See [`resume`].
    pub(crate) fn resume(&self) -> Option<bool> {
        resume(self.atomic())
    }

    /// See [`reclaim`].
    pub(crate) fn reclaim(&self) -> bool {
        reclaim(self.atomic())
    }

    /// See [`watch`].
    pub(crate) fn watch(&self) {
        watch(self.atomic());
    }

    /// See [`note_drop`].
    pub(crate) fn note_drop(&self) {
        note_drop(self.atomic());
    }

    /// Returns whether the exporter has dropped the export.
    pub(crate) fn is_dropped(&self) -> bool {
        self.atomic().load(Ordering::Acquire) & DROPPED != 0
    }

    /// Returns the state that the importer states.
    pub(crate) fn state(&self) -> LeaseState {
        state(self.atomic())
    }

    /// See [`is_ahead`].
    pub(crate) fn is_ahead(&self) -> bool {
        is_ahead(self.atomic())
    }

    /// The exporter's: begins with a lease in use, before the importer receives it.
    fn begin(&self) {
        self.atomic().store(IN_USE, Ordering::Release);
    }

    /// The exporter's: begins with a lease ahead of its open, before the importer receives it.
    pub(crate) fn begin_ahead(&self) {
        self.atomic().store(IDLE | AHEAD, Ordering::Release);
    }
}

/// The exporter's places in the page of one connection.
#[derive(Debug, Default)]
pub(crate) struct LeasePlaces {
    page: Option<Arc<LeasePage>>,
    next: u32,
    free: Vec<u32>,
    taken: HashMap<LeaseId, u32>,
}

impl LeasePlaces {
    /// Creates the page. Returns its file for the importer; `None` where the system has no memory for one.
    pub(crate) fn begin(&mut self) -> Option<OwnedFd> {
        let created = LeasePage::create();
        let created = created.inspect_err(|error| {
            tracing::warn!(target: crate::os::log::EXPORT, %error, "the page of lease states cannot be created");
        });
        let (page, file) = created.ok()?;
        self.page = Some(page);
        Some(file)
    }

    /// Returns a word for a lease that begins. `None` where there is none left.
    pub(crate) fn take(&mut self) -> Option<LeaseWord> {
        let page = self.page.as_ref()?;
        let slot = self.free.pop().unwrap_or(self.next);
        let word = page.word(slot)?;
        self.next = self.next.max(slot + 1);
        word.begin();
        Some(word)
    }

    /// Notes the lease that a word was taken for; `None` where none has begun.
    pub(crate) fn note(&mut self, slot: u32, lease: Option<LeaseId>) {
        match lease {
            Some(lease) => drop(self.taken.insert(lease, slot)),
            None => self.free.push(slot),
        }
    }

    /// Returns whether the importer states that a lease is idle.
    pub(crate) fn is_idle(&self, lease: LeaseId) -> bool {
        let word = self.taken.get(&lease).and_then(|slot| self.page.as_ref()?.word(*slot));
        word.is_some_and(|word| word.state() == LeaseState::Idle)
    }

    /// Frees the word of a lease that the importer has returned, and does not use any longer.
    pub(crate) fn give_back(&mut self, lease: LeaseId) {
        self.free.extend(self.taken.remove(&lease));
    }
}

#[cfg(test)]
mod tests;
