//! The header page: the first page of every shared object.
//!
//! A handle describes the object at the time of the export. The header page describes it now: its generation, whether
//! it was freed or revoked, and the state of an event.

use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::event_state::EventState;
use crate::model::{EngineError, Lifetime, Revocation};
use crate::system::{ProcessId, page_size};

const MAGIC: u64 = u64::from_le_bytes(*b"mockpage");

/// The kind of a shared object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ObjectKind {
    Memory = 1,
    Event = 2,
    /// A block of physical memory without an address.
    Block = 3,
    /// A block of which only the written parts take memory.
    SparseBlock = 4,
}

/// The properties of a shared object that never change.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Identity {
    pub(crate) kind: ObjectKind,
    pub(crate) owner: ProcessId,
    /// Generation of the allocation, or number of the event.
    pub(crate) id: u64,
    /// Bytes of data after the page.
    pub(crate) size: u64,
    /// Physical index of the home device.
    pub(crate) physical: u32,
    pub(crate) lifetime: Lifetime,
}

/// Maximum number of separately revocable exports of one allocation.
pub(crate) const SEPARATE_EXPORTS: usize = 256;

/// The counts of revocations at the time of an export; all zeros for an object that is never revoked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct ExportEpoch {
    /// Revocations of all exports.
    pub(crate) whole: u32,
    /// Number of the separate export, from 1 on; 0 for an export that is revoked with all others.
    pub(crate) separate: u32,
    /// Revocations of the separate export with that number.
    pub(crate) part: u32,
}

/// The layout of the page. Other processes read it while the owner writes, so all fields are atomics.
#[repr(C)]
struct Layout {
    magic: AtomicU64,
    kind: AtomicU32,
    physical: AtomicU32,
    pid: AtomicU32,
    revoking: AtomicU32,
    start: AtomicU64,
    id: AtomicU64,
    size: AtomicU64,
    epoch: AtomicU32,
    freed: AtomicU32,
    separate: [AtomicU32; SEPARATE_EXPORTS],
    event: EventState,
}

const _: () = assert!(size_of::<Layout>() <= 4096);

/// A mapped header page.
#[derive(Debug)]
pub(crate) struct Page {
    layout: NonNull<Layout>,
}

// SAFETY: the mapping belongs to no thread, and all that is reached through it is atomic.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    /// Maps the first page of `file`, which must be at least a page long and sealed against shrinking.
    pub(crate) fn map(file: impl AsFd, writable: bool) -> Result<Self, EngineError> {
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory in use.
        let page = unsafe { mmap(ptr::null_mut(), page_size(), protection, MapFlags::SHARED, file, 0) }
            .map_err(EngineError::system("mmap"))?;
        let layout = NonNull::new(page.cast()).ok_or(EngineError::System { call: "mmap", errno: 0 })?;
        Ok(Self { layout })
    }

    /// Writes the identity. The owner calls this before it exports the object; requires a writable page.
    pub(crate) fn initialise(&self, identity: &Identity) {
        let page = self.layout();
        page.kind.store(identity.kind as u32, Ordering::Relaxed);
        page.physical.store(identity.physical, Ordering::Relaxed);
        page.pid.store(identity.owner.pid, Ordering::Relaxed);
        page.start.store(identity.owner.start, Ordering::Relaxed);
        page.id.store(identity.id, Ordering::Relaxed);
        page.size.store(identity.size, Ordering::Relaxed);
        page.revoking.store(u32::from(identity.lifetime == Lifetime::Revoking), Ordering::Relaxed);
        page.magic.store(MAGIC, Ordering::Release);
    }

    /// Returns the identity; `None` if the page was not written by the engine.
    pub(crate) fn identity(&self) -> Option<Identity> {
        let page = self.layout();
        let magic = page.magic.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        if magic != MAGIC {
            return None;
        }
        let kind = match page.kind.load(Ordering::Relaxed) {
            1 => ObjectKind::Memory,
            2 => ObjectKind::Event,
            3 => ObjectKind::Block,
            4 => ObjectKind::SparseBlock,
            _ => return None,
        };
        let revoking = page.revoking.load(Ordering::Relaxed) != 0;
        Some(Identity {
            kind,
            owner: ProcessId {
                pid: page.pid.load(Ordering::Relaxed),
                start: page.start.load(Ordering::Relaxed),
            },
            id: page.id.load(Ordering::Relaxed),
            size: page.size.load(Ordering::Relaxed),
            physical: page.physical.load(Ordering::Relaxed),
            lifetime: if revoking { Lifetime::Revoking } else { Lifetime::Pinning },
        })
    }

    /// Returns the epoch of an export that is made now, of a separate one if `separate` is not 0.
    pub(crate) fn epoch(&self, separate: u32) -> ExportEpoch {
        let part = self.separate(separate).map_or(0, load);
        ExportEpoch { whole: load(&self.layout().epoch), separate, part }
    }

    fn separate(&self, number: u32) -> Option<&AtomicU32> {
        self.layout().separate.get((number as usize).checked_sub(1)?)
    }

    /// Returns the cause if an export of `epoch` was revoked.
    pub(crate) fn revocation(&self, epoch: ExportEpoch) -> Option<Revocation> {
        if load(&self.layout().freed) != 0 {
            Some(Revocation::Freed)
        } else if self.epoch(epoch.separate) != epoch {
            Some(Revocation::Unexported)
        } else {
            None
        }
    }

    /// Revokes all exports made so far; requires a writable page.
    pub(crate) fn revoke_exports(&self) {
        self.layout().epoch.fetch_add(1, Ordering::AcqRel);
    }

    /// Revokes the separate exports with this number; requires a writable page.
    pub(crate) fn revoke_separate(&self, number: u32) {
        if let Some(part) = self.separate(number) {
            part.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Marks the object as freed by its owner; requires a writable page.
    pub(crate) fn mark_freed(&self) {
        self.layout().freed.store(1, Ordering::Release);
    }

    /// Returns the state of an event. Methods that change the state require a writable page.
    pub(crate) fn event(&self) -> &EventState {
        &self.layout().event
    }

    fn layout(&self) -> &Layout {
        // SAFETY: the page is mapped until `self` is dropped, page-aligned, at least as large as `Layout`
        // (asserted above), never shrinks (sealed), and every bit pattern is a valid `Layout`.
        unsafe { self.layout.as_ref() }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: exactly what `map` mapped, and no reference into it outlives `self`.
        // A failure leaves the page mapped, which is harmless.
        let _ = unsafe { munmap(self.layout.as_ptr().cast(), page_size()) };
    }
}
/// Loads a word of a page that may be mapped read-only, where std guarantees only relaxed loads.
fn load(word: &AtomicU32) -> u32 {
    let value = word.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    value
}
