//! Memory as this process has it mapped, and the only code that reads and writes it.
//!
//! Why one file: every other module speaks of addresses; here they become
//! pointers. A [`Span`] is a checked stretch of addresses that keeps its mappings
//! alive; a [`AccessGuard`] is the permission to touch one of them now, which a revoking
//! exporter waits for.

use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use super::arena::{Arena, Reservation};
use super::lease::{AccessGuard, Lease};
use crate::model::{Access, Address, EngineError};
use crate::shared::{Identity, Page};
use crate::system::{lock, page_size};

/// Where the addresses of a mapping come from, and go back to.
#[derive(Debug)]
pub(crate) enum AddressSource {
    /// Own memory, in the device's arena.
    Arena(Arc<Arena>),
    /// Opened memory, in a reservation of its own or one that it shares with its neighbours.
    Reservation(Arc<Reservation>),
    /// Part of a reservation that outlives the mapping: what is mapped goes, the addresses stay set aside.
    Window(Arc<Reservation>),
    /// Memory of the host that this process has made known, at this address.
    Host(u64),
}

impl AddressSource {
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

/// What each device may do with a mapping whose access is set for each of them, by ordinal.
#[derive(Debug)]
pub(crate) struct DeviceAccess(Mutex<Vec<Option<Access>>>);

impl DeviceAccess {
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
    place: AddressSource,
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
    pub(crate) grants: Option<DeviceAccess>,
    lease: Option<Lease>,
    closed: AtomicBool,
    /// A forked child holds copies of locks that nobody will unlock.
    pid: u32,
}

/// Which part of the data a mapping shows, and to whom.
#[derive(Debug)]
pub(crate) struct MappedPart {
    /// First byte of the data, a whole page.
    pub(crate) start: u64,
    /// Size in bytes.
    pub(crate) size: u64,
    pub(crate) grants: Option<DeviceAccess>,
}

/// What a new mapping is made of, besides its place.
#[derive(Debug)]
pub(crate) struct MappedObject<'a> {
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
        place: AddressSource,
        offset: usize,
        mapped: usize,
        content: MappedObject<'_>,
    ) -> Result<Self, EngineError> {
        let size = content.identity.size;
        Self::of_slice(place, offset, mapped, MappedPart { start: 0, size, grants: None }, content)
    }

    /// As [`new`](Self::new), a part of the data.
    pub(crate) fn of_slice(
        place: AddressSource,
        offset: usize,
        mapped: usize,
        slice: MappedPart,
        content: MappedObject<'_>,
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
        matches!(self.place, AddressSource::Host(_))
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
        let _reading = self.acquire(device, false)?;
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
        let _writing = self.acquire(device, true)?;
        let at = self.pages(address, bytes.len()) as *mut u8;
        // SAFETY: as in `load_bytes`; `hold` has checked the right to write.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
        Ok(())
    }

    fn pages(&self, address: Address, len: usize) -> u64 {
        assert!(self.shows(address) && self.shows(address.add(len as u64 - 1)), "inside of the mapping");
        address.get()
    }

    pub(super) fn acquire(&self, device: usize, write: bool) -> Result<AccessGuard<'_>, EngineError> {
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
        match &self.lease {
            Some(lease) => lease.acquire(&self.page).map_err(|why| EngineError::Revoked { address, why }),
            None => Ok(AccessGuard::unleased()),
        }
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
            AddressSource::Arena(arena) => unsafe { arena.give_back(self.offset, self.mapped) },
            AddressSource::Window(space) => {
                // SAFETY: as above. A failure leaves memory mapped that the next mapping replaces.
                let _ = unsafe { space.clear(self.offset, self.mapped) };
            }
            AddressSource::Reservation(_) | AddressSource::Host(_) => {}
        }
    }
}
