//! Memory as this process has it mapped, and the only code that reads and writes it.
//!
//! Why one file: every other module speaks of addresses; here they become
//! pointers. A [`Span`] is a checked stretch of addresses that keeps its mappings
//! alive; a [`Hold`] is the permission to touch one of them now, which a revoking
//! exporter waits for.

use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::mm::{Advice, madvise};

use crate::arena::{Arena, Reservation};
use crate::machine::lock;
use crate::page::{Edition, Identity, Page, page_size};
use crate::{Access, Address, EngineError, Revocation};

/// Where the addresses of a mapping come from, and go back to.
#[derive(Debug)]
pub(crate) enum Place {
    /// Own memory, in the device's arena.
    Arena(Arc<Arena>),
    /// Opened memory, in a reservation of its own or one that it shares with its neighbours.
    Reservation(Arc<Reservation>),
    /// Part of a reservation that outlives the mapping: what is mapped goes, the addresses stay set aside.
    Window(Arc<Reservation>),
    /// Memory of the host that this process has made known, at this address.
    Host(u64),
}

impl Place {
    /// The reservation in which it lies; the host's memory lies in none.
    fn space(&self) -> Option<&Reservation> {
        match self {
            Self::Arena(arena) => Some(arena.space()),
            Self::Reservation(space) | Self::Window(space) => Some(space),
            Self::Host(_) => None,
        }
    }

    fn start(&self) -> u64 {
        match self {
            Self::Host(address) => *address,
            _ => self.space().map_or(0, |space| space.base() as u64),
        }
    }
}

/// An importer's tie to an exporter that revokes.
#[derive(Debug)]
pub(crate) struct Lease {
    /// A file description of our own: a shared lock on it says "work is touching the memory", and the kernel
    /// drops it when we die.
    file: OwnedFd,
    /// Readable once the exporter has ended.
    exporter: OwnedFd,
    /// The export's edition.
    edition: Edition,
    /// Streams of ours that are touching the memory; the first takes the lock, the last returns it.
    holders: Mutex<usize>,
}

impl Lease {
    /// A lease on the export of an edition, with a file description of its own and the exporter's pidfd.
    pub(crate) fn new(file: OwnedFd, exporter: OwnedFd, edition: Edition) -> Self {
        Self { file, exporter, edition, holders: Mutex::new(0) }
    }

    fn acquire(&self, page: &Page) -> Result<(), Revocation> {
        let mut holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
        if *holders == 0 {
            // The exporter sets its flag before it asks for the lock, so a look after ours was granted sees it.
            // If locking fails there is nothing to lock against.
            let _ = flock(&self.file, FlockOperation::LockShared);
        }
        if let Some(why) = self.ended(page) {
            if *holders == 0 {
                let _ = flock(&self.file, FlockOperation::Unlock);
            }
            return Err(why);
        }
        *holders += 1;
        Ok(())
    }

    fn release(&self) {
        let mut holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
        *holders -= 1;
        if *holders == 0 {
            let _ = flock(&self.file, FlockOperation::Unlock);
        }
    }

    fn ended(&self, page: &Page) -> Option<Revocation> {
        let mut exporter = [PollFd::new(&self.exporter, PollFlags::IN)];
        let gone = poll(&mut exporter, Some(&Timespec::default())).is_ok_and(|ready| ready > 0);
        page.ended(self.edition).or(gone.then_some(Revocation::ExporterExited))
    }
}

/// What each device may do with a mapping whose access is set for each of them, by ordinal.
#[derive(Debug)]
pub(crate) struct Grants(Mutex<Vec<Option<Access>>>);

impl Grants {
    /// The same for all of so many devices.
    pub(crate) fn new(devices: usize, access: Option<Access>) -> Self {
        Self(Mutex::new(vec![access; devices]))
    }

    pub(crate) fn of(&self, device: usize) -> Option<Access> {
        lock(&self.0).get(device).copied().flatten()
    }

    pub(crate) fn set(&self, device: usize, access: Option<Access>) {
        if let Some(grant) = lock(&self.0).get_mut(device) {
            *grant = access;
        }
    }
}

