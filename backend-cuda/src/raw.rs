//! Raw handles: the 64 bytes of `cuIpcGetMemHandle`, for exchange with programs without device-ipc.
//!
//! PyTorch, C programs with `cudaIpcOpenMemHandle`, CuPy and Numba use raw handles. Between two programs with
//! device-ipc, prefer a [`Descriptor`](device_ipc_core::Descriptor): raw handles lack its guarantees.
//!
//! - **No permission check.** A process with the 64 bytes can open the memory read-write, whichever user runs it. Treat
//!   them like a password.
//! - **No leases.** The exporter does not learn which processes have the memory open, or that one exited. It keeps the
//!   memory until the importers report that they have closed it, by a protocol of the two programs.
//! - **No generation check.** A handle whose block was freed can open another block at its address, without an error.
//! - **No ordering.** The exporter waits for its stream before it sends the handle, and the importer for its stream
//!   before it reports that it has closed the memory.
//! - **No offsets.** A handle names a whole allocation; the offset of the region is sent separately.
//!
//! Only memory of `cuMemAlloc` (`cudaMalloc`) has such a handle, and importers can reach all pages of 2 MiB that it
//! lies in. The rules are those of `cuIpcGetMemHandle` and `cuIpcOpenMemHandle` in "Memory Management"
//! (`group__CUDA__MEM`).

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use cudarc::driver::CudaStream;
use device_ipc_core::backend::{
    DeviceIpc as _, HandleBytes, Opened, ReceivedHandle, ViewStream as _, check_backend,
};
use device_ipc_core::{
    Access, DeviceIdentity, DeviceOrdinal, DeviceOwner, DeviceRange, Element, Error, LayoutError,
    ProcessIdentity, Region, Result,
};

use crate::backend::{self, CudaBackend};
use crate::bindings::api::IPC_HANDLE_BYTES;
use crate::interop::{CudaMapped, CudaMappedMut};
use crate::library::NAME;
use crate::memory::kind::LEGACY;

/// A region that is shared by raw handle: the vendor's handle, and the region's place in the allocation.
///
/// `Debug` does not show the bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RawHandle {
    /// The `CUipcMemHandle`, equal to `cudaIpcMemHandle_t`.
    pub bytes: [u8; IPC_HANDLE_BYTES],
    /// The offset of the region in the allocation, in bytes.
    pub byte_offset: u64,
    /// The length of the region in bytes.
    pub len: u64,
    /// The home device, if known. Another program may have other ordinals.
    pub home: Option<DeviceIdentity>,
}

impl RawHandle {
    /// Returns a handle for `len` bytes at `byte_offset` in the allocation.
    pub const fn new(bytes: [u8; IPC_HANDLE_BYTES], byte_offset: u64, len: u64) -> Self {
        Self { bytes, byte_offset, len, home: None }
    }

    /// Sets the home device. An open then refuses devices without access to it before the first driver call.
    pub const fn with_home(mut self, home: DeviceIdentity) -> Self {
        self.home = Some(home);
        self
    }
}

impl fmt::Debug for RawHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RawHandle")
            .field("byte_offset", &self.byte_offset)
            .field("len", &self.len)
            .field("home", &self.home)
            .finish_non_exhaustive()
    }
}

/// A guard of memory that is exported by raw handle. Keeps the memory's owner until it is dropped.
///
/// Drop it after the importers have closed the memory: the vendor's manual does not define later accesses.
#[derive(Debug)]
#[must_use = "dropping the guard returns the memory to its owner's allocator"]
pub struct RawExport {
    handle: RawHandle,
    memory: Arc<ExportedMemory>,
}

impl RawExport {
    /// Returns the handle for the other program.
    pub const fn handle(&self) -> &RawHandle {
        &self.handle
    }

    /// Returns the region in this process.
    pub fn range(&self) -> DeviceRange {
        self.memory.range
    }
}

/// Exported memory with its owner, shared by its export and its mappings in this process.
struct ExportedMemory {
    bytes: [u8; IPC_HANDLE_BYTES],
    range: DeviceRange,
    /// The offset of the region in its allocation.
    offset: u64,
    /// In a mutex because it need not be `Sync`; never locked.
    _owner: Mutex<Box<dyn Any + Send>>,
}

