//! Memory and streams of any backend, for programs without an allocator of their own: examples, tests, the command line.

#![allow(unsafe_code, reason = "ranges are passed to the backend while their guard keeps them mapped")]

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use crate::backend::host_copy::read_elements;
use crate::backend::interop::{DeviceOwner, OwnedRegion, Region, ViewStream, ViewTypes};
use crate::backend::stream::{AsStream, BorrowedStream};
use crate::backend::{
    BlockedTensors, DeviceIpc, DeviceStream, Gate, MemoryUse, TestKernels, check_stream_device,
    check_stream_of, test_kernels_of,
};
use crate::model::address::{DevicePtr, DeviceRange};
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::model::tensor::{Element, LayoutError};
use crate::os::process::Owner;

/// Device memory allocated by [`Ipc::allocate`](crate::Ipc::allocate) or [`Ipc::allocate_for`](crate::Ipc::allocate_for).
/// Dropping it frees the memory.
///
/// A buffer of 0 B has the null address; it is the owner of a tensor without elements.
///
/// Work submitted before the drop may still use the memory: the memory is freed after that work, and the drop may wait for
/// it, as `cuMemFree` does. A stream that waits for the thread itself (for a signal of a [`Timeline`](crate::Timeline), for
/// example) must be released before the thread drops a buffer.
///
/// # Examples
///
/// ```
/// # fn main() -> device_ipc_core::Result<()> {
/// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
/// let ipc = device_ipc_core::Ipc::with_backend(backend);
/// let stream = ipc.create_stream(0)?;
/// let buffer = ipc.allocate(0, 16)?; // 16 B on device 0
/// buffer.view_mut(&stream)?.copy_from(&[1.0_f32, 2.0, 3.0, 4.0])?;
/// assert_eq!(buffer.view::<f32, _>(&stream)?.to_vec()?, [1.0, 2.0, 3.0, 4.0]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Buffer {
    backend: Arc<dyn DeviceIpc>,
    range: DeviceRange,
    process: Owner,
}

impl Buffer {
    /// Allocates memory of the first kind that fits the use. Without bytes, nothing is allocated.
    pub(crate) fn allocate(
        backend: Arc<dyn DeviceIpc>,
        device: DeviceOrdinal,
        bytes: u64,
        wanted: MemoryUse,
    ) -> Result<Self> {
        let range = if bytes == 0 {
            // Only checks that the device exists.
            backend.peer_access(device, device)?;
            DeviceRange::new(device, DevicePtr::NULL, 0)
        } else {
            allocate_for(&*backend, device, bytes, wanted)?
        };
        Ok(Self { backend, range, process: Owner::current() })
    }

    /// Returns the address range.
    pub const fn range(&self) -> DeviceRange {
        self.range
    }

    pub(crate) const fn as_region(&self) -> &[DeviceRange] {
        std::slice::from_ref(&self.range)
    }

