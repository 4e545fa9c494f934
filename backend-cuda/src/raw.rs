//! Bare handles: the 64 bytes of `cuIpcGetMemHandle`, to and from programs that know nothing of device-ipc.
//!
//! PyTorch, a C program with `cudaIpcOpenMemHandle`, CuPy and Numba speak in bare handles. Between two programs that have
//! device-ipc a [`Descriptor`](device_ipc_core::Descriptor) is the better way, and what it brings along is missing here:
//!
//! - **Nobody is asked.** Who has the 64 bytes can open the memory, read-write, whatever user it is that runs the
//!   program. Treat them like a password.
//! - **Nobody counts.** No lease tells who has the memory open, or that he died. The exporter keeps the memory until the
//!   others say that they have done with it; how they say so is up to the two programs.
//! - **Nobody checks that it is still the same memory.** A handle whose block was freed can open the block that has taken
//!   its place, without an error.
//! - **Nothing is ordered.** The exporter waits for its stream before it gives the handle away, and the importer for its
//!   own before it says that it is done.
//! - **Offsets are lost.** A handle is of a whole allocation; where the region begins in it goes beside the bytes.
//!
//! Only memory of `cuMemAlloc` (`cudaMalloc`) has such a handle, and importers can reach all pages of 2 MiB that it lies
//! in. The rules are those of `cuIpcGetMemHandle` and `cuIpcOpenMemHandle` in "Memory Management"
//! (`group__CUDA__MEM`).

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use cudarc::driver::CudaStream;
use device_ipc_core::{
    Access, DeviceIdentity, DeviceIpc as _, DeviceOrdinal, DeviceOwner, DeviceRange, Element, Error,
    HandleBytes, LayoutError, Opened, ProcessIdentity, ReceivedHandle, Region, Result, ViewStream as _,
};

use crate::backend::{self, CudaBackend};
use crate::bindings::api::IPC_HANDLE_BYTES;
use crate::interop::{CudaMapped, CudaMappedMut};
use crate::library::NAME;
use crate::memory::kind::LEGACY;

/// A region of another program's memory, or for another program: the vendor's handle, and where the region lies in what it
/// opens.
///
/// `Debug` does not show the bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RawHandle {
    /// `CUipcMemHandle`, which is `cudaIpcMemHandle_t`.
    pub bytes: [u8; IPC_HANDLE_BYTES],
    /// Where the region begins, in bytes from the start of the allocation.
    pub offset: u64,
    /// The length of the region in bytes.
    pub len: u64,
    /// The device that the memory lives on, where it is known. Another program has other ordinals.
    pub home: Option<DeviceIdentity>,
}

impl RawHandle {
    /// `len` bytes at `offset` in what the handle opens.
    pub const fn new(bytes: [u8; IPC_HANDLE_BYTES], offset: u64, len: u64) -> Self {
        Self { bytes, offset, len, home: None }
    }

    /// States the home device. Opening then refuses a device that cannot reach it before the driver is asked.
    pub const fn with_home(mut self, home: DeviceIdentity) -> Self {
        self.home = Some(home);
        self
    }
}

impl fmt::Debug for RawHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RawHandle")
            .field("offset", &self.offset)
            .field("len", &self.len)
            .field("home", &self.home)
            .finish_non_exhaustive()
    }
}

/// Memory whose bare handle was given away. The owner is kept until this is dropped.
///
/// Drop it when the other programs have closed the memory: the vendor's manual leaves open what they find afterwards.
#[derive(Debug)]
#[must_use = "the memory goes back to its owner's allocator when this is dropped"]
pub struct RawExport {
    handle: RawHandle,
    kept: Arc<Kept>,
}

impl RawExport {
    /// What the other program needs.
    pub const fn handle(&self) -> &RawHandle {
        &self.handle
    }

    /// The region in this process.
    pub fn range(&self) -> DeviceRange {
        self.kept.range
    }
}

