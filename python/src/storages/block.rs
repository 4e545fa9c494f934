//! Blocks of the allocator that this process has shared as one export each, and the tickets of the storages in them.
//!
//! A storage in a block has a ticket, which its handle names. A receiver claims it as long as it has the storage. Each payload has a
//! ticket too, which no receiver claims: the one that opens the payload claims the storage, and then marks the payload's ticket as
//! released. So one of both tickets keeps the storage at any time. The words of a ticket are those of the core's `sharing/claims.rs`.
//!
//! ```text
//!                                 take_back: each payload was opened or is
//!          share                  past its time limit, no receiver claims it
//!  storage -----> ticket offered -------------------------------------------> ticket ended, entry dropped
//!                            |                                                  ^
//!                            +-- withdraw: its memory was replaced -------------+
//! ```
//!
//! A block stays allocated as long as a storage lies in it, so any storage that was shared keeps it. Importers may have the block open
//! without a storage in it: their device work has not finished, or their import cache keeps the lease. So the last storage becomes the
//! owner of the export when it is dropped, and is freed after the leases.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use device_ipc::front_end::ClaimTable;
use device_ipc::{DeviceOrdinal, DeviceRange, Error, Export, Ipc, LeaseState, OwnedRegion, Region, Result};
use pyo3::prelude::*;

use super::sweep::Sweep;

/// Number of attempts to find room in the table of claims.
const ATTEMPTS: u32 = 64;

/// Number of payloads of a storage from which on those that were opened are looked for.
const MANY_PAYLOADS: usize = 16;

/// The tickets of storages and of payloads.
pub(super) struct Tickets {
    pub(super) table: Arc<ClaimTable>,
    /// The number of the table.
    pub(super) number: u64,
    last: AtomicU64,
}

impl Tickets {
    pub(super) fn new() -> Result<Self> {
        // Another one in each process.
        let number = RandomState::new().hash_one(std::process::id());
        Ok(Self { table: Arc::new(ClaimTable::new()?), number, last: AtomicU64::new(0) })
    }

    /// Returns a new ticket; `None` without room for one.
    pub(super) fn offer(&self) -> Option<u64> {
        let mut tickets = (0..ATTEMPTS).map(|_| self.last.fetch_add(1, Ordering::Relaxed) + 1);
        tickets.find(|ticket| self.table.offer(*ticket))
    }
}

/// The owner of the export of a block: its last storage, from the drop of the export on.
struct LastStorage {
    storage: Mutex<Option<Py<PyAny>>>,
    /// Called when the storage has been given up.
    ended: Box<dyn Fn() + Send + Sync>,
}

impl Drop for LastStorage {
    fn drop(&mut self) {
        // The thread that drops this does not take the interpreter lock for each block, which a sender that goes on would wait for: PyO3
        // releases the reference when it is called next, at the latest by the thread that looks.
        if self.storage.get_mut().unwrap_or_else(PoisonError::into_inner).take().is_some() {
            (self.ended)();
        }
    }
}

/// A block that is shared.
pub(super) struct Block {
    export: Export,
    last: Arc<LastStorage>,
    range: DeviceRange,
    pub(super) descriptor: Vec<u8>,
    /// Importers do not keep it any longer than they use it.
    is_recalled: AtomicBool,
}

impl Block {
    /// Shares the block that a range lies in. `None` for a range in several allocations, or one that the backend does not tell.
    fn share(
        ipc: &Ipc,
        range: DeviceRange,
        tickets: &Tickets,
        ended: impl Fn() + Send + Sync + 'static,
    ) -> Option<Self> {
        let extents = ipc.backend().extents_of(range, None).ok()?;
        let [extent] = &*extents else { return None };
        let allocation = extent.allocation;
        let region = Region::new(ipc.backend().info().name, allocation).with_allocation(allocation);
        let last = Arc::new(LastStorage { storage: Mutex::default(), ended: Box::new(ended) });
        // SAFETY: the storages in the block keep it allocated. The last of them is dropped with this owner, by `InBlock::end`.
        let owned = unsafe { OwnedRegion::new(Arc::clone(&last), region) };
        let export = ipc.share(owned).lease_ahead().claims(&tickets.table).start().ok()?;
        Some(Self {
            range: allocation,
            descriptor: export.descriptor().to_bytes(),
            export,
            last,
            is_recalled: AtomicBool::new(false),
        })
    }

    fn contains(&self, range: DeviceRange) -> bool {
        self.range.end().zip(range.end()).is_some_and(|(end, other)| {
            self.range.device == range.device && self.range.ptr <= range.ptr && other <= end
        })
    }

    /// Recalls the block: importers keep it no longer than they use it, and storages that are shared from now on share it again.
    pub(super) fn recall(&self) {
        self.is_recalled.store(true, Ordering::Release);
        self.export.recall();
    }

    /// Returns whether importers may use storages in the block, as their leases show.
    fn usage(&self) -> Usage {
        let holders = self.export.holders();
        let draining = holders.count(LeaseState::Draining);
        if holders.iter().len() > draining + holders.count(LeaseState::Idle) {
            Usage::Used
        } else if draining > 0 {
            Usage::Draining
        } else {
            Usage::Unused
        }
    }
}

/// Whether other processes use a storage.
pub(super) enum Usage {
    Used,
    /// Their device work may not have finished. They report that it has once the block is recalled.
    Draining,
    Unused,
}

