//! Claims: importers read items of an exporter in turns, such as the KV blocks of requests, and state so in shared memory.
//!
//! The exporter offers items, each under a number that it uses once, its *ticket*. An importer claims a ticket before it reads the
//! item, and releases it afterwards. The exporter takes an item back after an importer has released it and no other one claims it,
//! or while no importer claims it. Each of these is one compare-exchange of a word in a table that all of them map, so no side sends
//! a message, waits for an answer, or wakes the other.
//!
//! ```text
//!            claim                release
//! offered ----------> claimed ---------------> released
//!     |   <----------    |   <---------------     |
//!     |    (no other     |         claim          |
//!     |     importer)    |                        |
//!     +-- take back      +-- withdraw             +-- take back --> ended: the entry is free for another ticket
//! ```
//!
//! The exporter ends the claims of an importer that has terminated. The table is handed over with a lease, whose connection ends
//! then, or with a channel, whose caller detects it. An importer that writes entries of others can make the exporter keep their items or take them back too early, as it
//! could by their tickets; importers run as the exporter's user, or as users that it allows.

#![allow(unsafe_code, reason = "words in shared memory")]

use std::collections::HashMap;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::host_pages::{GRANULE, HostPages};
use crate::model::error::{Error, Result};

/// Bytes of a table.
const BYTES: usize = 16 * GRANULE;
/// Bytes of an entry: the ticket, which the exporter writes, and the claims.
const ENTRY_BYTES: usize = 2 * size_of::<u64>();
/// Number of entries for tickets. The first entry of a table counts the releases.
const ENTRIES: u64 = (BYTES / ENTRY_BYTES) as u64 - 1;
/// Number of adjacent entries of which a ticket has one.
const CANDIDATES: u64 = 32;

/// Maximum number of importers of a table.
const IMPORTERS: u32 = 46;
/// The importers that claim the ticket.
const CLAIMED: u64 = (1 << IMPORTERS) - 1;
/// An importer has released the ticket.
const RELEASED: u64 = 1 << IMPORTERS;
/// The exporter has taken the item back.
const ENDED: u64 = 1 << (IMPORTERS + 1);
/// One in the number of tickets that the entry has had. A change that began with another ticket fails by it.
const GENERATION: u64 = 1 << (IMPORTERS + 2);

/// Maximum number of attempts at a change that another process gets in the way of.
const ATTEMPTS: u32 = 64;

/// The table, mapped here.
struct SharedTable(HostPages);

/// The words of a ticket.
struct TicketEntry<'a> {
    /// 0 if it is free.
    ticket: &'a AtomicU64,
    claims: &'a AtomicU64,
}

impl SharedTable {
    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < BYTES / size_of::<u64>(), "inside the table");
        // SAFETY: inside the mapping, which lives as long as `self`; aligned; all processes use words atomically.
        unsafe { AtomicU64::from_ptr(self.0.base().cast::<u64>().add(index).as_ptr()) }
    }

    /// Returns the number of releases by importers.
    fn releases(&self) -> &AtomicU64 {
        self.word(0)
    }

    fn entry(&self, position: u64) -> TicketEntry<'_> {
        let first = 2 * (1 + position as usize);
        TicketEntry { ticket: self.word(first), claims: self.word(first + 1) }
    }

    /// Returns the entry of a ticket.
    fn find(&self, ticket: u64) -> Option<TicketEntry<'_>> {
        let mut entries = candidates(ticket).map(|position| self.entry(position));
        entries.find(|entry| ticket != 0 && entry.ticket.load(Ordering::Acquire) == ticket)
    }
}

/// Returns the positions at which a ticket may be.
fn candidates(ticket: u64) -> impl Iterator<Item = u64> {
    (0..CANDIDATES).map(move |next| (ticket % ENTRIES + next) % ENTRIES)
}