/// The owner of memory that was exported, for as long as anybody in this process needs it.
struct Kept {
    bytes: [u8; IPC_HANDLE_BYTES],
    range: DeviceRange,
    /// Where the region begins in its allocation.
    offset: u64,
    /// In a mutex because it need not be `Sync`; never locked.
    _owner: Mutex<Box<dyn Any + Send>>,
}

impl Kept {
    /// The bytes that the handle names, where they lie in the region.
    fn part(&self, handle: &RawHandle) -> Option<DeviceRange> {
        self.range.slice(handle.offset.checked_sub(self.offset)?, handle.len)
    }
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept").field("range", &self.range).finish_non_exhaustive()
    }
}

/// What this process has exported: the driver opens no handle in the process that made it.
static OWN: Mutex<Vec<Weak<Kept>>> = Mutex::new(Vec::new());

fn own() -> MutexGuard<'static, Vec<Weak<Kept>>> {
    OWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Gives out the bare handle of memory of `cuMemAlloc`, and keeps its owner meanwhile.
///
/// The owner is what [`Ipc::share`](device_ipc_core::Ipc::share) takes: cudarc's slices, an
/// [`OwnedRegion`](device_ipc_core::OwnedRegion), an `Arc` of either. Nothing is waited for: what fills the memory has to
/// have finished before another program opens it.
///
/// # Errors
///
/// [`Error::NotShareable`] for memory of pools and of `cuMemCreate`, [`Error::WrongBackend`] for memory of another vendor,
/// [`Error::BackendUnavailable`], else the driver's error. The owner is dropped then; pass an `Arc` to keep it.
pub fn export<M, O: DeviceOwner<M>>(owner: O) -> Result<RawExport> {
    let region = owner.region();
    let backend = registered()?;
    let handle = handle_of(&backend, &region)?;
    let kept = Arc::new(Kept {
        bytes: handle.bytes,
        range: region.range,
        offset: handle.offset,
        _owner: Mutex::new(Box::new(owner)),
    });
    let mut own = own();
    own.retain(|kept| kept.strong_count() > 0);
    own.push(Arc::downgrade(&kept));
    Ok(RawExport { handle, kept })
}

fn handle_of(backend: &CudaBackend, region: &Region) -> Result<RawHandle> {
    if region.backend != NAME {
        return Err(Error::WrongBackend {
            what: "the memory",
            found: region.backend.to_owned(),
            expected: NAME.to_owned(),
        });
    }
    let range = region.range;
    if range.len == 0 {
        return Err(Error::InvalidRegion("a region of 0 bytes cannot be shared".into()));
    }
    let extents = backend.extents_of(range, region.allocation).map_err(has_no_bare_handle)?;
    let [extent] = extents[..] else {
        return Err(Error::InvalidRegion(format!(
            "the region lies in {} allocations, and a bare handle is of one; share it by a descriptor (Ipc::share)",
            extents.len()
        )));
    };
    let exported = backend.export(&extent, Some(LEGACY)).map_err(has_no_bare_handle)?;
    let bytes = exported.bytes.as_slice().try_into().expect("a legacy handle has 64 bytes");
    let home = backend.driver().device(range.device)?.info.identity;
    Ok(RawHandle::new(bytes, range.ptr.get() - extent.allocation.ptr.get(), range.len).with_home(home))
}

/// The usual remedies are for descriptors, which travel with more than 64 bytes.
fn has_no_bare_handle(error: Error) -> Error {
    match error {
        Error::NotShareable { ptr, kind, .. } => Error::NotShareable {
            ptr,
            kind,
            remedy: "only memory of cuMemAlloc (cudaMalloc) has a bare handle: allocate with \
                     device_ipc::cuda::alloc_zeros(&stream, len) or device_ipc::cuda::clone_htod(&stream, &data), or \
                     share it by a descriptor (Ipc::share), which can carry more than 64 bytes"
                .into(),
        },
        error => error,
    }
}