    /// Returns a view of the elements for reading by work on `stream`. The type of the view depends on the stream, as for
    /// [`Mapping::view`](crate::Mapping::view).
    ///
    /// # Errors
    ///
    /// [`Error::WrongStream`] for a stream of another device; [`Error::Layout`] if the range does not consist of whole elements.
    ///
    /// # Examples
    ///
    /// ```
    /// # fn main() -> device_ipc_core::Result<()> {
    /// # let backend = device_ipc_mock::MockBackend::from_spec("devices=2").expect("a valid specification");
    /// # let ipc = device_ipc_core::Ipc::with_backend(backend);
    /// let buffer = ipc.allocate(0, 8)?;
    /// let refused = buffer.view::<f32, _>(&ipc.create_stream(1)?).map(drop);
    /// assert!(matches!(refused, Err(device_ipc_core::Error::WrongStream { .. })));
    /// # Ok(())
    /// # }
    /// ```
    pub fn view<T: Element, M: ViewTypes>(&self, stream: &impl ViewStream<M>) -> Result<M::View<'_, T>> {
        self.check_stream(stream.as_stream())?;
        check_whole_elements::<T>(self.range)?;
        // SAFETY: the buffer outlives the view, and the elements are whole.
        unsafe { stream.view(self.range) }
    }

    /// Returns a view of the elements for reading and writing by work on `stream`.
    ///
    /// # Errors
    ///
    /// As for [`view`](Self::view).
    pub fn view_mut<T: Element, M: ViewTypes>(
        &self,
        stream: &impl ViewStream<M>,
    ) -> Result<M::ViewMut<'_, T>> {
        self.check_stream(stream.as_stream())?;
        check_whole_elements::<T>(self.range)?;
        // SAFETY: the buffer outlives the view, and the elements are whole.
        unsafe { stream.view_mut(self.range) }
    }

    /// Returns a view of the bytes for reading by work on `stream`.
    ///
    /// # Errors
    ///
    /// As for [`view`](Self::view).
    pub fn view_bytes<M: ViewTypes>(&self, stream: &impl ViewStream<M>) -> Result<M::View<'_, u8>> {
        self.view(stream)
    }

    /// Copies the elements to the host after all earlier work of `stream`, and waits for the copy.
    ///
    /// # Errors
    ///
    /// As for [`view`](Self::view); [`Error::WrongStream`] for a stream of another device; [`Error::Io`] if the host has no
    /// memory for the elements; otherwise the vendor's error.
    ///
    /// # Examples
    ///
    /// ```
    /// # fn main() -> device_ipc_core::Result<()> {
    /// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
    /// # let ipc = device_ipc_core::Ipc::with_backend(backend);
    /// # let stream = ipc.create_stream(0)?;
    /// let buffer = ipc.allocate(0, 8)?;
    /// buffer.view_mut(&stream)?.copy_from(&[1.0_f32, 2.0])?;
    /// assert_eq!(buffer.to_host::<f32, _>(&stream)?, [1.0, 2.0]);
    /// assert_eq!(buffer.to_host::<u8, _>(&stream)?.len(), 8);
    /// # Ok(())
    /// # }
    /// ```
    pub fn to_host<T: Element, M>(&self, stream: &impl AsStream<M>) -> Result<Vec<T>> {
        let stream = stream.as_stream();
        self.check_stream(stream)?;
        check_whole_elements::<T>(self.range)?;
        // SAFETY: the buffer keeps the range allocated.
        unsafe { read_elements(self.backend.memory(), self.range, stream) }
    }

    fn check_stream(&self, stream: BorrowedStream<'_>) -> Result<()> {
        check_stream_of(stream, &*self.backend, self.range.device, "the buffer")
    }

    pub(crate) const fn backend(&self) -> &Arc<dyn DeviceIpc> {
        &self.backend
    }

    /// Returns an owner of a part of the buffer, which keeps the whole buffer allocated.
    ///
    /// Use it to share a part of an allocation.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRegion`] if the part exceeds the buffer.
    ///
    /// # Examples
    ///
    /// ```
    /// # fn main() -> device_ipc_core::Result<()> {
    /// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
    /// # let ipc = device_ipc_core::Ipc::with_backend(backend);
    /// let pool = std::sync::Arc::new(ipc.allocate(0, 1 << 20)?);
    /// let export = ipc.share(pool.slice(4096, 256)?).start()?;
    /// assert_eq!(export.descriptor().len(), 256);
    /// # Ok(())
    /// # }
    /// ```
    pub fn slice(self: &Arc<Self>, byte_offset: u64, len: u64) -> Result<OwnedRegion<Arc<Self>>> {
        let range = self.range.slice(byte_offset, len).ok_or_else(|| {
            Error::InvalidRegion(format!(
                "a slice of {len} B at offset {byte_offset} exceeds the buffer of {} B",
                self.range.len
            ))
        })?;
        // SAFETY: the reference keeps the buffer allocated.
        Ok(unsafe { OwnedRegion::new(Arc::clone(self), Region { range, ..self.region() }) })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if !self.process.is_here() || self.range.len == 0 {
            return;
        }
        // SAFETY: the range came from `allocate` and is freed only here. Views borrow the buffer, so no more work is
        // submitted; `free` waits for pending work.
        if let Err(error) = unsafe { self.backend.memory().free(self.range) } {
            tracing::warn!(target: crate::os::log::BACKEND, %error, "cannot free a buffer");
        }
    }
}