impl TicketEntry<'_> {
    /// Changes the claims of a ticket. Returns `false` if it has ended, or `change` returns `None`.
    fn change(&self, ticket: u64, change: impl Fn(u64) -> Option<u64>) -> bool {
        for _ in 0..ATTEMPTS {
            // Before the ticket: the entry of another ticket has another generation then.
            let claims = self.claims.load(Ordering::Acquire);
            if claims & ENDED != 0 || self.ticket.load(Ordering::Acquire) != ticket {
                return false;
            }
            let Some(new) = change(claims) else { return false };
            if self.claims.compare_exchange(claims, new, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                return true;
            }
        }
        false
    }

    /// Ends a ticket whose claims permit it, and frees the entry.
    fn end(&self, ticket: u64, permits: impl Fn(u64) -> bool) -> bool {
        let ended = self.change(ticket, |claims| permits(claims).then_some(claims | ENDED));
        if ended {
            self.ticket.store(0, Ordering::Release);
        }
        ended
    }
}

/// The exporter's side of a table of claims: the items that it offers.
pub struct ClaimTable {
    table: SharedTable,
    offers: Mutex<Offers>,
    /// The number of releases that [`released`](Self::released) has seen.
    seen: AtomicU64,
    /// Whether there are importers without a number of their own.
    is_crowded: AtomicBool,
}

/// What the exporter itself knows; importers can write the table.
#[derive(Default)]
struct Offers {
    positions: HashMap<u64, u64>,
    /// Whether the entry of a position is in use.
    used: Vec<bool>,
    importers: u64,
}

impl ClaimTable {
    /// Creates a table without offers.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] without memory or file descriptors.
    pub fn new() -> Result<Self> {
        let table = SharedTable(HostPages::create("device-ipc-claims", BYTES)?);
        let offers = Offers { used: vec![false; ENTRIES as usize], ..Offers::default() };
        Ok(Self {
            table,
            offers: Mutex::new(offers),
            seen: AtomicU64::new(0),
            is_crowded: AtomicBool::new(false),
        })
    }

    /// Returns a number for a further importer.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] for more than 46 importers at a time.
    pub(crate) fn number(&self) -> Result<u32> {
        let mut offers = self.offers();
        let importer = (!offers.importers).trailing_zeros();
        if importer >= IMPORTERS {
            return Err(Error::Unsupported {
                backend: "this process",
                what: "admit another importer to the table of claims".into(),
                why: format!("it has {IMPORTERS}"),
            });
        }
        offers.importers |= 1 << importer;
        Ok(importer)
    }

    /// As [`number`](Self::number), for an importer with a lease, by which the exporter knows of it also without a number of its own.
    pub(crate) fn number_or_crowd(&self) -> u32 {
        self.number().unwrap_or_else(|_| {
            self.is_crowded.store(true, Ordering::Release);
            IMPORTERS
        })
    }

    /// Returns whether importers have received the table whose claims it does not show: there were more than 46 at a time. Their
    /// leases show that they may use an item.
    pub fn is_crowded(&self) -> bool {
        self.is_crowded.load(Ordering::Acquire)
    }

