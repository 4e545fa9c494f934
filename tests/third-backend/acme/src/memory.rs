//! Device memory: memory files that are mapped, and work on them.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use device_ipc_core::backend::{
    DeviceMemory, DeviceStream, DeviceTimelines, HandleKind, MemoryInfo, TestKernels, check_copy_lengths,
};
use device_ipc_core::{BorrowedStream, DeviceOrdinal, DevicePtr, DeviceRange, Error, Result};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, memfd_create,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::backend::{check_device, check_kind};
use crate::stream::{Queue, Streams};

const PAGE: u64 = 4096;

/// The memory that this process has mapped.
#[derive(Debug, Default)]
pub(crate) struct AcmeMemory {
    /// Mappings by their first address.
    mapped: Mutex<BTreeMap<u64, Mapped>>,
    pub(crate) streams: Streams,
}

#[derive(Debug)]
struct Mapped {
    len: u64,
    /// The file of memory that this process allocated; `None` for memory of another process.
    file: Option<OwnedFd>,
}

/// Returns the memory that files of this machine can have. All processes allocate from it.
pub(crate) fn capacity() -> MemoryInfo {
    let info = rustix::system::sysinfo();
    let bytes = |units: u64| units * u64::from(info.mem_unit);
    let total_bytes = bytes(info.totalram);
    MemoryInfo { free_bytes: total_bytes.saturating_sub(bytes(info.sharedram)), total_bytes }
}

impl AcmeMemory {
    fn mapped(&self) -> MutexGuard<'_, BTreeMap<u64, Mapped>> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the allocation that contains an address.
    pub(crate) fn allocation_at(&self, ptr: DevicePtr) -> Result<DeviceRange> {
        let mapped = self.mapped();
        let found = mapped.range(..=ptr.get()).next_back().filter(|(base, one)| ptr.get() - *base < one.len);
        let why = if ptr.is_null() { "it is null" } else { "no allocation contains it (host memory?)" };
        let (base, one) = found.ok_or_else(|| Error::NotDeviceMemory { ptr, why: why.into() })?;
        if one.file.is_none() {
            return Err(Error::SharedOn { ptr });
        }
        Ok(DeviceRange::new(0.into(), DevicePtr::new(*base), one.len))
    }

    /// Returns a descriptor of the file of an allocation.
    pub(crate) fn file_of(&self, base: DevicePtr) -> Result<OwnedFd> {
        let mapped = self.mapped();
        let file = mapped.get(&base.get()).and_then(|one| one.file.as_ref());
        let file = file.ok_or_else(|| Error::InvalidRegion(format!("no allocation begins at {base}")))?;
        file.try_clone().map_err(|error| Error::io("duplicating the descriptor of a memory file", error))
    }

    /// Maps a file of another process, of this length as the process states it.
    pub(crate) fn open(&self, file: OwnedFd, stated: u64) -> Result<DeviceRange> {
        let protocol =
            |why: String| Error::Protocol(format!("the file of a handle is not one of this backend: {why}"));
        // Without the seal its owner could shorten the file, and an access behind the end would kill this process.
        let seals = fcntl_get_seals(&file).map_err(|error| protocol(error.to_string()))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(protocol("it is not sealed".into()));
        }
        let len = rustix::fs::fstat(&file).map_err(|error| protocol(error.to_string()))?.st_size as u64;
        if len == 0 || !len.is_multiple_of(PAGE) || len != stated {
            return Err(protocol(format!("it has {len} B, and {stated} B were stated")));
        }
        self.map(file.as_fd(), len, None)
    }

    fn map(&self, file: impl AsFd, len: u64, owned: Option<OwnedFd>) -> Result<DeviceRange> {
        let size = usize::try_from(len)
            .map_err(|_| Error::InvalidRegion(format!("{len} B exceed the address space")))?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address that the kernel selects.
        let base = unsafe { mmap(ptr::null_mut(), size, access, MapFlags::SHARED, file, 0) };
        let base = base.map_err(|error| Error::io("mapping a memory file", error))? as u64;
        self.mapped().insert(base, Mapped { len, file: owned });
        Ok(DeviceRange::new(0.into(), DevicePtr::new(base), len))
    }

    fn unmap(&self, base: DevicePtr, is_own: bool) -> Result<()> {
        let mut mapped = self.mapped();
        let one = mapped.get(&base.get()).filter(|one| one.file.is_some() == is_own);
        let len =
            one.ok_or_else(|| Error::InvalidRegion(format!("no memory to release begins at {base}")))?.len;
        mapped.remove(&base.get());
        // SAFETY: a mapping of this table, whose last work has finished.
        unsafe { munmap(base.get() as *mut _, len as usize) }
            .map_err(|error| Error::io("unmapping a memory file", error))
    }

    /// Unmaps memory of another process, whose work has finished.
    pub(crate) fn close(&self, range: DeviceRange) -> Result<()> {
        self.unmap(range.ptr, false)
    }

    fn queue(&self, stream: BorrowedStream<'_>) -> Result<Queue> {
        self.streams.queue(stream)
    }
}

