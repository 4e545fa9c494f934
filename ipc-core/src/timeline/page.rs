//! Pages of words that two processes and their devices share.

#![allow(unsafe_code, reason = "shared memory, and the vendor's registration of it")]

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::address::DevicePtr;
use crate::backend::{DeviceIpc, DeviceTimelines};
use crate::device::DeviceOrdinal;
use crate::error::{Error, Result};
use crate::process::Owner;
use crate::runtime::Runtime;

/// Bytes of a page: whole pages on every machine that Linux runs accelerators on (64 KiB on some).
const BYTES: usize = 64 * 1024;

/// Bytes of a slot: its words lie in cache lines of their own.
const SLOT_BYTES: usize = 256;

/// How many slots a page has.
pub(crate) const SLOTS: u32 = (BYTES / SLOT_BYTES) as u32;

/// A word of a slot, by its offset in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// The exporter's: 1 when the bytes are ready.
    Ready = 0,
    /// The exporter's timeline, which the importer waits for.
    FromExporter = 64,
    /// The importer's timeline, which the exporter waits for.
    FromImporter = 128,
    /// The exporter's host's, for a ring: where the reader begins.
    Start = 192,
    /// The exporter's host's, for a ring: how many publications there have been, once there will be no more.
    Total = 200,
}

/// A page in shared memory, mapped here, and known to the devices whose streams have used it.
pub(crate) struct WordPage {
    file: OwnedFd,
    /// `None` once it has been handed to the worker to be taken down.
    mapped: Option<Mapped>,
    registered: Mutex<Vec<Registered>>,
    owner: Owner,
}

/// The address, as a number: the memory is shared with other processes and devices, and touched atomically only.
#[derive(Clone, Copy)]
struct Mapped(usize);

struct Registered {
    backend: Arc<dyn DeviceIpc>,
    device: DeviceOrdinal,
    address: DevicePtr,
}

impl WordPage {
    /// A new page of zeros.
    pub(crate) fn create() -> Result<Arc<Self>> {
        let failed = |error| Error::io("making a page of timeline words", error);
        let file = memfd_create("device-ipc-words", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let file = file.map_err(failed)?;
        ftruncate(&file, BYTES as u64).map_err(failed)?;
        // Nobody can take the bytes away under those who use them.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(failed)?;
        Self::map(file)
    }

    /// The page that another process made.
    pub(crate) fn open(file: OwnedFd) -> Result<Arc<Self>> {
        let sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        let whole = fstat(&file).is_ok_and(|stat| stat.st_size >= BYTES as i64);
        if !sealed || !whole {
            return Err(Error::Protocol(
                "its page of words is no sealed memory file of the right size".into(),
            ));
        }
        Self::map(file)
    }

    fn map(file: OwnedFd) -> Result<Arc<Self>> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no memory in use.
        let address = unsafe { mmap(ptr::null_mut(), BYTES, protection, MapFlags::SHARED, &file, 0) }
            .map_err(|error| Error::io("mapping a page of timeline words", error))?;
        let mapped = Some(Mapped(address as usize));
        Ok(Arc::new(Self { file, mapped, registered: Mutex::default(), owner: Owner::current() }))
    }

    /// What the other process maps.
    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn base(&self) -> NonNull<u8> {
        let mapped = self.mapped.as_ref().expect("taken by drop alone");
        NonNull::new(ptr::with_exposed_provenance_mut(mapped.0)).expect("mmap gives no null address")
    }

    /// A word, for the host. The slot is below [`SLOTS`].
    pub(super) fn word(&self, slot: u32, word: Word) -> &AtomicU64 {
        assert!(slot < SLOTS, "checked where slots are taken over");
        // SAFETY: inside the mapping, which lives as long as `self`; aligned; everybody uses words atomically.
        unsafe {
            let word = self.base().byte_add(slot as usize * SLOT_BYTES + word as usize);
            AtomicU64::from_ptr(word.cast().as_ptr())
        }
    }