    /// Returns the file of the table, for importers.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.table.0.file()
    }

    /// Releases the claims of an importer that has terminated or closed its channel. Returns their number.
    pub fn dismiss(&self, importer: u32) -> usize {
        let mut offers = self.offers();
        let bit = claim_of(importer);
        let release = |(&ticket, &position): (&u64, &u64)| {
            let claimed = |claims: u64| claims & bit != 0;
            self.table
                .entry(position)
                .change(ticket, |claims| claimed(claims).then_some(released(claims, bit)))
        };
        let count = offers.positions.iter().filter(|&offer| release(offer)).count();
        offers.importers &= !bit;
        self.table.releases().fetch_add(1, Ordering::Release);
        count
    }

    /// Offers an item under a ticket, which is not 0 and has not been used before.
    ///
    /// Returns `false` if the table has no room for it; no importer can claim it then.
    pub fn offer(&self, ticket: u64) -> bool {
        let mut offers = self.offers();
        if ticket == 0 || offers.positions.contains_key(&ticket) {
            return false;
        }
        let free = candidates(ticket).find(|position| !offers.used[*position as usize]);
        let Some(position) = free else { return false };
        let entry = self.table.entry(position);
        let before = entry.claims.load(Ordering::Relaxed) & !(GENERATION - 1);
        entry.claims.store(before.wrapping_add(GENERATION), Ordering::Release);
        entry.ticket.store(ticket, Ordering::Release);
        offers.used[position as usize] = true;
        offers.positions.insert(ticket, position);
        true
    }

    /// Takes an item back unless an importer claims it. Returns whether no importer can claim it any more.
    pub fn take_back(&self, ticket: u64) -> bool {
        self.end(ticket, |claims| claims & CLAIMED == 0)
    }

    /// Returns whether an importer claims a ticket.
    pub fn is_claimed(&self, ticket: u64) -> bool {
        self.claims(ticket).is_some_and(|claims| claims & CLAIMED != 0)
    }

    /// Returns whether no importer has released a ticket.
    pub fn is_unused(&self, ticket: u64) -> bool {
        self.claims(ticket).is_some_and(|claims| claims & RELEASED == 0)
    }

    fn claims(&self, ticket: u64) -> Option<u64> {
        let offers = self.offers();
        let entry = offers.positions.get(&ticket).map(|position| self.table.entry(*position));
        entry.map(|entry| entry.claims.load(Ordering::Acquire))
    }

    /// Withdraws an offer, also if an importer claims it.
    pub fn withdraw(&self, ticket: u64) {
        self.end(ticket, |_| true);
    }

    /// Returns whether an importer has released a ticket since the last call of [`released`](Self::released).
    pub fn has_released(&self) -> bool {
        self.table.releases().load(Ordering::Acquire) != self.seen.load(Ordering::Relaxed)
    }

    /// Takes back the items that an importer has released and no other one claims. Returns their tickets, each once.
    pub fn released(&self) -> Vec<u64> {
        if !self.has_released() {
            return Vec::new();
        }
        let mut offers = self.offers();
        // Before the entries: a later release is seen by the next call.
        self.seen.store(self.table.releases().load(Ordering::Acquire), Ordering::Relaxed);
        let is_released = |claims: u64| claims & (CLAIMED | RELEASED) == RELEASED;
        let Offers { positions, used, .. } = &mut *offers;
        let ended = positions.extract_if(|ticket, position| {
            let ended = self.table.entry(*position).end(*ticket, is_released);
            used[*position as usize] &= !ended;
            ended
        });
        ended.map(|(ticket, _)| ticket).collect()
    }

    fn end(&self, ticket: u64, permits: impl Fn(u64) -> bool) -> bool {
        let mut offers = self.offers();
        let Some(&position) = offers.positions.get(&ticket) else { return true };
        let ended = self.table.entry(position).end(ticket, permits);
        if ended {
            offers.positions.remove(&ticket);
            offers.used[position as usize] = false;
        }
        ended
    }

    fn offers(&self) -> MutexGuard<'_, Offers> {
        self.offers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for ClaimTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClaimTable").field("offers", &self.offers().positions.len()).finish_non_exhaustive()
    }
}

/// An importer's side of a table of claims.
pub struct Claims {
    table: SharedTable,
    claim: u64,
}

impl Claims {
    /// Maps a table, as the importer of this number.
    pub(crate) fn open(file: OwnedFd, importer: u32) -> Result<Self> {
        let (pages, _) = HostPages::open(file, BYTES, "its table of claims")?.into_file();
        Ok(Self { table: SharedTable(pages), claim: claim_of(importer) })
    }

    /// Claims a ticket: the exporter keeps its item until [`release`](Self::release). Returns `false` if the exporter does not
    /// offer it.
    pub fn claim(&self, ticket: u64) -> bool {
        self.table.find(ticket).is_some_and(|entry| entry.change(ticket, |claims| Some(claims | self.claim)))
    }

    /// Releases a ticket: this importer does not read its item any more, or will not read it.
    pub fn release(&self, ticket: u64) {
        let Some(entry) = self.table.find(ticket) else { return };
        if entry.change(ticket, |claims| Some(released(claims, self.claim))) {
            self.table.releases().fetch_add(1, Ordering::Release);
        }
    }
}

impl fmt::Debug for Claims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claims").field("claim", &self.claim).finish_non_exhaustive()
    }
}

/// Returns the bit of an importer; none for a number that is out of range.
const fn claim_of(importer: u32) -> u64 {
    if importer < IMPORTERS { 1 << importer } else { 0 }
}

/// Returns the claims after a release of one of them.
const fn released(claims: u64, claim: u64) -> u64 {
    (claims & !claim) | RELEASED
}

#[cfg(test)]
mod tests;