/// Memory of another program, opened by its bare handle. Dropping it closes it, and waits for nothing.
#[derive(Debug)]
pub struct RawMapping {
    range: DeviceRange,
    hold: Hold,
}

#[derive(Debug)]
enum Hold {
    /// Opened by the driver; closed when this is dropped, by the process that opened it.
    Opened { backend: Arc<CudaBackend>, opened: Option<Opened>, pid: u32 },
    /// The handle is one of this process: the memory itself, and its owner.
    Own(#[allow(dead_code, reason = "kept, not used")] Arc<Kept>),
}

/// Opens memory of another program on device `on`, which need not be the one that it lives on.
///
/// A handle that [`export`] made in this very process gives the exported memory itself and keeps its owner as well, since
/// the driver opens no handle in the process that made it.
///
/// # Safety
///
/// - The handle is of memory that the other program keeps allocated until the mapping has been dropped here. One that is
///   stale can open other memory of that program, without an error.
/// - All device work that uses the mapping has finished when it is dropped: views are addresses, and the driver unmaps
///   without waiting.
///
/// # Errors
///
/// [`Error::InvalidRegion`] where the region does not lie in what the handle opens, [`Error::NoPeerAccess`] where `on`
/// cannot reach the home device, [`Error::NoSuchDevice`], [`Error::BackendUnavailable`], else the driver's error with what
/// it means.
pub unsafe fn open(handle: &RawHandle, on: impl Into<DeviceOrdinal>) -> Result<RawMapping> {
    let on = on.into();
    if handle.len == 0 {
        return Err(Error::InvalidRegion("a region of 0 bytes cannot be opened".into()));
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
        size: handle.offset.saturating_add(handle.len),
        generation: None,
        home: handle.home.and_then(visible).map(|device| device.info.ordinal),
        // Nobody says who it was, and handles of this kind are opened without knowing.
        exporter: ProcessIdentity::current()?,
    };
    let opened = backend.open(vec![received], on, Access::ReadWrite)?;
    let whole = opened.range;
    let hold = Hold::Opened { backend, opened: Some(opened), pid: std::process::id() };
    // From here on dropping it closes the handle again.
    let mut mapping = RawMapping { range: whole, hold };
    mapping.range = part(whole, handle)?;
    Ok(mapping)
}

/// The memory itself, where it is of this process.
fn open_own(handle: &RawHandle, on: DeviceOrdinal) -> Result<Option<RawMapping>> {
    let same = |kept: &Arc<Kept>| kept.bytes == handle.bytes;
    let exported: Vec<_> = own().iter().filter_map(Weak::upgrade).filter(same).collect();
    let Some(first) = exported.first() else { return Ok(None) };
    let home = first.range.device;
    if home != on {
        return Err(Error::Unsupported {
            backend: NAME,
            what: format!("open memory of this very process on device {on}"),
            why: format!(
                "it lives on device {home}, and the driver opens no handle in the process that made it; open it there"
            ),
        });
    }
    // Several regions of one allocation have the same handle, and each owner answers for its own.
    for kept in &exported {
        if let Some(range) = kept.part(handle) {
            return Ok(Some(RawMapping { range, hold: Hold::Own(Arc::clone(kept)) }));
        }
    }
    Err(Error::InvalidRegion(format!(
        "{} bytes at offset {} do not lie in what this process exported: {} bytes at offset {}",
        handle.len, handle.offset, first.range.len, first.offset
    )))
}

/// The region in what was opened, whose size is the driver's word.
fn part(whole: DeviceRange, handle: &RawHandle) -> Result<DeviceRange> {
    whole.slice(handle.offset, handle.len).ok_or_else(|| {
        Error::InvalidRegion(format!(
            "{} bytes at offset {} were asked for, and the handle opens {} bytes",
            handle.len, handle.offset, whole.len
        ))
    })
}

fn registered() -> Result<Arc<CudaBackend>> {
    backend::registered().map_err(|reason| Error::BackendUnavailable { backend: NAME.to_owned(), reason })
}

impl RawMapping {
    /// The region: an address of this process, in the address space of its device.
    pub const fn range(&self) -> DeviceRange {
        self.range
    }

