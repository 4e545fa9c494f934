//! Slots of counter pages: allocation, and the conditions for their reuse.
//!
//! An exporter has one [`Slots`] for each connection, so an importer can only disturb its own slots, and one that never
//! returns any uses up its own quota alone. A further one ([`OwnCounter`](super::OwnCounter)) has the slots that never
//! leave this process.
//!
//! # Conditions for reuse
//!
//! Streams read and write the words of a slot whenever they reach the operation, which may be long after the lease has
//! ended. So these hazards have to be excluded before the next lease gets the slot:
//!
//! * *A write of the exporter is still in flight* (its counter, or the ready word). The exporter compares the words with
//!   the last value that was submitted. The importer may have replaced an arrived value by [`ENDED`](super::ENDED); it reports the value
//!   that it replaced ([`Returned::seen`]).
//! * *A write of the importer is still in flight.* The importer reports the last value that it has submitted
//!   ([`Returned::signalled`]); the exporter compares it with the word, or with the value that it replaced by [`ENDED`](super::ENDED).
//! * *A wait of either side has not been reached by its stream.* Neither side can observe this without one more operation for
//!   each wait. Instead each life of a slot has a base: the words begin at the base, and counters are added to it. The
//!   base of the next life is at least every value that was awaited in this one ([`Returned::awaited`] is the importer's
//!   part), so a wait that a stream reaches late is satisfied at once, in this life or in any later one.
//! * *A host thread is in the middle of an operation.* Operations hold the slot ([`Endpoint::enter`](super::Endpoint)); the slot
//!   is sealed when there is none, and later ones fail.
//! * *A late message about an earlier life.* Messages name the lease, and lease numbers are never reused.
//!
//! The importer returns a slot with the lease ([`Request::Release`](crate::transport)), or with a later release where one of
//! its threads is still submitting. A lease that the import cache keeps idle keeps its slot, in the same life.
//!
//! A slot whose importer has returned it and whose writes have not all arrived is looked at again when a slot is taken or
//! returned. No timer is needed, as nothing else needs the slot.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::Hash;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::process::{Resource, getrlimit};

use super::endpoint::Endpoint;
use super::page::{SLOTS, TIMELINE_END, TimelineSlot, WordPage};
use crate::model::error::{Error, Result};
use crate::os::log::Throttle;
use crate::sharing::Runtime;
use crate::transport::{Allotment, Budget, PeerCredentials, descriptor_limit};
use crate::wire::Returned;

/// Maximum number of pages of one [`Slots`].
const MAX_PAGES: usize = 256;

/// The pages of one connection take at most this part of the process's limit of descriptors, as each keeps its file.
const PART_OF_LIMIT: u64 = 64;

/// The counter pages of all peers, each with a memory file that stays open as long as the page has slots for further leases: an
/// eighth of this process's descriptors.
static PAGES: Budget = Budget::new("counter pages", || (descriptor_limit() / 8).max(4));

/// Maximum number of returned slots that are looked at for each slot that is taken or returned.
const LOOKED_AT: usize = 16;

/// An empty page is dropped when other pages have this many free slots: not at each turn around a page's boundary.
const FREE_ELSEWHERE: usize = 64;

/// The slots of one peer, by a key of their users.
#[derive(Debug)]
pub(crate) struct Slots<K> {
    pages: BTreeMap<u32, Page>,
    /// Page numbers are never reused: an importer may still have the page of a number mapped.
    next_page: u32,
    in_use: HashMap<K, InUse>,
    /// Returned slots whose writes had not all arrived when they were looked at last.
    unsettled: VecDeque<K>,
    /// Whether other processes map the pages, so that their files are kept.
    shared: bool,
    most_pages: usize,
    /// The peer whose budget the pages belong to.
    peer: Option<PeerCredentials>,
}