// SAFETY: only `drop` frees the memory.
unsafe impl DeviceOwner for Buffer {
    fn region(&self) -> Region {
        let region = Region::new(self.backend.info().name, self.range);
        if self.range.len == 0 { region } else { region.with_allocation(self.range) }
    }
}

/// A stream created by [`Ipc::create_stream`](crate::Ipc::create_stream).
///
/// Clones share the stream. Dropping the last clone destroys it; submitted work still runs.
///
/// # Examples
///
/// ```
/// # fn main() -> device_ipc_core::Result<()> {
/// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
/// # let ipc = device_ipc_core::Ipc::with_backend(backend);
/// let stream = ipc.create_stream(0)?;
/// let buffer = ipc.allocate(0, 1024)?;
/// buffer.view_mut::<u8, _>(&stream)?.fill_bytes(0)?; // does not wait
/// stream.synchronize()?; // waits until the fill has finished
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Stream {
    inner: Arc<StreamInner>,
}

struct StreamInner {
    stream: Box<dyn DeviceStream>,
    backend: Arc<dyn DeviceIpc>,
}

impl Stream {
    pub(crate) fn create(backend: Arc<dyn DeviceIpc>, device: DeviceOrdinal) -> Result<Self> {
        let stream = backend.memory().create_stream(device)?;
        Ok(Self { inner: Arc::new(StreamInner { stream, backend }) })
    }

    /// Returns the device that the stream runs on.
    pub fn device(&self) -> DeviceOrdinal {
        self.as_stream().device()
    }

    /// Makes the stream wait at this point until the gate is opened: for this project's tests.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where the device has neither timelines nor host functions; else the vendor's error.
    #[doc(hidden)]
    pub fn gate(&self) -> Result<Gate> {
        Gate::close(&self.inner.backend, self.as_stream())
    }

    fn test_kernels(&self) -> Result<&dyn TestKernels> {
        test_kernels_of(&*self.inner.backend)
    }

    /// Waits on the host until all work submitted to the stream has finished.
    ///
    /// # Errors
    ///
    /// The vendor's error, including errors of the work itself.
    pub fn synchronize(&self) -> Result<()> {
        self.inner.backend.memory().synchronize(self.as_stream())
    }
}

impl AsStream for Stream {
    fn as_stream(&self) -> BorrowedStream<'_> {
        self.inner.stream.as_borrowed()
    }
}

/// The view types of a [`Stream`].
impl ViewTypes for () {
    type View<'m, T: Element> = View<'m, T>;
    type ViewMut<'m, T: Element> = ViewMut<'m, T>;
}

impl ViewStream for Stream {
    unsafe fn view<'m, T: Element>(&self, range: DeviceRange) -> Result<View<'m, T>> {
        check_whole_elements::<T>(range)?;
        Ok(View { range, stream: self.clone(), elements: PhantomData })
    }

    unsafe fn view_mut<'m, T: Element>(&self, range: DeviceRange) -> Result<ViewMut<'m, T>> {
        // SAFETY: the caller promised it.
        Ok(ViewMut { view: unsafe { self.view(range)? } })
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.stream.fmt(f)
    }
}

/// A view of elements in device memory for reading by work on one stream.
///
/// # Examples
///
/// ```
/// # fn main() -> device_ipc_core::Result<()> {
/// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
/// # let ipc = device_ipc_core::Ipc::with_backend(backend);
/// # let stream = ipc.create_stream(0)?;
/// let (source, target) = (ipc.allocate(0, 8)?, ipc.allocate(0, 8)?);
/// source.view_mut(&stream)?.copy_from(&[1.0_f32, 2.0])?;
/// let elements = source.view::<f32, _>(&stream)?;
/// target.view_mut(&stream)?.copy_from_device(&elements)?;
/// assert_eq!((elements.len(), target.view::<f32, _>(&stream)?.to_vec()?), (2, vec![1.0, 2.0]));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct View<'m, T> {
    range: DeviceRange,
    stream: Stream,
    elements: PhantomData<&'m [T]>,
}

