//! Host memory that two processes and their devices share.
//!
//! A memory file of whole pages, sealed so that no process can shrink it, mapped by both processes and registered with the
//! devices of each. Counter pages and the chunks of copies are in such pages.

#![allow(unsafe_code, reason = "shared memory, and the vendor's registration of it")]

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::backend::{DeviceIpc, timelines_of};
use crate::model::address::DevicePtr;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::os::process::Owner;
use crate::os::received_file;
use crate::sharing::Runtime;

/// Granularity of sizes, in bytes: whole pages on every machine with accelerators (64 KiB on some).
pub(crate) const GRANULE: usize = 64 * 1024;

/// Pages in shared memory, mapped here, and registered with the devices that have used them.
pub(crate) struct HostPages {
    /// `None` once it has been [taken](Self::into_file).
    file: Option<OwnedFd>,
    /// `None` once the worker has been asked to unmap them.
    mapped: Option<Mapped>,
    registered: Mutex<Vec<RegisteredPages>>,
    owner: Owner,
}

/// The use of pages by devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// Streams write and wait on words in them ([`DeviceTimelines`](crate::backend::DeviceTimelines)).
    Words,
    /// Streams copy to and from them ([`DeviceMemory::pin_host`](crate::backend::DeviceMemory::pin_host)).
    Copies,
}

/// The address, as a number: the memory is shared with other processes and devices.
#[derive(Clone, Copy)]
struct Mapped {
    address: usize,
    len: usize,
}

struct RegisteredPages {
    backend: Arc<dyn DeviceIpc>,
    device: DeviceOrdinal,
    used_for: Use,
    address: DevicePtr,
}

impl HostPages {
    /// Creates pages of zeros: `len` bytes, a multiple of [`GRANULE`]. `/proc` shows `name`.
    pub(crate) fn create(name: &str, len: usize) -> Result<Self> {
        let failed = |error| Error::io(format!("making {len} bytes of shared host memory"), error);
        let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(failed)?;
        ftruncate(&file, len as u64).map_err(failed)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(failed)?;
        Self::map(file, len)
    }

    /// Maps the pages of another process. Errors name them by `what`.
    pub(crate) fn open(file: OwnedFd, len: usize, what: &str) -> Result<Self> {
        received_file::check(&file, SealFlags::empty(), len as u64, what)?;
        Self::map(file, len)
    }

    fn map(file: OwnedFd, len: usize) -> Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory in use.
        let address = unsafe { mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, &file, 0) }
            .map_err(|error| Error::io(format!("mapping {len} bytes of shared host memory"), error))?;
        let mapped = Some(Mapped { address: address as usize, len });
        Ok(Self { file: Some(file), mapped, registered: Mutex::default(), owner: Owner::current() })
    }

    /// Returns the file that the other process maps.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_ref().expect("taken by into_file alone").as_fd()
    }

    /// Closes the file of the pages: the mapping remains, and no further process needs to map them.
    pub(crate) fn into_file(mut self) -> (Self, OwnedFd) {
        let file = self.file.take().expect("taken once");
        (self, file)
    }

    fn mapped(&self) -> Mapped {
        *self.mapped.as_ref().expect("taken by drop alone")
    }

    /// Returns their length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.mapped().len
    }

    /// Returns their address. They stay mapped as long as `self`.
    pub(crate) fn base(&self) -> NonNull<u8> {
        NonNull::new(ptr::with_exposed_provenance_mut(self.mapped().address))
            .expect("mmap gives no null address")
    }

    /// Registers the pages with a device if they are not registered yet. Returns the address for its streams.
    pub(crate) fn known_to(
        &self,
        backend: &Arc<dyn DeviceIpc>,
        device: DeviceOrdinal,
        used_for: Use,
    ) -> Result<DevicePtr> {
        let mut registered = lock(&self.registered);
        let is_it = |one: &&RegisteredPages| {
            one.device == device && one.used_for == used_for && Arc::ptr_eq(&one.backend, backend)
        };
        if let Some(known) = registered.iter().find(is_it) {
            return Ok(known.address);
        }
        // SAFETY: shared memory, mapped until these pages are dropped, which has the device forget them before.
        let address = unsafe {
            match used_for {
                Use::Words => timelines_of(&**backend, device)?.register(device, self.base(), self.len())?,
                Use::Copies => {
                    check_room_for_copies(self.len())?;
                    backend.memory().pin_host(device, self.base(), self.len())?;
                    PINNED.fetch_add(self.len(), Ordering::AcqRel);
                    DevicePtr::new(self.mapped().address as u64)
                }
            }
        };
        registered.push(RegisteredPages { backend: Arc::clone(backend), device, used_for, address });
        Ok(address)
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        let Some(mapped) = self.mapped.take() else { return };
        let registered = std::mem::take(self.registered.get_mut().unwrap_or_else(PoisonError::into_inner));
        if !self.owner.is_here() {
            // A forked child: the driver's state is the parent's.
            std::mem::forget(registered);
            return;
        }
        if registered.is_empty() {
            take_down(mapped, registered);
        } else {
            lock(&RETIRED).push((mapped, registered));
            take_down_retired();
        }
    }
}

/// Pages that are not used any longer, and that are still registered with devices.
static RETIRED: Mutex<Vec<(Mapped, Vec<RegisteredPages>)>> = Mutex::new(Vec::new());

