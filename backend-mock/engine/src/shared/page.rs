//! The first page of every shared object.
//!
//! Why: the 64 bytes of a handle say what the exporter *meant*; this page, which
//! lies in the memory file itself, says what is there now: which generation,
//! whether it was freed or withdrawn, and for an event how far it has come.

use std::os::fd::AsFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::event_state::EventState;
use crate::model::{EngineError, Lifetime, Revocation};
use crate::system::{ProcessId, page_size};

const MAGIC: u64 = u64::from_le_bytes(*b"mockpage");

/// What a shared object is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ObjectKind {
    Memory = 1,
    Event = 2,
    /// Physical memory without an address of its own.
    Block = 3,
    /// The same, of which only the parts that are written take memory.
    SparseBlock = 4,
}

/// What the page says once and for all.
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

/// Exports of one allocation that can be withdrawn each by itself.
pub(crate) const SEPARATE_EXPORTS: usize = 256;

/// Which withdrawals had happened when an export was made; all zero for an object that is never withdrawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct ExportEpoch {
    /// Withdrawals of everything.
    pub(crate) whole: u32,
    /// Number of the separate export, counted from 1; 0 for one that ends with all others.
    pub(crate) separate: u32,
    /// Withdrawals under that number.
    pub(crate) part: u32,
}

/// Other processes read this while the owner writes: nothing but atomics.
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

/// The header page, mapped.
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

    /// Writes the identity. For the owner, before anybody else can know of the object; writable pages only.
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

    /// The identity; `None` if the page is not one of the engine's.
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

    /// The epoch of an export that is made now: separate under a number, or with 0 not.
    pub(crate) fn epoch(&self, separate: u32) -> ExportEpoch {
        let part = self.separate(separate).map_or(0, load);
        ExportEpoch { whole: load(&self.layout().epoch), separate, part }
    }

    fn separate(&self, number: u32) -> Option<&AtomicU32> {
        self.layout().separate.get((number as usize).checked_sub(1)?)
    }

    /// What has ended an export of an epoch, if anything has.
    pub(crate) fn revocation(&self, epoch: ExportEpoch) -> Option<Revocation> {
        if load(&self.layout().freed) != 0 {
            Some(Revocation::Freed)
        } else if self.epoch(epoch.separate) != epoch {
            Some(Revocation::Unexported)
        } else {
            None
        }
    }

    /// Withdraws all exports made so far. Writable pages only.
    pub(crate) fn revoke_exports(&self) {
        self.layout().epoch.fetch_add(1, Ordering::AcqRel);
    }

    /// Withdraws the exports made so far under a number. Writable pages only.
    pub(crate) fn revoke_separate(&self, number: u32) {
        if let Some(part) = self.separate(number) {
            part.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Says that the owner has freed it. Writable pages only.
    pub(crate) fn mark_freed(&self) {
        self.layout().freed.store(1, Ordering::Release);
    }

    /// The state of an event. Its methods that change it need a writable page.
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
        // A failure would leave the page mapped, which harms nobody.
        let _ = unsafe { munmap(self.layout.as_ptr().cast(), page_size()) };
    }
}
/// Loads a word of a page that may be mapped read-only, where std promises relaxed loads alone.
fn load(word: &AtomicU32) -> u32 {
    let value = word.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    value
}