    /// Is it memory of this very process, which the driver did not have to open?
    pub const fn is_own(&self) -> bool {
        matches!(self.hold, Hold::Own(_))
    }

    /// The elements, to be read by work on `stream`. Waits for nothing: who exported the memory has.
    ///
    /// # Errors
    ///
    /// [`Error::Layout`] where the bytes are not whole, aligned elements, [`Error::WrongStream`] for a stream of another
    /// device, [`Error::Unsupported`] for one of another context than the device's primary one.
    pub fn view<T: Element>(&self, stream: &Arc<CudaStream>) -> Result<CudaMapped<'_, T>> {
        self.check_elements::<T>()?;
        // SAFETY: mapped while `self` is borrowed, and made of whole elements.
        unsafe { stream.view(self.range) }
    }

    /// The elements, to be read and written by work on `stream`.
    ///
    /// # Errors
    ///
    /// As [`view`](Self::view).
    pub fn view_mut<T: Element>(&mut self, stream: &Arc<CudaStream>) -> Result<CudaMappedMut<'_, T>> {
        self.check_elements::<T>()?;
        // SAFETY: as above; bare handles are always opened read-write.
        unsafe { stream.view_mut(self.range) }
    }

    fn check_elements<T: Element>(&self) -> Result<()> {
        let (address, len, element) = (self.range.ptr.get(), self.range.len, size_of::<T>() as u64);
        if address.is_multiple_of(align_of::<T>() as u64) && len.is_multiple_of(element) {
            return Ok(());
        }
        Err(LayoutError::Misaligned { address, len, element }.into())
    }

    /// Closes it, as dropping does, and says what the driver says to that.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn close(mut self) -> Result<()> {
        self.hold.close()
    }
}

impl Hold {
    fn close(&mut self) -> Result<()> {
        match self {
            // A forked child has no part in what the driver holds for its parent.
            Self::Opened { backend, opened, pid } if *pid == std::process::id() => {
                opened.take().map_or(Ok(()), |opened| backend.close(opened))
            }
            Self::Opened { .. } | Self::Own(_) => Ok(()),
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Err(error) = self.close() {
            tracing::warn!(%error, "memory of a bare CUDA handle could not be closed");
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
    fn debug_does_not_show_what_opens_the_memory() {
        let shown = format!("{:?}", RawHandle::new([0xAB; IPC_HANDLE_BYTES], 512, 1000));
        assert!(shown.contains("512") && shown.contains("1000"), "{shown}");
        assert!(!shown.contains("171") && !shown.to_lowercase().contains("ab,"), "{shown}");
    }

    #[test]
    fn a_region_lies_in_what_the_handle_opens_or_is_refused() {
        let asked = |offset, len| part(whole(), &RawHandle::new([0; IPC_HANDLE_BYTES], offset, len));
        assert_eq!(asked(512, 1000).unwrap().ptr.get(), PTR + 512);
        assert_eq!(asked(4095, 1).unwrap().len, 1);
        let refused = asked(4096, 1).unwrap_err().to_string();
        assert!(
            refused.contains("1 bytes at offset 4096") && refused.contains("opens 4096 bytes"),
            "{refused}"
        );
        assert!(asked(u64::MAX, 2).is_err());
    }

    #[test]
    fn memory_without_a_bare_handle_is_said_to_have_none() {
        let refused =
            Error::NotShareable { ptr: DevicePtr::new(PTR), kind: "a pool".into(), remedy: "".into() };
        let text = has_no_bare_handle(refused).to_string();
        assert!(text.contains("a pool") && text.contains("only memory of cuMemAlloc"), "{text}");
    }
}