/// Number of timelines of this process that have not ended.
static LIVE: AtomicUsize = AtomicUsize::new(0);

/// Drops pages that no timeline uses. Called once no timeline is live.
static DROP_UNUSED: OnceLock<fn()> = OnceLock::new();

/// Bytes that are pinned for copies, those of retired pages included.
static PINNED: AtomicUsize = AtomicUsize::new(0);

/// Maximum number of bytes that are pinned for copies while timelines are live.
const MOST_PINNED: usize = 64 << 20;

/// Maximum number of bytes of retired pages while timelines are live: those of copies, and as many for words.
const MOST_RETIRED: usize = 2 * MOST_PINNED;

/// Checks the limit on pinned bytes. No page is unregistered while timelines are live, so only few are registered; other copies
/// use unregistered memory.
fn check_room_for_copies(len: usize) -> Result<()> {
    let pinned = PINNED.load(Ordering::Acquire);
    if LIVE.load(Ordering::Acquire) == 0 || pinned + len <= MOST_PINNED {
        return Ok(());
    }
    Err(Error::Unsupported {
        backend: "this process",
        what: format!("pin {len} bytes for a copy"),
        why: format!("{pinned} are pinned, and are kept until no timeline is live"),
    })
}

/// Returns whether a timeline of this process is live.
pub(crate) fn any_timeline_is_live() -> bool {
    LIVE.load(Ordering::Acquire) != 0
}

/// Has pages that no timeline uses dropped by this function, whenever no timeline is live any longer.
pub(crate) fn drop_unused_by(drop_unused: fn()) {
    let _ = DROP_UNUSED.set(drop_unused);
}

/// Counts a timeline that has begun.
pub(crate) fn timeline_begun() {
    LIVE.fetch_add(1, Ordering::AcqRel);
}

/// Counts a timeline that has ended. Called once for each that has begun.
pub(crate) fn timeline_ended() {
    if LIVE.fetch_sub(1, Ordering::AcqRel) == 1
        && let Some(drop_unused) = DROP_UNUSED.get()
    {
        drop_unused();
    }
    take_down_retired();
}

/// Unmaps retired pages, on the worker. To unregister a page, a driver waits for every stream and blocks all other calls (CUDA
/// does); one of the streams may wait for a live timeline, whose signal may need one of those calls. So the pages are kept until
/// no timeline is live.
fn take_down_retired() {
    let due = |retired: &[(Mapped, _)]| {
        let bytes: usize = retired.iter().map(|(mapped, _)| mapped.len).sum();
        !retired.is_empty() && (LIVE.load(Ordering::Acquire) == 0 || bytes > MOST_RETIRED)
    };
    if !due(&lock(&RETIRED)) {
        return;
    }
    let Some(runtime) = Runtime::existing() else { return };
    runtime.worker.submit(move || {
        let mut retired = lock(&RETIRED);
        if due(&retired) {
            let pages = std::mem::take(&mut *retired);
            drop(retired);
            pages.into_iter().for_each(|(mapped, registered)| take_down(mapped, registered));
        }
    });
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn take_down(mapped: Mapped, registered: Vec<RegisteredPages>) {
    let base = ptr::with_exposed_provenance_mut::<u8>(mapped.address);
    let Some(pages) = NonNull::new(base) else { return };
    for RegisteredPages { backend, device, used_for, .. } in registered {
        let synchronized = backend.synchronize_device(device);
        // SAFETY: nobody has the pages any longer, and what was submitted with them has finished.
        let forgotten = unsafe {
            match (used_for, backend.timelines()) {
                (Use::Words, Some(timelines)) => timelines.unregister(device, pages),
                (Use::Words, None) => Ok(()),
                (Use::Copies, _) => {
                    PINNED.fetch_sub(mapped.len, Ordering::AcqRel);
                    backend.memory().unpin_host(device, pages)
                }
            }
        };
        if let Err(error) = synchronized.and(forgotten) {
            tracing::warn!(target: crate::os::log::TIMELINE, %error, "shared host memory stays mapped: the device may still use it");
            return;
        }
    }
    // SAFETY: mapped by `map` with this size; nothing refers to it any longer.
    let _ = unsafe { munmap(base.cast(), mapped.len) };
}

impl fmt::Debug for HostPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostPages").field("file", &self.file).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_written_here_are_read_through_the_file() {
        let pages = HostPages::create("device-ipc-test", 2 * GRANULE).unwrap();
        let far = HostPages::open(pages.file().try_clone_to_owned().unwrap(), 2 * GRANULE, "it").unwrap();
        // SAFETY: the last byte of both mappings, which live; nobody else has them.
        unsafe {
            pages.base().add(2 * GRANULE - 1).write(7);
            assert_eq!(far.base().add(2 * GRANULE - 1).read(), 7);
        }
    }

    #[test]
    fn shrinkable_or_short_file_is_rejected() {
        let unsealed = memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&unsealed, GRANULE as u64).unwrap();
        assert!(matches!(HostPages::open(unsealed, GRANULE, "it"), Err(Error::Protocol(_))));
        let short = HostPages::create("device-ipc-test", GRANULE).unwrap();
        let short = short.file().try_clone_to_owned().unwrap();
        assert!(matches!(HostPages::open(short, 2 * GRANULE, "it"), Err(Error::Protocol(_))));
    }
}