/// One allocation, own or opened, at its addresses in this process.
#[derive(Debug)]
pub(crate) struct Mapping {
    place: Place,
    offset: usize,
    /// As it was asked for, in bytes.
    size: u64,
    /// Whole pages.
    mapped: usize,
    pub(crate) writable: bool,
    pub(crate) imported: bool,
    /// Ordinal of the device in whose address space it is.
    pub(crate) device: usize,
    pub(crate) identity: Identity,
    pub(crate) page: Page,
    /// `None`: every device that reaches the memory may access it.
    pub(crate) grants: Option<Grants>,
    lease: Option<Lease>,
    closed: AtomicBool,
    /// A forked child holds copies of locks that nobody will unlock.
    pid: u32,
}

/// Which part of the data a mapping shows, and to whom.
#[derive(Debug)]
pub(crate) struct Slice {
    /// First byte of the data, a whole page.
    pub(crate) start: u64,
    /// Size in bytes.
    pub(crate) size: u64,
    pub(crate) grants: Option<Grants>,
}

/// What a new mapping is made of, besides its place.
#[derive(Debug)]
pub(crate) struct Content<'a> {
    pub(crate) file: &'a OwnedFd,
    pub(crate) page: Page,
    pub(crate) identity: Identity,
    pub(crate) device: usize,
    pub(crate) writable: bool,
    pub(crate) imported: bool,
}

impl Mapping {
    /// Maps the data of a shared object, whole pages of it, at `offset` in `place`.
    pub(crate) fn new(
        place: Place,
        offset: usize,
        mapped: usize,
        content: Content<'_>,
    ) -> Result<Self, EngineError> {
        let size = content.identity.size;
        Self::of_slice(place, offset, mapped, Slice { start: 0, size, grants: None }, content)
    }

    /// As [`new`](Self::new), a part of the data.
    pub(crate) fn of_slice(
        place: Place,
        offset: usize,
        mapped: usize,
        slice: Slice,
        content: Content<'_>,
    ) -> Result<Self, EngineError> {
        // Made first, so that the addresses go back if they cannot be filled.
        let mapping = Self {
            place,
            offset,
            size: slice.size,
            mapped,
            writable: content.writable,
            imported: content.imported,
            device: content.device,
            identity: content.identity,
            page: content.page,
            grants: slice.grants,
            lease: None,
            closed: AtomicBool::new(false),
            pid: std::process::id(),
        };
        let data = page_size() as u64 + slice.start;
        if let Some(space) = mapping.place.space() {
            space.map(offset, mapped, content.file, data, content.writable)?;
        }
        Ok(mapping)
    }

    /// Ties the mapping to an exporter that revokes.
    pub(crate) fn tied_by(mut self, lease: Option<Lease>) -> Self {
        self.lease = lease;
        self
    }

    /// First address.
    pub(crate) fn base(&self) -> u64 {
        self.place.start() + self.offset as u64
    }

    /// Size in bytes, as asked for at the allocation.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Whether it is memory of the host.
    pub(crate) fn is_host(&self) -> bool {
        matches!(self.place, Place::Host(_))
    }

