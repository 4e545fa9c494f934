//! The mock with one deliberate mistake.

#![allow(
    unsafe_code,
    reason = "implements the backend's traits, whose methods are unsafe, and breaks their contract"
)]

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device_ipc_core::backend::{
    BackendInfo, BlockedTensors, Capabilities, DeviceEvent, DeviceIpc, DeviceMemory, DeviceReservations,
    DeviceStream, DeviceTimelines, Exported, Extent, HandleKind, HandleKindInfo, Imported, MemoryInfo,
    Opened, ReceivedHandle, ReservationGranularity, TestKernels, Unavailable,
};
use device_ipc_core::{
    Access, BorrowedStream, DeviceInfo, DeviceOrdinal, DevicePtr, DeviceRange, Error, Result,
};
use device_ipc_mock::MockBackend;
use device_ipc_mock::engine::Address;
use rustix::mm::MprotectFlags;

/// The mistake that the backend makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// `free` frees under pending work.
    FreeDoesNotWait,
    /// `free` unmaps the memory at once.
    FreeUnmapsAtOnce,
    /// `copy_blocks` gives a block the number in the destination that it has in the source.
    BlocksKeepTheirNumbers,
    /// The range of `open` is a page longer than the mapping.
    OpenIsOnePageTooLong,
    /// The range of `open` has the length that the exporter states.
    OpenReturnsTheClaimedSize,
    /// `close` closes nothing.
    CloseDoesNothing,
    /// `unexport` leaks the handle.
    UnexportLeaks,
    /// `extents_of` ignores the stated allocation.
    StatedBaseIsIgnored,
    /// `extents_of` ignores the end of the range.
    ExtentsEndBeforeTheRange,
    /// `extents_of` returns extents for opened memory.
    OpenedMemoryHasExtents,
    /// Streams of other backends are accepted.
    ForeignStreamsAreAccepted,
    /// `write` reads the caller's bytes when the stream reaches the write.
    WriteKeepsTheBuffer,
    /// `memory_info` counts only allocations of the process.
    MemoryInfoIsOfTheProcess,
    /// Work on zero bytes is an error.
    EmptyRangesAreRefused,
    /// Submitting work waits for the work.
    SubmittingWaits,
    /// `unmap` leaves the import mapped.
    UnmapDoesNothing,
    /// `import` ignores that the access is read-only.
    ImportIsAlwaysWritable,
    /// `release` keeps the import.
    ReleaseDoesNothing,
    /// `reserve` takes any address.
    ReserveIgnoresTheAddress,
    /// `unreserve` keeps the addresses.
    UnreserveDoesNothing,
}

/// The mock with one mistake.
#[derive(Debug)]
pub(crate) struct Faulty {
    mock: Arc<MockBackend>,
    mistake: Mistake,
    allocated: Mutex<HashMap<u64, u64>>,
    /// Deferred writes: the destination, and the address of the caller's bytes.
    deferred_writes: Mutex<Vec<(DeviceRange, usize)>>,
    /// The stream that replaces a stream of another backend.
    own_stream: Box<dyn DeviceStream>,
}

impl Faulty {
    pub(crate) fn new(spec: &str, mistake: Mistake) -> Result<Arc<Self>, Unavailable> {
        let mock = MockBackend::from_spec(spec)?;
        let stream = mock.memory().create_stream(DeviceOrdinal::new(0));
        let own_stream = stream.map_err(|error| Unavailable::Failed { detail: error.to_string() })?;
        let (allocated, deferred_writes) = (Mutex::default(), Mutex::default());
        Ok(Arc::new(Self { mock, mistake, allocated, deferred_writes, own_stream }))
    }

    fn kernels(&self) -> &dyn TestKernels {
        self.mock.test_kernels().expect("the mock has test kernels")
    }

    fn makes(&self, mistake: Mistake) -> bool {
        self.mistake == mistake
    }

    fn stream<'a>(&'a self, stream: BorrowedStream<'a>) -> BorrowedStream<'a> {
        let foreign = stream.backend() != self.info().name;
        if foreign && self.makes(Mistake::ForeignStreamsAreAccepted) {
            self.own_stream.as_borrowed()
        } else {
            stream
        }
    }

    /// Returns `result`, after waiting for the work if that is the mistake.
    fn submitted(&self, stream: BorrowedStream<'_>, result: Result<()>) -> Result<()> {
        if self.makes(Mistake::SubmittingWaits) {
            self.mock.memory().synchronize(stream)?;
        }
        result
    }

    fn refuse_empty(&self, range: DeviceRange) -> Result<()> {
        if range.len == 0 && self.makes(Mistake::EmptyRangesAreRefused) {
            return Err(Error::InvalidRegion("zero bytes".into()));
        }
        Ok(())
    }