impl<T: Element> View<'_, T> {
    /// Returns the address range.
    pub const fn range(&self) -> DeviceRange {
        self.range
    }

    /// Returns the number of elements.
    pub const fn len(&self) -> usize {
        self.range.len as usize / size_of::<T>()
    }

    /// Returns whether there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the elements to the host after all earlier work of the stream, and waits for the copy.
    ///
    /// # Errors
    ///
    /// The vendor's error.
    pub fn to_vec(&self) -> Result<Vec<T>> {
        // SAFETY: the view keeps the range mapped.
        unsafe { read_elements(self.stream.inner.backend.memory(), self.range, self.stream.as_stream()) }
    }
}

/// A view of elements in device memory for reading and writing by work on one stream.
///
/// # Examples
///
/// ```
/// # fn main() -> device_ipc_core::Result<()> {
/// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
/// # let ipc = device_ipc_core::Ipc::with_backend(backend);
/// # let stream = ipc.create_stream(0)?;
/// let buffer = ipc.allocate(0, 8)?;
/// let mut elements = buffer.view_mut::<f32, _>(&stream)?;
/// elements.copy_from(&[1.0, 2.0])?;
/// elements.fill_bytes(0)?; // ordered after the copy by the stream
/// assert_eq!(elements.to_vec()?, [0.0, 0.0]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct ViewMut<'m, T> {
    view: View<'m, T>,
}

impl<T: Element> ViewMut<'_, T> {
    /// Submits a copy of host elements to the device. The caller may reuse them when the call returns.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRegion`] if the number of elements differs from the view's; otherwise the vendor's error.
    pub fn copy_from(&mut self, elements: &[T]) -> Result<()> {
        if self.is_empty() && elements.is_empty() {
            return Ok(());
        }
        // SAFETY: elements are plain data without padding, so all bytes of the slice are initialised.
        let bytes =
            unsafe { std::slice::from_raw_parts(elements.as_ptr().cast::<u8>(), size_of_val(elements)) };
        let (memory, range) = (self.stream.inner.backend.memory(), self.range);
        // SAFETY: the view keeps the range mapped read-write.
        unsafe { memory.write(range, bytes, self.stream.as_stream()) }
    }

    /// Submits a copy of the elements of another view.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRegion`] if the number of elements differs from the view's; otherwise the vendor's error.
    pub fn copy_from_device(&mut self, source: &View<'_, T>) -> Result<()> {
        if self.is_empty() && source.is_empty() {
            return Ok(());
        }
        let (memory, range) = (self.stream.inner.backend.memory(), self.range);
        // SAFETY: both views keep their ranges mapped, and this one is mapped read-write.
        unsafe { memory.copy(range, source.range, self.stream.as_stream()) }
    }

    /// Submits copies of block `sources[i]` to block `destinations[i]` in all pairs of tensors, such as the layers of two KV caches.
    /// A block is `block` adjacent elements; the two tensors of a pair may have different numbers of blocks. No destination may be
    /// named twice. CUDA copies all blocks with one kernel for 64 tensors and 250 blocks; the first call on a device loads it, for
    /// which the driver may wait until all streams of the device are idle. A call without blocks only loads it.
    ///
    /// All views are for the stream of the first one that is written.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRegion`] where a tensor lacks a block, where a block is a destination twice, and where there are not as many
    /// destinations as sources;
    /// [`Error::WrongStream`] for views of several devices. Nothing is copied then. Otherwise the vendor's error.
    ///
    /// # Examples
    ///
    /// ```
    /// # use device_ipc_core::ViewMut;
    /// # fn main() -> device_ipc_core::Result<()> {
    /// # let backend = device_ipc_mock::MockBackend::from_spec("devices=1").expect("a valid specification");
    /// # let ipc = device_ipc_core::Ipc::with_backend(backend);
    /// # let stream = ipc.create_stream(0)?;
    /// let (prefill, decode) = (ipc.allocate(0, 16)?, ipc.allocate(0, 24)?);
    /// prefill.view_mut(&stream)?.copy_from(&[1.0_f32, 2.0, 3.0, 4.0])?;
    /// decode.view_mut::<f32, _>(&stream)?.fill_bytes(0)?;
    /// let mut layers = [(decode.view_mut::<f32, _>(&stream)?, prefill.view(&stream)?)];
    /// ViewMut::copy_blocks(&mut layers, 2, &[0, 1], &[2, 0])?;
    /// assert_eq!(layers[0].0.to_vec()?, [3.0, 4.0, 0.0, 0.0, 1.0, 2.0]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn copy_blocks(
        tensors: &mut [(Self, View<'_, T>)],
        block: usize,
        sources: &[u32],
        destinations: &[u32],
    ) -> Result<()> {
        let Some((first, _)) = tensors.first() else { return Ok(()) };
        let stream = first.stream.clone();
        let stride = (block as u64).saturating_mul(size_of::<T>() as u64);
        let mut blocked = Vec::with_capacity(tensors.len());
        for (to, of) in tensors.iter() {
            check_stream_device(stream.as_stream(), "the destination", to.range.device)?;
            check_stream_device(stream.as_stream(), "the source", of.range.device)?;
            blocked.push(BlockedTensors {
                dst: to.range,
                dst_stride: stride,
                src: of.range,
                src_stride: stride,
            });
        }
        let memory = stream.inner.backend.memory();
        // SAFETY: the views keep their ranges mapped, the first of each pair read-write.
        unsafe { memory.copy_blocks(&blocked, stride, sources, destinations, stream.as_stream()) }
    }

    /// Submits a fill of every byte with `byte`.
    ///
    /// # Errors
    ///
    /// The vendor's error.
    pub fn fill_bytes(&mut self, byte: u8) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let (memory, range) = (self.stream.inner.backend.memory(), self.range);
        // SAFETY: the view keeps the range mapped read-write.
        unsafe { memory.fill(range, byte, self.stream.as_stream()) }
    }
}