impl ExportedMemory {
    /// Returns the range of the handle, if it lies in the region.
    fn part(&self, handle: &RawHandle) -> Option<DeviceRange> {
        self.range.slice(handle.byte_offset.checked_sub(self.offset)?, handle.len)
    }
}

impl fmt::Debug for ExportedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExportedMemory").field("range", &self.range).finish_non_exhaustive()
    }
}

/// The exports of this process: the driver opens no handle in its exporting process.
static EXPORTED: Mutex<Vec<Weak<ExportedMemory>>> = Mutex::new(Vec::new());

fn exported() -> MutexGuard<'static, Vec<Weak<ExportedMemory>>> {
    EXPORTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Exports memory of `cuMemAlloc` by raw handle, and keeps its owner.
///
/// Accepts the owners of [`Ipc::share`](device_ipc_core::Ipc::share): cudarc's slices, an
/// [`OwnedRegion`](device_ipc_core::OwnedRegion), an `Arc` of either. Waits for no work: work that writes the memory
/// must have finished before another program opens it.
///
/// # Errors
///
/// [`Error::NotShareable`] for memory of pools and of `cuMemCreate`, [`Error::WrongBackend`] for memory of another
/// vendor, [`Error::BackendUnavailable`], or a driver error. An error drops the owner; pass an `Arc` to keep it.
pub fn export<M, O: DeviceOwner<M>>(owner: O) -> Result<RawExport> {
    let region = owner.region();
    let backend = registered()?;
    let handle = handle_of(&backend, &region)?;
    let memory = Arc::new(ExportedMemory {
        bytes: handle.bytes,
        range: region.range,
        offset: handle.byte_offset,
        _owner: Mutex::new(Box::new(owner)),
    });
    let mut exported = exported();
    exported.retain(|memory| memory.strong_count() > 0);
    exported.push(Arc::downgrade(&memory));
    Ok(RawExport { handle, memory })
}

fn handle_of(backend: &CudaBackend, region: &Region) -> Result<RawHandle> {
    check_backend("the memory", region.backend, NAME)?;
    let range = region.range;
    if range.len == 0 {
        return Err(Error::InvalidRegion("cannot share a region of 0 bytes".into()));
    }
    let extents = backend.extents_of(range, region.allocation).map_err(no_raw_handle)?;
    let [extent] = extents[..] else {
        return Err(Error::InvalidRegion(format!(
            "the region lies in {} allocations, but a raw handle names one; share it by a descriptor (Ipc::share)",
            extents.len()
        )));
    };
    let exported = backend.export(&extent, Some(LEGACY)).map_err(no_raw_handle)?;
    let bytes = exported.bytes.as_slice().try_into().expect("a legacy handle has 64 bytes");
    let home = backend.driver().device(range.device)?.info.identity;
    Ok(RawHandle::new(bytes, range.ptr.get() - extent.allocation.ptr.get(), range.len).with_home(home))
}

/// Replaces the usual remedies, which apply to descriptors.
fn no_raw_handle(error: Error) -> Error {
    match error {
        Error::NotShareable { ptr, kind, .. } => Error::NotShareable {
            ptr,
            kind,
            remedy: "only memory of cuMemAlloc (cudaMalloc) has a raw handle: allocate with \
                     device_ipc::cuda::alloc_zeros(&stream, len) or device_ipc::cuda::clone_htod(&stream, &data), or \
                     share it by a descriptor (Ipc::share), which can carry more than 64 bytes"
                .into(),
        },
        error => error,
    }
}

/// A guard of memory that was opened by raw handle. Dropping it closes the memory without waiting.
#[derive(Debug)]
pub struct RawMapping {
    range: DeviceRange,
    source: MappingSource,
}