    /// A word, for streams of a device. The page is registered with the device first.
    pub(super) fn word_on(
        &self,
        backend: &Arc<dyn DeviceIpc>,
        device: DeviceOrdinal,
        slot: u32,
        word: Word,
    ) -> Result<DevicePtr> {
        assert!(slot < SLOTS, "checked where slots are taken over");
        let mut registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        let known = registered.iter().find(|one| one.device == device && Arc::ptr_eq(&one.backend, backend));
        let base = match known {
            Some(known) => known.address,
            None => {
                let timelines = timelines_of(&**backend, device)?;
                // SAFETY: shared memory, mapped until this page is dropped, which unregisters it before.
                let address = unsafe { timelines.register(device, self.base(), BYTES)? };
                registered.push(Registered { backend: Arc::clone(backend), device, address });
                address
            }
        };
        let offset = u64::from(slot) * SLOT_BYTES as u64 + word as u64;
        base.checked_add(offset).ok_or_else(|| {
            Error::InvalidRegion(format!("a page registered at {base} leaves the device's address space"))
        })
    }
}

/// The backend's words, where the device has them.
pub(crate) fn timelines_of(backend: &dyn DeviceIpc, device: DeviceOrdinal) -> Result<&dyn DeviceTimelines> {
    let usable = backend.capabilities(device)?.timelines;
    backend.timelines().filter(|_| usable).ok_or_else(|| Error::Unsupported {
        backend: backend.info().name,
        what: format!("let streams of device {device} write and wait on words"),
        why: "the device, or this driver, has no stream memory operations; order by events, or synchronise on the host"
            .into(),
    })
}

impl Drop for WordPage {
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

/// Pages that nobody has any longer, and that devices still know.
static RETIRED: Mutex<Vec<(Mapped, Vec<Registered>)>> = Mutex::new(Vec::new());

/// Timelines of this process that have not ended.
static LIVE: AtomicUsize = AtomicUsize::new(0);

/// So many pages may be kept for as long as timelines are live: 64 MiB.
const MOST_RETIRED: usize = 1024;

/// A timeline has begun.
pub(super) fn begun() {
    LIVE.fetch_add(1, Ordering::AcqRel);
}

/// A timeline has ended. Called once for each that has begun.
pub(super) fn ended() {
    LIVE.fetch_sub(1, Ordering::AcqRel);
    take_down_retired();
}

/// Takes down the pages that nobody has, on the worker. To have a device forget a page, a driver waits for every stream and
/// holds up all other calls (CUDA does); one of the streams may wait for a live timeline, whose signal may need one of those
/// calls. So that is left until there is none.
fn take_down_retired() {
    let due = |retired: &[_]| {
        !retired.is_empty() && (LIVE.load(Ordering::Acquire) == 0 || retired.len() > MOST_RETIRED)
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

fn take_down(mapped: Mapped, registered: Vec<Registered>) {
    let base = ptr::with_exposed_provenance_mut::<u8>(mapped.0);
    let Some(pages) = NonNull::new(base) else { return };
    for Registered { backend, device, .. } in registered {
        let synchronized = backend.synchronize_device(device);
        let unregistered = match backend.timelines() {
            // SAFETY: nobody has the page any longer, and what was submitted with it has finished.
            Some(timelines) => unsafe { timelines.unregister(device, pages) },
            None => Ok(()),
        };
        if let Err(error) = synchronized.and(unregistered) {
            tracing::warn!(%error, "a page of timeline words stays mapped: the device may still use it");
            return;
        }
    }
    // SAFETY: mapped by `map` with this size; nothing refers to it any longer.
    let _ = unsafe { munmap(base.cast(), BYTES) };
}

impl fmt::Debug for WordPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WordPage").field("file", &self.file).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_written_here_are_read_through_the_file_and_do_not_overlap() {
        let page = WordPage::create().unwrap();
        let far = WordPage::open(page.file().try_clone_to_owned().unwrap()).unwrap();
        let words = [Word::Ready, Word::FromExporter, Word::FromImporter, Word::Start, Word::Total];
        for slot in [0, 7, SLOTS - 1] {
            for word in words {
                page.word(slot, word).store(u64::from(slot) * 10 + word as u64, Ordering::Release);
            }
        }
        for slot in [0, 7, SLOTS - 1] {
            for word in words {
                assert_eq!(far.word(slot, word).load(Ordering::Acquire), u64::from(slot) * 10 + word as u64);
            }
        }
    }

    #[test]
    fn a_file_that_could_be_cut_short_is_no_page() {
        let unsealed = memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&unsealed, BYTES as u64).unwrap();
        assert!(matches!(WordPage::open(unsealed), Err(Error::Protocol(_))));
        let short = memfd_create("short", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&short, 4096).unwrap();
        fcntl_add_seals(&short, SealFlags::SHRINK).unwrap();
        assert!(matches!(WordPage::open(short), Err(Error::Protocol(_))));
    }
}