#[derive(Debug)]
struct Page {
    page: Arc<WordPage>,
    file: Option<Arc<OwnedFd>>,
    /// Present for a page of a peer.
    _allotment: Option<Allotment>,
    /// Slots from this one on have not been used.
    fresh: u32,
    /// Slots that may be used again, with the base of their next life.
    free: Vec<(u32, u64)>,
    in_use: u32,
}

#[derive(Debug)]
struct InUse {
    endpoint: Arc<Endpoint>,
    page: u32,
    returned: Option<Returned>,
}

/// Returns the maximum number of pages of one peer, for a limit of descriptors.
fn pages_within(limit: Option<u64>) -> usize {
    limit.map_or(MAX_PAGES, |limit| ((limit / PART_OF_LIMIT) as usize).clamp(2, MAX_PAGES))
}

impl Page {
    fn free(&self) -> usize {
        self.free.len() + (SLOTS - self.fresh) as usize
    }
}

impl<K: Copy + Eq + Hash> Slots<K> {
    /// `shared`: other processes map the pages.
    pub(crate) fn new(shared: bool) -> Self {
        Self {
            pages: BTreeMap::new(),
            next_page: 0,
            in_use: HashMap::new(),
            unsettled: VecDeque::new(),
            shared,
            most_pages: if shared { pages_within(getrlimit(Resource::Nofile).current) } else { MAX_PAGES },
            peer: None,
        }
    }

    /// Takes a slot and begins a life of it. [`note`](Self::note) names its user.
    ///
    /// # Errors
    ///
    /// [`Error::NotPermitted`] where all slots are in use; the system's, for a new page.
    pub(crate) fn take(&mut self) -> Result<TimelineSlot> {
        self.settle(LOOKED_AT);
        if self.is_exhausted() {
            self.settle(usize::MAX);
        }
        let number = match self.pages.iter().find(|(_, page)| page.free() > 0) {
            Some((number, _)) => *number,
            None => self.add_page()?,
        };
        let page = self.pages.get_mut(&number).expect("it was just found, or added");
        let (slot, base) = page.free.pop().unwrap_or_else(|| {
            page.fresh += 1;
            (page.fresh - 1, 0)
        });
        page.in_use += 1;
        let place = TimelineSlot { page: Arc::clone(&page.page), slot, base };
        place.begin_life();
        Ok(place)
    }

    /// As [`take`](Self::take), from the share of a peer.
    ///
    /// # Errors
    ///
    /// As [`take`](Self::take); [`Error::NotPermitted`] also where the peer's process or user has its share of all pages.
    pub(crate) fn take_for(&mut self, peer: &PeerCredentials) -> Result<TimelineSlot> {
        self.peer = Some(*peer);
        self.take()
    }

    fn is_exhausted(&self) -> bool {
        self.pages.len() >= self.most_pages && self.pages.values().all(|page| page.free() == 0)
    }

    fn add_page(&mut self) -> Result<u32> {
        if self.pages.len() >= self.most_pages {
            let most = self.most_pages * SLOTS as usize;
            return Err(refused(format!("all {most} timelines of a connection are in use")));
        }
        let allotment = self.peer.as_ref().map(|peer| PAGES.take(peer)).transpose().map_err(refused)?;
        let name = if self.shared { "device-ipc-words" } else { "device-ipc-own-words" };
        let (page, file) = WordPage::create_as(name)?;
        let (number, file) = (self.next_page, self.shared.then(|| Arc::new(file)));
        self.next_page += 1;
        self.pages.insert(
            number,
            Page { page, file, _allotment: allotment, fresh: 0, free: Vec::new(), in_use: 0 },
        );
        Ok(number)
    }

    /// Notes which timeline, by its endpoint, has a slot that was [taken](Self::take).
    pub(crate) fn note(&mut self, key: K, endpoint: &Arc<Endpoint>) {
        let number = self.number_of(&endpoint.place.page).filter(|_| !self.in_use.contains_key(&key));
        if let Some(page) = number {
            self.in_use.insert(key, InUse { endpoint: Arc::clone(endpoint), page, returned: None });
        }
    }