/// Makes a memory file of this length, whose pages exist.
fn file_of_length(len: u64) -> rustix::io::Result<OwnedFd> {
    let file = memfd_create("acme", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    fallocate(&file, FallocateFlags::empty(), 0, len)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(File::from(file).into())
}

fn address(range: DeviceRange) -> *mut u8 {
    range.ptr.get() as *mut u8
}

impl DeviceMemory for AcmeMemory {
    fn allocate(&self, device: DeviceOrdinal, bytes: u64) -> Result<DeviceRange> {
        check_device(device)?;
        if bytes == 0 {
            return Err(Error::InvalidRegion("cannot allocate 0 B".into()));
        }
        let full = |detail: String| Error::OutOfMemory { device, bytes, detail };
        let whole = bytes.checked_next_multiple_of(PAGE).filter(|whole| *whole <= capacity().free_bytes);
        let whole = whole.ok_or_else(|| full(format!("{} B are free", capacity().free_bytes)))?;
        let file = file_of_length(whole).map_err(|error| full(error.to_string()))?;
        let lent = file.try_clone().map_err(|error| Error::io("duplicating a descriptor", error))?;
        let mapped = self.map(lent, whole, Some(file))?;
        Ok(DeviceRange { len: bytes, ..mapped })
    }

    fn allocate_as(&self, device: DeviceOrdinal, bytes: u64, kind: HandleKind) -> Result<DeviceRange> {
        check_kind(kind)?;
        self.allocate(device, bytes)
    }

    unsafe fn free(&self, range: DeviceRange) -> Result<()> {
        self.streams.synchronize_all();
        self.unmap(range.ptr, true)
    }

    unsafe fn copy(&self, dst: DeviceRange, src: DeviceRange, stream: BorrowedStream<'_>) -> Result<()> {
        check_copy_lengths(dst.len, src.len)?;
        let (to, from) = (dst.ptr.get(), src.ptr.get());
        self.queue(stream)?.submit(move || {
            // SAFETY: both ranges stay mapped until the work has finished, as the caller promised, and do not overlap.
            unsafe { ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, dst.len as usize) }
        });
        Ok(())
    }

    unsafe fn fill(&self, dst: DeviceRange, byte: u8, stream: BorrowedStream<'_>) -> Result<()> {
        self.queue(stream)?.submit(move || {
            // SAFETY: as for a copy.
            unsafe { ptr::write_bytes(address(dst), byte, dst.len as usize) }
        });
        Ok(())
    }

    unsafe fn write(&self, dst: DeviceRange, bytes: &[u8], stream: BorrowedStream<'_>) -> Result<()> {
        check_copy_lengths(dst.len, bytes.len() as u64)?;
        let bytes = bytes.to_vec();
        self.queue(stream)?.submit(move || {
            // SAFETY: as for a copy.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), address(dst), bytes.len()) }
        });
        Ok(())
    }

    unsafe fn read(&self, src: DeviceRange, bytes: &mut [u8], stream: BorrowedStream<'_>) -> Result<()> {
        check_copy_lengths(bytes.len() as u64, src.len)?;
        self.synchronize(stream)?;
        // SAFETY: as for a copy. The stream has reached this point, and the host accesses the memory.
        unsafe { ptr::copy_nonoverlapping(address(src), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn synchronize(&self, stream: BorrowedStream<'_>) -> Result<()> {
        self.queue(stream)?.synchronize();
        Ok(())
    }

    fn create_stream(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceStream>> {
        check_device(device)?;
        Ok(Box::new(self.streams.create()?))
    }

    fn memory_info(&self, device: DeviceOrdinal) -> Result<MemoryInfo> {
        check_device(device)?;
        Ok(capacity())
    }
}

impl TestKernels for AcmeMemory {
    unsafe fn add_f32(&self, range: DeviceRange, value: f32, stream: BorrowedStream<'_>) -> Result<()> {
        if !range.len.is_multiple_of(4) || !range.ptr.get().is_multiple_of(4) {
            return Err(Error::InvalidRegion(format!(
                "{} B at {} are not whole, aligned 32-bit floats",
                range.len, range.ptr
            )));
        }
        self.queue(stream)?.submit(move || {
            for index in 0..range.len as usize / 4 {
                // SAFETY: as for a copy, and the element is aligned.
                unsafe { *address(range).cast::<f32>().add(index) += value };
            }
        });
        Ok(())
    }
}

/// Streams write and wait for words of the host, at the addresses that the host has.
impl DeviceTimelines for AcmeMemory {
    unsafe fn register(&self, device: DeviceOrdinal, pages: NonNull<u8>, _len: usize) -> Result<DevicePtr> {
        check_device(device)?;
        Ok(DevicePtr::new(pages.as_ptr() as u64))
    }

    unsafe fn unregister(&self, device: DeviceOrdinal, _pages: NonNull<u8>) -> Result<()> {
        check_device(device)
    }

    unsafe fn write_value(&self, word: DevicePtr, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        self.queue(stream)?.submit(move || {
            // SAFETY: an aligned word that stays mapped until the stream has reached this point, as the caller promised.
            let word = unsafe { AtomicU64::from_ptr(word.get() as *mut u64) };
            word.store(value, Ordering::Release);
        });
        Ok(())
    }

    unsafe fn wait_value(&self, word: DevicePtr, value: u64, stream: BorrowedStream<'_>) -> Result<()> {
        self.queue(stream)?.submit(move || {
            // SAFETY: as for a write.
            let word = unsafe { AtomicU64::from_ptr(word.get() as *mut u64) };
            while word.load(Ordering::Acquire) < value {
                // No event of the host announces the store of another process.
                std::thread::sleep(Duration::from_micros(20));
            }
        });
        Ok(())
    }
}