    /// Submits the deferred writes, with the bytes that are in the caller's buffers now.
    fn submit_deferred_writes(&self, stream: BorrowedStream<'_>) -> Result<()> {
        for (range, address) in lock(&self.deferred_writes).drain(..) {
            // SAFETY: the case keeps the buffer until it has synchronized the stream.
            let bytes = unsafe { std::slice::from_raw_parts(address as *const u8, range.len as usize) };
            // SAFETY: as the caller of `write` promised.
            unsafe { self.mock.memory().write(range, bytes, stream) }?;
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DeviceIpc for Faulty {
    delegate!(info devices visible_devices_variable peer_access capabilities handle_kinds export create_event);
    delegate!(open_event synchronize_device timelines);

    fn extents_of(&self, range: DeviceRange, stated_base: Option<DeviceRange>) -> Result<Vec<Extent>> {
        let stated = if self.makes(Mistake::StatedBaseIsIgnored) { None } else { stated_base };
        let asked = if self.makes(Mistake::ExtentsEndBeforeTheRange) {
            DeviceRange { len: 1, ..range }
        } else {
            range
        };
        match self.mock.extents_of(asked, stated) {
            Err(Error::SharedOn { .. }) if self.makes(Mistake::OpenedMemoryHasExtents) => {
                Ok(vec![Extent { allocation: range, generation: None }])
            }
            other => other,
        }
    }

    fn unexport(&self, exported: Exported) -> Result<()> {
        if self.makes(Mistake::UnexportLeaks) {
            std::mem::forget(exported);
            return Ok(());
        }
        self.mock.unexport(exported)
    }

    fn open(&self, handles: Vec<ReceivedHandle>, on: DeviceOrdinal, access: Access) -> Result<Opened> {
        let claimed = handles.iter().map(|handle| handle.size).fold(0, u64::saturating_add);
        let mut opened = self.mock.open(handles, on, access)?;
        if self.makes(Mistake::OpenIsOnePageTooLong) {
            opened.range.len += 4096;
        }
        if self.makes(Mistake::OpenReturnsTheClaimedSize) {
            opened.range.len = claimed;
        }
        Ok(opened)
    }

    fn close(&self, opened: Opened) -> Result<()> {
        if self.makes(Mistake::CloseDoesNothing) { Ok(()) } else { self.mock.close(opened) }
    }

    fn memory(&self) -> &dyn DeviceMemory {
        self
    }

    fn test_kernels(&self) -> Option<&dyn TestKernels> {
        Some(self)
    }

    fn reservations(&self) -> Option<&dyn DeviceReservations> {
        Some(self)
    }
}

impl Faulty {
    fn reserved(&self) -> &dyn DeviceReservations {
        self.mock.reservations().expect("the mock has reservations")
    }
}

impl DeviceReservations for Faulty {
    fn granularity(&self, on: DeviceOrdinal) -> Result<ReservationGranularity> {
        self.reserved().granularity(on)
    }

    fn reserve(&self, on: DeviceOrdinal, bytes: u64, at: Option<DevicePtr>) -> Result<DeviceRange> {
        let at = at.filter(|_| !self.makes(Mistake::ReserveIgnoresTheAddress));
        self.reserved().reserve(on, bytes, at)
    }

    fn unreserve(&self, reserved: DeviceRange) -> Result<()> {
        if self.makes(Mistake::UnreserveDoesNothing) { Ok(()) } else { self.reserved().unreserve(reserved) }
    }

    fn import(&self, handles: Vec<ReceivedHandle>, on: DeviceOrdinal, access: Access) -> Result<Imported> {
        let access = if self.makes(Mistake::ImportIsAlwaysWritable) { Access::ReadWrite } else { access };
        self.reserved().import(handles, on, access)
    }

    fn map(&self, imported: &Imported, at: DevicePtr) -> Result<()> {
        self.reserved().map(imported, at)
    }

    fn unmap(&self, imported: &Imported) -> Result<()> {
        if self.makes(Mistake::UnmapDoesNothing) { Ok(()) } else { self.reserved().unmap(imported) }
    }

    fn release(&self, imported: Imported) -> Result<()> {
        match self.mistake {
            Mistake::ReleaseDoesNothing => self.reserved().unmap(&imported),
            // The import stays, and with it the mapping that `unmap` has left.
            Mistake::UnmapDoesNothing => Ok(()),
            _ => self.reserved().release(imported),
        }
    }
}

impl DeviceMemory for Faulty {
    fn allocate(&self, device: DeviceOrdinal, bytes: u64) -> Result<DeviceRange> {
        let range = self.mock.memory().allocate(device, bytes)?;
        lock(&self.allocated).insert(range.ptr.get(), bytes);
        Ok(range)
    }

    fn allocate_as(&self, device: DeviceOrdinal, bytes: u64, kind: HandleKind) -> Result<DeviceRange> {
        let range = self.mock.memory().allocate_as(device, bytes, kind)?;
        lock(&self.allocated).insert(range.ptr.get(), bytes);
        Ok(range)
    }

    unsafe fn free(&self, range: DeviceRange) -> Result<()> {
        lock(&self.allocated).remove(&range.ptr.get());
        match self.mistake {
            Mistake::FreeDoesNotWait => {
                let freed = self.mock.machine().free_without_waiting(Address::new(range.ptr.get()));
                freed.map_err(|error| Error::Protocol(error.to_string()))
            }
            Mistake::FreeUnmapsAtOnce => {
                let (begin, none) = (range.ptr.get() as *mut _, MprotectFlags::empty());
                // Not unmapped: the engine still lists the range, and host memory mapped there later could not be registered.
                // SAFETY: none. Pending work reads this memory, which is the mistake.
                let protected = unsafe { rustix::mm::mprotect(begin, range.len as usize, none) };
                protected.map_err(|error| Error::io("mprotect", error))
            }
            // SAFETY: as the caller promised.
            _ => unsafe { self.mock.memory().free(range) },
        }
    }

    unsafe fn copy(&self, dst: DeviceRange, src: DeviceRange, stream: BorrowedStream<'_>) -> Result<()> {
        let stream = self.stream(stream);
        self.refuse_empty(dst)?;
        // SAFETY: as the caller promised.
        self.submitted(stream, unsafe { self.mock.memory().copy(dst, src, stream) })
    }

    unsafe fn copy_blocks(
        &self,
        tensors: &[BlockedTensors],
        block_bytes: u64,
        sources: &[u32],
        destinations: &[u32],
        stream: BorrowedStream<'_>,
    ) -> Result<()> {
        let stream = self.stream(stream);
        let destinations = if self.makes(Mistake::BlocksKeepTheirNumbers) { sources } else { destinations };
        let memory = self.mock.memory();
        // SAFETY: as the caller promised.
        self.submitted(stream, unsafe {
            memory.copy_blocks(tensors, block_bytes, sources, destinations, stream)
        })
    }

    unsafe fn fill(&self, dst: DeviceRange, byte: u8, stream: BorrowedStream<'_>) -> Result<()> {
        let stream = self.stream(stream);
        self.refuse_empty(dst)?;
        // SAFETY: as the caller promised.
        self.submitted(stream, unsafe { self.mock.memory().fill(dst, byte, stream) })
    }

    unsafe fn write(&self, dst: DeviceRange, bytes: &[u8], stream: BorrowedStream<'_>) -> Result<()> {
        let stream = self.stream(stream);
        self.refuse_empty(dst)?;
        if self.makes(Mistake::WriteKeepsTheBuffer) {
            lock(&self.deferred_writes).push((dst, bytes.as_ptr() as usize));
            return Ok(());
        }
        // SAFETY: as the caller promised.
        self.submitted(stream, unsafe { self.mock.memory().write(dst, bytes, stream) })
    }

    unsafe fn read(&self, src: DeviceRange, bytes: &mut [u8], stream: BorrowedStream<'_>) -> Result<()> {
        let stream = self.stream(stream);
        self.refuse_empty(src)?;
        self.submit_deferred_writes(stream)?;
        // SAFETY: as the caller promised.
        unsafe { self.mock.memory().read(src, bytes, stream) }
    }

    fn synchronize(&self, stream: BorrowedStream<'_>) -> Result<()> {
        let stream = self.stream(stream);
        self.submit_deferred_writes(stream)?;
        self.mock.memory().synchronize(stream)
    }

    fn create_stream(&self, device: DeviceOrdinal) -> Result<Box<dyn DeviceStream>> {
        self.mock.memory().create_stream(device)
    }

    fn memory_info(&self, device: DeviceOrdinal) -> Result<MemoryInfo> {
        let info = self.mock.memory().memory_info(device)?;
        if self.makes(Mistake::MemoryInfoIsOfTheProcess) {
            let used: u64 = lock(&self.allocated).values().sum();
            return Ok(MemoryInfo { free_bytes: info.total_bytes - used, ..info });
        }
        Ok(info)
    }

    unsafe fn pin_host(&self, device: DeviceOrdinal, pages: NonNull<u8>, len: usize) -> Result<()> {
        // SAFETY: as the caller promised.
        unsafe { self.mock.memory().pin_host(device, pages, len) }
    }

    unsafe fn unpin_host(&self, device: DeviceOrdinal, pages: NonNull<u8>) -> Result<()> {
        // SAFETY: as the caller promised.
        unsafe { self.mock.memory().unpin_host(device, pages) }
    }

    unsafe fn copy_to_host(
        &self,
        dst: NonNull<u8>,
        src: DeviceRange,
        stream: BorrowedStream<'_>,
    ) -> Result<()> {
        // SAFETY: as the caller promised.
        unsafe { self.mock.memory().copy_to_host(dst, src, self.stream(stream)) }
    }

    unsafe fn copy_from_host(
        &self,
        dst: DeviceRange,
        src: NonNull<u8>,
        stream: BorrowedStream<'_>,
    ) -> Result<()> {
        // SAFETY: as the caller promised.
        unsafe { self.mock.memory().copy_from_host(dst, src, self.stream(stream)) }
    }
}

impl TestKernels for Faulty {
    unsafe fn add_f32(&self, range: DeviceRange, value: f32, stream: BorrowedStream<'_>) -> Result<()> {
        let stream = self.stream(stream);
        self.refuse_empty(range)?;
        // SAFETY: as the caller promised.
        self.submitted(stream, unsafe { self.kernels().add_f32(range, value, stream) })
    }
}