    /// From now on all work that was queued for it fails. It is unmapped when the last work has let go.
    pub(crate) fn mark_closed(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Whether the byte at `address` lies in its pages, which may run on behind its size.
    pub(crate) fn shows(&self, address: Address) -> bool {
        let shown = self.size.max(self.mapped as u64);
        address.get().checked_sub(self.base()).is_some_and(|offset| offset < shown)
    }

    /// Reads aligned bytes of its pages, as a kernel does: 1, 2, 4 or 8.
    pub(crate) fn load_bytes(
        &self,
        address: Address,
        bytes: &mut [u8],
        device: usize,
    ) -> Result<(), EngineError> {
        let _reading = self.hold(device, false)?;
        let at = self.pages(address, bytes.len()) as *const u8;
        // SAFETY: mapped for as long as `self` lives, and inside of it as `pages` asserts; whoever races with this
        // tears bytes as on a device.
        unsafe { ptr::copy_nonoverlapping(at, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Writes such bytes.
    pub(crate) fn store_bytes(
        &self,
        address: Address,
        bytes: &[u8],
        device: usize,
    ) -> Result<(), EngineError> {
        let _writing = self.hold(device, true)?;
        let at = self.pages(address, bytes.len()) as *mut u8;
        // SAFETY: as in `load_bytes`; `hold` has checked the right to write.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
        Ok(())
    }

    fn pages(&self, address: Address, len: usize) -> u64 {
        assert!(self.shows(address) && self.shows(address.add(len as u64 - 1)), "inside of the mapping");
        address.get()
    }

    fn hold(&self, device: usize, write: bool) -> Result<Hold<'_>, EngineError> {
        let address = Address::new(self.base());
        if self.closed.load(Ordering::Acquire) {
            return Err(EngineError::IllegalAddress { address, device });
        }
        let writable = match &self.grants {
            None => self.writable,
            Some(grants) => match grants.of(device) {
                None => return Err(EngineError::IllegalAddress { address, device }),
                Some(access) => self.writable && access == Access::ReadWrite,
            },
        };
        if write && !writable {
            return Err(EngineError::ReadOnly { address });
        }
        if let Some(lease) = &self.lease {
            lease.acquire(&self.page).map_err(|why| EngineError::Revoked { address, why })?;
        }
        Ok(Hold(self.lease.as_ref()))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if std::process::id() != self.pid {
            return;
        }
        match &self.place {
            // SAFETY: `self` is the only owner of these addresses, and every access goes through a `Span`
            // that keeps its mappings, so none is under way.
            Place::Arena(arena) => unsafe { arena.give_back(self.offset, self.mapped) },
            Place::Window(space) => {
                // SAFETY: as above. A failure leaves memory mapped that the next mapping replaces.
                let _ = unsafe { space.clear(self.offset, self.mapped) };
            }
            Place::Reservation(_) | Place::Host(_) => {}
        }
    }
}

/// The right to touch one mapping until it is dropped.
#[derive(Debug)]
struct Hold<'a>(Option<&'a Lease>);

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        if let Some(lease) = self.0 {
            lease.release();
        }
    }
}

/// Bytes that all lie in known memory: in one mapping, or in several that are neighbours.
#[derive(Debug, Clone)]
pub(crate) struct Span {
    address: Address,
    len: usize,
    pieces: Vec<Arc<Mapping>>,
}

impl Span {
    /// # Safety
    /// The bytes `address .. address + len` lie within `pieces`, which follow each other without a gap.
    pub(crate) unsafe fn new(address: Address, len: usize, pieces: Vec<Arc<Mapping>>) -> Self {
        Self { address, len, pieces }
    }

    /// The mappings in which the bytes lie.
    pub(crate) fn pieces(&self) -> &[Arc<Mapping>] {
        &self.pieces
    }