    fn number_of(&self, page: &Arc<WordPage>) -> Option<u32> {
        self.pages.iter().find(|(_, known)| Arc::ptr_eq(&known.page, page)).map(|(number, _)| *number)
    }

    /// Returns the page of a slot that is in use: its number, and its file where the page is shared.
    pub(crate) fn page_of(&self, key: K) -> Option<(u32, Arc<OwnedFd>)> {
        let number = self.in_use.get(&key)?.page;
        Some((number, Arc::clone(self.pages.get(&number)?.file.as_ref()?)))
    }

    /// Notes the peer's report on a slot that it has finished with. The timeline has not ended yet, or is about to end.
    pub(crate) fn returned(&mut self, key: K, returned: Returned) {
        if let Some(in_use) = self.in_use.get_mut(&key)
            && in_use.returned.is_none()
        {
            in_use.returned = Some(returned);
            in_use.endpoint.peer_has_finished(&returned);
        }
    }

    /// Frees a slot that was [returned](Self::returned) and whose timeline has ended, at once or later.
    pub(crate) fn give_back(&mut self, key: K) {
        if !self.try_settle(key) {
            self.unsettled.push_back(key);
        }
        self.settle(LOOKED_AT);
    }

    fn settle(&mut self, most: usize) {
        for _ in 0..most.min(self.unsettled.len()) {
            let Some(key) = self.unsettled.pop_front() else { return };
            if !self.try_settle(key) {
                self.unsettled.push_back(key);
            }
        }
    }

    /// Frees the slot if nothing can touch it any longer. False where it has to be looked at again.
    fn try_settle(&mut self, key: K) -> bool {
        let Some(in_use) = self.in_use.get(&key) else { return true };
        let Some(returned) = &in_use.returned else { return true };
        let Some(base) = in_use.endpoint.settle(returned) else { return false };
        let Some(InUse { endpoint, page: number, .. }) = self.in_use.remove(&key) else { return true };
        if let Some(page) = self.pages.get_mut(&number) {
            page.in_use -= 1;
            // A slot whose values have grown that large is not used again.
            if base < TIMELINE_END {
                page.free.push((endpoint.place.slot, base));
            }
            self.drop_page_if_empty(number);
        }
        // The poller may call this: it must not drop the last reference to the caller's backend.
        if Arc::strong_count(&endpoint.backend) == 1
            && let Some(runtime) = Runtime::existing()
        {
            runtime.worker.submit(move || drop(endpoint));
        }
        true
    }

    fn drop_page_if_empty(&mut self, number: u32) {
        let Some(page) = self.pages.get(&number).filter(|page| page.in_use == 0) else { return };
        let all: usize = self.pages.values().map(Page::free).sum();
        if page.free() == 0 || all - page.free() >= FREE_ELSEWHERE {
            self.pages.remove(&number);
        }
    }

    /// Drops all pages of which no slot is in use.
    pub(crate) fn drop_empty_pages(&mut self) {
        self.settle(usize::MAX);
        self.pages.retain(|_, page| page.in_use > 0);
    }

    /// Returns the pages on whose words streams of this process wait.
    pub(crate) fn awaited_pages(&self) -> Vec<Arc<WordPage>> {
        let pages = self.pages.values().map(|page| &page.page);
        pages.filter(|page| page.is_awaited()).cloned().collect()
    }
}

/// Logs that a peer has no further timelines, and returns the error.
fn refused(why: String) -> Error {
    static WARNINGS: Throttle = Throttle::new();
    if let Some(count) = WARNINGS.count() {
        tracing::warn!(target: crate::os::log::TIMELINE,
            why,
            count,
            "a peer gets no further timelines; its hand-overs wait for events"
        );
    }
    Error::QuotaExceeded(format!("{why}; release leases that are no longer needed"))
}

#[cfg(test)]
#[path = "slots_tests.rs"]
mod tests;