/// The backend and the device of a block, and its address.
type Place = (&'static str, DeviceOrdinal, u64);

/// The blocks that are shared, kept by the storages in them. Two threads that share the first ones at a time may share a block twice.
#[derive(Default)]
pub(super) struct Blocks(Mutex<Known>);

#[derive(Default)]
struct Known {
    blocks: BTreeMap<Place, Weak<Block>>,
    sweep: Sweep,
}

impl Blocks {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the place of a storage in its block, which is shared if it is not yet. `None` where it cannot be shared so. `ended` makes
    /// what is called when the block has ended.
    pub(super) fn place<F: Fn() + Send + Sync + 'static>(
        &self,
        ipc: &Ipc,
        range: DeviceRange,
        tickets: &Tickets,
        ended: impl FnOnce() -> F,
    ) -> Option<InBlock> {
        let backend = ipc.backend().info().name;
        let found = {
            let known = self.lock();
            let below = known.blocks.range(..=(backend, range.device, range.ptr.get())).next_back();
            below.and_then(|(_, block)| block.upgrade())
        };
        let usable = |block: &Arc<Block>| block.contains(range) && !block.is_recalled.load(Ordering::Acquire);
        let block = match found.filter(usable) {
            Some(block) => block,
            None => {
                let block = Arc::new(Block::share(ipc, range, tickets, ended())?);
                let mut known = self.lock();
                if known.sweep.is_due(known.blocks.len()) {
                    known.blocks.retain(|_, block| block.strong_count() > 0);
                    let left = known.blocks.len();
                    known.sweep.swept(left);
                }
                known.blocks.insert((backend, range.device, block.range.ptr.get()), Arc::downgrade(&block));
                block
            }
        };
        let ticket = tickets.offer()?;
        Some(InBlock {
            offset: range.ptr.get() - block.range.ptr.get(),
            block: Some(block),
            ticket,
            payloads: Mutex::default(),
        })
    }
}

/// A storage in a block that is shared.
pub(super) struct InBlock {
    /// Taken at the end.
    block: Option<Arc<Block>>,
    pub(super) offset: u64,
    pub(super) ticket: u64,
    /// The tickets of payloads that may not have been opened, and their time limits.
    payloads: Mutex<Vec<(u64, Instant)>>,
}

impl InBlock {
    pub(super) fn block(&self) -> &Block {
        self.block.as_ref().expect("taken at the end")
    }

    fn payloads(&self) -> MutexGuard<'_, Vec<(u64, Instant)>> {
        self.payloads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a ticket for a payload, which keeps the storage until it is opened or `lifetime` is over.
    pub(super) fn grant(&self, tickets: &Tickets, lifetime: Duration) -> Result<u64> {
        let mut payloads = self.payloads();
        // A storage in use here is not taken back, which removes them otherwise. Not at each payload, which takes quadratic time.
        if payloads.len() >= MANY_PAYLOADS && payloads.len().is_power_of_two() {
            remove_opened(&mut payloads, tickets);
        }
        let full = || {
            Error::QuotaExceeded("more than 60,000 storages and payloads that no process has opened; choose a shorter payload_lifetime".into())
        };
        let ticket = tickets.offer().ok_or_else(full)?;
        let now = Instant::now();
        // An end that the clock cannot represent is one that never comes.
        let end = now.checked_add(lifetime).unwrap_or(now + Duration::from_secs(100 * 365 * 24 * 3600));
        payloads.push((ticket, end));
        Ok(ticket)
    }

    /// Takes the storage's ticket back if no other process uses the storage or may open a payload of it. Returns whether one does.
    pub(super) fn take_back(&self, tickets: &Tickets) -> Usage {
        let mut payloads = self.payloads();
        remove_opened(&mut payloads, tickets);
        if !payloads.is_empty() || self.block().export.is_granted() {
            return Usage::Used;
        }
        // An importer whose claims the table does not show. After the payloads: it has its lease before it opens one.
        if tickets.table.is_crowded() {
            let usage = self.block().usage();
            if !matches!(usage, Usage::Unused) {
                return usage;
            }
        }
        if tickets.table.take_back(self.ticket) { Usage::Unused } else { Usage::Used }
    }

    /// Withdraws the storage, also if another process uses it.
    pub(super) fn withdraw(&self, tickets: &Tickets) {
        tickets.table.withdraw(self.ticket);
        for (ticket, _) in self.payloads().drain(..) {
            tickets.table.withdraw(ticket);
        }
    }

    /// Ends the export of the block if this is its last storage, which is dropped after that.
    pub(super) fn end(&mut self, storage: Py<PyAny>) {
        let Some(block) = self.block.take() else { return };
        // Of storages that are dropped at the same time, exactly one is the last.
        if let Some(block) = Arc::into_inner(block) {
            *block.last.storage.lock().unwrap_or_else(PoisonError::into_inner) = Some(storage);
        }
    }
}

/// Removes the payloads that were opened, and those whose time limit has passed.
fn remove_opened(payloads: &mut Vec<(u64, Instant)>, tickets: &Tickets) {
    if payloads.is_empty() {
        return;
    }
    let now = Instant::now();
    payloads.retain(|&(ticket, end)| {
        let is_open = tickets.table.is_unused(ticket) && now < end;
        if !is_open {
            tickets.table.withdraw(ticket);
        }
        is_open
    });
}