#[derive(Debug)]
enum MappingSource {
    /// Memory of another process; closed on drop, in the process that opened it.
    Opened { backend: Arc<CudaBackend>, opened: Option<Opened>, pid: u32 },
    /// Exported memory of this process.
    Own(#[allow(dead_code, reason = "kept, not used")] Arc<ExportedMemory>),
}

/// Opens memory of another program on device `on`, which may differ from its home device.
///
/// A handle of [`export`] in the same process returns the exported memory and keeps its owner, since the driver opens
/// no handle in its exporting process.
///
/// # Safety
///
/// - The other program keeps the memory allocated until the mapping is dropped here. A stale handle can open other
///   memory of that program, without an error.
/// - All device work on the mapping has finished when it is dropped: views are addresses, and the driver unmaps without
///   waiting.
///
/// # Errors
///
/// [`Error::InvalidRegion`] if the region exceeds the opened allocation, [`Error::NoPeerAccess`] if `on` cannot access
/// the home device, [`Error::NoSuchDevice`], [`Error::BackendUnavailable`], or a driver error.
pub unsafe fn open(handle: &RawHandle, on: impl Into<DeviceOrdinal>) -> Result<RawMapping> {
    let on = on.into();
    if handle.len == 0 {
        return Err(Error::InvalidRegion("cannot open a region of 0 bytes".into()));
    }
    if let Some(mapping) = open_own(handle, on)? {
        return Ok(mapping);
    }
    let backend = registered()?;
    let visible = |home| backend.driver().devices.iter().find(|device| device.info.identity == home);
    let received = ReceivedHandle {
        kind: LEGACY,
        bytes: HandleBytes::new(handle.bytes),
        fds: Vec::new(),
        size: handle.byte_offset.saturating_add(handle.len),
        generation: None,
        home: handle.home.and_then(visible).map(|device| device.info.ordinal),
        home_identity: handle.home,
        // Unknown, and not used to open handles of this kind.
        exporter: ProcessIdentity::current()?,
    };
    let opened = backend.open(vec![received], on, Access::ReadWrite)?;
    let whole = opened.range;
    let source = MappingSource::Opened { backend, opened: Some(opened), pid: std::process::id() };
    // From here on, an error closes the handle.
    let mut mapping = RawMapping { range: whole, source };
    mapping.range = part(whole, handle)?;
    Ok(mapping)
}

/// Returns the exported memory, if it is of this process.
fn open_own(handle: &RawHandle, on: DeviceOrdinal) -> Result<Option<RawMapping>> {
    let same = |memory: &Arc<ExportedMemory>| memory.bytes == handle.bytes;
    let exported: Vec<_> = exported().iter().filter_map(Weak::upgrade).filter(same).collect();
    let Some(first) = exported.first() else { return Ok(None) };
    let home = first.range.device;
    if home != on {
        return Err(Error::Unsupported {
            backend: NAME,
            what: format!("open memory of this process on device {on}"),
            why: format!(
                "its home is device {home}, and the driver opens no handle in its exporting process; open it on device \
                 {home}"
            ),
        });
    }
    // Several regions of one allocation have the same handle, and each has its own owner.
    for memory in &exported {
        if let Some(range) = memory.part(handle) {
            return Ok(Some(RawMapping { range, source: MappingSource::Own(Arc::clone(memory)) }));
        }
    }
    Err(Error::InvalidRegion(format!(
        "{} bytes at offset {} exceed the region that this process exported: {} bytes at offset {}",
        handle.len, handle.byte_offset, first.range.len, first.offset
    )))
}

/// Returns the region in the opened allocation, whose size the driver returned.
fn part(whole: DeviceRange, handle: &RawHandle) -> Result<DeviceRange> {
    whole.slice(handle.byte_offset, handle.len).ok_or_else(|| {
        Error::InvalidRegion(format!(
            "{} bytes at offset {} exceed the allocation of the handle, which has {} bytes",
            handle.len, handle.byte_offset, whole.len
        ))
    })
}

fn registered() -> Result<Arc<CudaBackend>> {
    backend::registered()
        .map_err(|reason| Error::BackendUnavailable { backend: Some(NAME.to_owned()), reason })
}

impl RawMapping {
    /// Returns the region: an address of this process on the mapping's device.
    pub const fn range(&self) -> DeviceRange {
        self.range
    }

