//! Mappings of device memory in this process.
//!
//! Only a [`Mapping`] and a [`Span`](super::Span), a checked range of bytes that keeps its mappings alive, turn
//! addresses into pointers. An [`AccessGuard`] is the right to access a mapping now; a revoking exporter waits for
//! its drop.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::arena::{Arena, Reservation};
use super::lease::{AccessGuard, Lease};
use crate::model::{Access, Address, EngineError};
use crate::shared::{Identity, Page};
use crate::system::{lock, page_size};

/// The owner of the addresses of a mapping.
#[derive(Debug)]
pub(crate) enum AddressSource {
    /// The arena of the device, for an allocation of this process.
    Arena(Arc<Arena>),
    /// A reservation for opened memory, of one mapping or of several adjacent ones.
    Reservation(Arc<Reservation>),
    /// A reservation that outlives the mapping: the memory is unmapped and the addresses stay reserved.
    Window {
        space: Arc<Reservation>,
        /// Has a reference until the memory has been unmapped: it is dropped after that. The count of an `Arc` of the mapping is 0
        /// before.
        until_unmapped: Arc<()>,
    },
    /// Registered host memory at this address.
    Host(u64),
}

impl AddressSource {
    /// Returns the reservation; host memory has none.
    fn space(&self) -> Option<&Reservation> {
        match self {
            Self::Arena(arena) => Some(arena.space()),
            Self::Reservation(space) | Self::Window { space, .. } => Some(space),
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

/// The access of each device to a mapping, by ordinal.
#[derive(Debug)]
pub(crate) struct DeviceAccess(Mutex<Vec<Option<Access>>>);

impl DeviceAccess {
    /// Creates the same access for `devices` devices.
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

/// One allocation, own or opened, mapped in this process.
#[derive(Debug)]
pub(crate) struct Mapping {
    place: AddressSource,
    offset: usize,
    /// Requested size in bytes.
    size: u64,
    /// Size in bytes, rounded up to whole pages.
    mapped: usize,
    pub(crate) writable: bool,
    pub(crate) imported: bool,
    /// Ordinal of the device in whose address space the memory is mapped.
    pub(crate) device: usize,
    pub(crate) identity: Identity,
    pub(crate) page: Page,
    /// `None`: every device with peer access may access the memory.
    pub(crate) grants: Option<DeviceAccess>,
    lease: Option<Lease>,
    closed: AtomicBool,
    /// The process that created the mapping. A forked child does not unmap: its copies of locks are never unlocked.
    pid: u32,
}

/// The part of an object that a mapping maps, and the access to it.
#[derive(Debug)]
pub(crate) struct MappedPart {
    /// First byte of the data, a multiple of the page size.
    pub(crate) start: u64,
    /// Size in bytes.
    pub(crate) size: u64,
    pub(crate) grants: Option<DeviceAccess>,
}

/// The object that a new mapping maps.
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
    /// Maps the data of a shared object, `mapped` bytes in whole pages, at `offset` in `source`.
    pub(crate) fn new(
        place: AddressSource,
        offset: usize,
        mapped: usize,
        content: MappedObject<'_>,
    ) -> Result<Self, EngineError> {
        let size = content.identity.size;
        Self::of_slice(place, offset, mapped, MappedPart { start: 0, size, grants: None }, content)
    }

    /// Maps a part of the data of a shared object.
    pub(crate) fn of_slice(
        place: AddressSource,
        offset: usize,
        mapped: usize,
        slice: MappedPart,
        content: MappedObject<'_>,
    ) -> Result<Self, EngineError> {
        // Created first, so that its drop returns the addresses if mapping fails.
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

    /// Adds the lease on memory whose exporter can revoke it.
    pub(crate) fn with_lease(mut self, lease: Option<Lease>) -> Self {
        self.lease = lease;
        self
    }

    /// Returns the first address.
    pub(crate) fn base(&self) -> u64 {
        self.place.start() + self.offset as u64
    }

    /// Returns the addresses of the requested size.
    pub(super) fn addresses(&self) -> Range<u64> {
        self.base()..self.base() + self.size
    }

    /// Returns what is dropped when memory at addresses that stay reserved has been unmapped.
    pub(super) fn until_unmapped(&self) -> Weak<()> {
        match &self.place {
            AddressSource::Window { until_unmapped, .. } => Arc::downgrade(until_unmapped),
            _ => Weak::new(),
        }
    }

    /// Returns the size in bytes, as requested at the allocation.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Returns whether it is registered host memory.
    pub(crate) fn is_host(&self) -> bool {
        matches!(self.place, AddressSource::Host(_))
    }

    /// Marks the mapping as closed: queued work that uses it fails. It is unmapped when the last work is dropped.
    pub(crate) fn mark_closed(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Returns whether `address` lies in the pages of the mapping, which may extend beyond its size.
    pub(crate) fn contains_page_of(&self, address: Address) -> bool {
        let mapped = self.size.max(self.mapped as u64);
        address.get().checked_sub(self.base()).is_some_and(|offset| offset < mapped)
    }

    /// Reads 1, 2, 4 or 8 aligned bytes of the pages, as a kernel does.
    pub(crate) fn load_bytes(
        &self,
        address: Address,
        bytes: &mut [u8],
        device: usize,
    ) -> Result<(), EngineError> {
        let _guard = self.acquire(device, false)?;
        let at = self.pages(address, bytes.len()) as *const u8;
        // SAFETY: mapped while `self` lives, and within it as `pages` asserts; concurrent accesses tear bytes as on a
        // device.
        unsafe { ptr::copy_nonoverlapping(at, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Writes 1, 2, 4 or 8 aligned bytes of the pages, as a kernel does.
    pub(crate) fn store_bytes(
        &self,
        address: Address,
        bytes: &[u8],
        device: usize,
    ) -> Result<(), EngineError> {
        let _guard = self.acquire(device, true)?;
        let at = self.pages(address, bytes.len()) as *mut u8;
        // SAFETY: as in `load_bytes`; `acquire` has checked the right to write.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
        Ok(())
    }

    fn pages(&self, address: Address, len: usize) -> u64 {
        assert!(
            self.contains_page_of(address) && self.contains_page_of(address.add(len as u64 - 1)),
            "the bytes lie in the mapping"
        );
        address.get()
    }

    /// Acquires the right to access the mapping by work on `device`.
    ///
    /// # Errors
    /// `IllegalAddress`, `ReadOnly`, `Revoked`.
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
            // SAFETY: `self` is the only owner of these addresses, and every access goes through a `Span` that keeps
            // its mappings alive, so none is in progress.
            AddressSource::Arena(arena) => unsafe { arena.give_back(self.offset, self.mapped) },
            AddressSource::Window { space, .. } => {
                // SAFETY: as above. After a failure the memory stays mapped until the next mapping replaces it.
                let _ = unsafe { space.clear(self.offset, self.mapped) };
            }
            AddressSource::Reservation(_) | AddressSource::Host(_) => {}
        }
    }
}