    /// Takes the right to touch the bytes on behalf of `device`.
    ///
    /// # Errors
    /// `IllegalAddress` if the memory was freed or closed, `Revoked`, `ReadOnly`.
    fn hold(&self, device: usize, write: bool) -> Result<Vec<Hold<'_>>, EngineError> {
        self.pieces.iter().map(|piece| piece.hold(device, write)).collect()
    }

    fn pointer(&self) -> *mut u8 {
        self.address.get() as *mut u8
    }

    /// Copies all bytes of `source`, which is as long as this span. The two may overlap.
    pub(crate) fn copy_from(&self, source: &Span, device: usize) -> Result<(), EngineError> {
        assert_eq!(self.len, source.len, "spans of one copy have one length");
        let _reading = source.hold(device, false)?;
        let _writing = self.hold(device, true)?;
        // SAFETY: both spans lie in memory that is mapped (held by their pieces), with the right to write
        // where it is written (checked by `hold`), and that cannot shrink (sealed). No references into it
        // exist; other processes and streams may race, which tears bytes as it would on a device.
        unsafe { ptr::copy(source.pointer(), self.pointer(), self.len) };
        Ok(())
    }

    /// Sets every byte.
    pub(crate) fn fill(&self, byte: u8, device: usize) -> Result<(), EngineError> {
        let _writing = self.hold(device, true)?;
        let emptied = if byte == 0 { self.empty_pages() } else { 0..0 };
        for part in [0..emptied.start, emptied.end..self.len] {
            // SAFETY: as in `copy_from`; the parts are within the span.
            unsafe { ptr::write_bytes(self.pointer().add(part.start), byte, part.len()) };
        }
        Ok(())
    }

    /// Makes the whole pages of many bytes zero by giving their memory back, and says which bytes that were. A
    /// program that clears gigabytes that it then hardly uses needs none of them.
    fn empty_pages(&self) -> std::ops::Range<usize> {
        const WORTH_IT: usize = 1 << 20;
        let (start, page) = (self.address.get() as usize, page_size());
        let (first, end) = (start.next_multiple_of(page), (start + self.len) / page * page);
        if self.len < WORTH_IT || self.pieces.iter().any(|piece| piece.is_host()) {
            return 0..0;
        }
        // SAFETY: whole pages of memory files, mapped and writable (`hold`), which read as zero afterwards.
        let emptied = unsafe { madvise(first as *mut _, end - first, Advice::LinuxRemove) };
        if emptied.is_ok() { first - start..end - start } else { 0..0 }
    }

    /// Writes `bytes`, which are as long as this span.
    pub(crate) fn write(&self, bytes: &[u8], device: usize) -> Result<(), EngineError> {
        assert_eq!(self.len, bytes.len(), "the bytes fill the span");
        let _writing = self.hold(device, true)?;
        // SAFETY: as in `copy_from`; `bytes` is host memory that the caller borrows, and cannot overlap.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.pointer(), self.len) };
        Ok(())
    }

    /// Reads every byte.
    pub(crate) fn read(&self, device: usize) -> Result<Vec<u8>, EngineError> {
        let _reading = self.hold(device, false)?;
        let mut bytes = vec![0; self.len];
        // SAFETY: as in `copy_from`; `bytes` is new and as long as the span.
        unsafe { ptr::copy_nonoverlapping(self.pointer(), bytes.as_mut_ptr(), self.len) };
        Ok(bytes)
    }

    /// Adds to every byte, wrapping around.
    pub(crate) fn add_u8(&self, value: u8, device: usize) -> Result<(), EngineError> {
        let _writing = self.hold(device, true)?;
        for index in 0..self.len {
            // SAFETY: as in `copy_from`; `index` is below the length.
            unsafe {
                let at = self.pointer().add(index);
                at.write_volatile(at.read_volatile().wrapping_add(value));
            }
        }
        Ok(())
    }

    /// Adds to every 32-bit float. The address is a multiple of 4.
    pub(crate) fn add_f32(&self, value: f32, device: usize) -> Result<(), EngineError> {
        let _writing = self.hold(device, true)?;
        let floats = self.pointer().cast::<f32>();
        assert!(floats.is_aligned(), "the caller checks the alignment");
        for index in 0..self.len / size_of::<f32>() {
            // SAFETY: as in `copy_from`; aligned as asserted, and `index` is below the count.
            unsafe {
                let at = floats.add(index);
                at.write_volatile(at.read_volatile() + value);
            }
        }
        Ok(())
    }

    /// Loads the 64-bit word that the span is. The address is a multiple of 8.
    pub(crate) fn load(&self, device: usize) -> Result<u64, EngineError> {
        let _reading = self.hold(device, false)?;
        Ok(self.word().load(Ordering::Acquire))
    }

    /// Stores the 64-bit word that the span is; all that the stream wrote before is seen by who sees it.
    pub(crate) fn store(&self, value: u64, device: usize) -> Result<(), EngineError> {
        let _writing = self.hold(device, true)?;
        self.word().store(value, Ordering::Release);
        Ok(())
    }

    /// Stores the 64-bit word that the span is if it still is `old`; whether it was.
    pub(crate) fn exchange(&self, old: u64, new: u64, device: usize) -> Result<bool, EngineError> {
        let _writing = self.hold(device, true)?;
        Ok(self.word().compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok())
    }

    /// Loads are allowed on memory without the right to write, since a word is no larger than a register.
    fn word(&self) -> &AtomicU64 {
        let word = self.pointer().cast::<u64>();
        assert!(word.is_aligned() && self.len == size_of::<u64>(), "the caller checks size and alignment");
        // SAFETY: mapped for as long as the span lives, aligned and large enough as asserted; other processes
        // access the word atomically, or tear it as they would on a device.
        unsafe { AtomicU64::from_ptr(word) }
    }
}