    /// Returns whether it is memory of this process, which the driver did not open.
    pub const fn is_own(&self) -> bool {
        matches!(self.source, MappingSource::Own(_))
    }

    /// Returns the elements for reading by work on `stream`. Does not wait for the exporter's work, which has finished.
    ///
    /// # Errors
    ///
    /// [`Error::Layout`] if the bytes are not whole, aligned elements, [`Error::WrongStream`] for a stream of another
    /// device, [`Error::Unsupported`] for a stream outside the device's primary context.
    pub fn view<T: Element>(&self, stream: &Arc<CudaStream>) -> Result<CudaMapped<'_, T>> {
        self.check_elements::<T>()?;
        // SAFETY: mapped while `self` is borrowed, and made of whole elements.
        unsafe { stream.view(self.range) }
    }

    /// Returns the elements for reading and writing by work on `stream`.
    ///
    /// # Errors
    ///
    /// As [`view`](Self::view).
    pub fn view_mut<T: Element>(&mut self, stream: &Arc<CudaStream>) -> Result<CudaMappedMut<'_, T>> {
        self.check_elements::<T>()?;
        // SAFETY: as above; raw handles are always opened read-write.
        unsafe { stream.view_mut(self.range) }
    }

    fn check_elements<T: Element>(&self) -> Result<()> {
        let (address, len, element) = (self.range.ptr.get(), self.range.len, size_of::<T>() as u64);
        if address.is_multiple_of(align_of::<T>() as u64) && len.is_multiple_of(element) {
            return Ok(());
        }
        Err(LayoutError::Misaligned { address, len, element }.into())
    }

    /// Closes the memory like a drop, and returns the result.
    ///
    /// # Errors
    ///
    /// A driver error.
    pub fn close(mut self) -> Result<()> {
        self.source.close()
    }
}

impl MappingSource {
    fn close(&mut self) -> Result<()> {
        match self {
            // A forked child must not close mappings of its parent.
            Self::Opened { backend, opened, pid } if *pid == std::process::id() => {
                opened.take().map_or(Ok(()), |opened| backend.close(opened))
            }
            Self::Opened { .. } | Self::Own(_) => Ok(()),
        }
    }
}

impl Drop for MappingSource {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::warn!(target: crate::LOG, %error, "cannot close memory of a raw CUDA handle");
        }
    }
}

#[cfg(test)]
mod tests {
    use device_ipc_core::DevicePtr;

    use super::*;

    const PTR: u64 = 0x7000_0000;

    fn whole() -> DeviceRange {
        DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::new(PTR), 4096)
    }

    #[test]
    fn debug_hides_the_handle_bytes() {
        let shown = format!("{:?}", RawHandle::new([0xAB; IPC_HANDLE_BYTES], 512, 1000));
        assert!(shown.contains("512") && shown.contains("1000"), "{shown}");
        assert!(!shown.contains("171") && !shown.to_lowercase().contains("ab,"), "{shown}");
    }

    #[test]
    fn region_beyond_the_allocation_is_rejected() {
        let requested = |offset, len| part(whole(), &RawHandle::new([0; IPC_HANDLE_BYTES], offset, len));
        assert_eq!(requested(512, 1000).unwrap().ptr.get(), PTR + 512);
        assert_eq!(requested(4095, 1).unwrap().len, 1);
        let refused = requested(4096, 1).unwrap_err().to_string();
        assert!(
            refused.contains("1 bytes at offset 4096") && refused.contains("has 4096 bytes"),
            "{refused}"
        );
        assert!(requested(u64::MAX, 2).is_err());
    }

    #[test]
    fn not_shareable_error_explains_raw_handles() {
        let refused =
            Error::NotShareable { ptr: DevicePtr::new(PTR), kind: "a pool".into(), remedy: "".into() };
        let text = no_raw_handle(refused).to_string();
        assert!(text.contains("a pool") && text.contains("only memory of cuMemAlloc"), "{text}");
    }
}