impl ViewMut<'_, f32> {
    /// Submits a kernel that adds `value` to every element, in place: for this project's demo, tests and benchmarks.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where the backend has no [`TestKernels`], else the vendor's error.
    #[doc(hidden)]
    pub fn add(&mut self, value: f32) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let kernels = self.stream.test_kernels()?;
        // SAFETY: the view keeps the range mapped, read-write; it was made for a stream of the range's device.
        unsafe { kernels.add_f32(self.range, value, self.stream.as_stream()) }
    }
}

impl<'m, T> std::ops::Deref for ViewMut<'m, T> {
    type Target = View<'m, T>;

    fn deref(&self) -> &View<'m, T> {
        &self.view
    }
}

/// Checks that a range consists of whole, aligned elements.
pub(crate) fn check_whole_elements<T: Element>(range: DeviceRange) -> Result<()> {
    let element = size_of::<T>() as u64;
    let aligned = range.ptr.get().is_multiple_of(align_of::<T>() as u64);
    if !aligned || !range.len.is_multiple_of(element) {
        return Err(LayoutError::Misaligned { address: range.ptr.get(), len: range.len, element }.into());
    }
    Ok(())
}

/// Allocates memory of the first kind that fits the use and that the device supports.
fn allocate_for(
    backend: &dyn DeviceIpc,
    device: DeviceOrdinal,
    bytes: u64,
    wanted: MemoryUse,
) -> Result<DeviceRange> {
    let memory = backend.memory();
    if wanted.is_any() {
        return memory.allocate(device, bytes);
    }
    let kinds = backend.handle_kinds();
    if let Some(kind) = wanted.requested_kind()
        && kinds.iter().all(|info| info.kind != kind || wanted.unmet(info).is_none())
    {
        return memory.allocate_as(device, bytes, kind);
    }
    let mut refusals = Vec::new();
    for info in kinds.iter().filter(|info| wanted.requested_kind().is_none_or(|kind| kind == info.kind)) {
        let why = match wanted.unmet(info) {
            Some(unmet) => unmet.to_owned(),
            None => match memory.allocate_as(device, bytes, info.kind) {
                Err(Error::Unsupported { why, .. }) => why,
                allocated => return allocated,
            },
        };
        refusals.push(format!("{}: {why}", info.name));
    }
    Err(Error::Unsupported {
        backend: backend.info().name,
        what: format!("allocate memory {wanted} on device {device}"),
        why: format!("no kind of memory fits ({})", refusals.join("; ")),
    })
}
