//! Memory and streams of whatever backend there is, for programs that have none of their own: examples, tests, the
//! program `device-ipc`.

#![allow(unsafe_code, reason = "ranges are handed to the backend while their guard keeps them mapped")]

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::interop::{DeviceOwner, Region, ViewStream, ViewTypes};
use crate::backend::stream::{AsStream, BorrowedStream};
use crate::backend::{DeviceIpc, DeviceStream, HandleKind, TestKernels};
use crate::model::address::DeviceRange;
use crate::model::device::DeviceOrdinal;
use crate::model::error::{Error, Result};
use crate::model::tensor::{Element, LayoutError};
use crate::os::process::Owner;

/// Device memory that [`Ipc::allocate`](crate::Ipc::allocate) allocated. Dropping it frees it.
///
/// Work that was submitted before the drop may still use the memory: it finishes first, and the drop may wait for it, as
/// `cuMemFree` does. A thread that has yet to release a stream (by signalling a [`Timeline`](crate::Timeline), for example)
/// must do so before it drops a buffer.
#[derive(Debug)]
pub struct Buffer {
    backend: Arc<dyn DeviceIpc>,
    range: DeviceRange,
    process: Owner,
}

impl Buffer {
    pub(crate) fn allocate(backend: Arc<dyn DeviceIpc>, device: DeviceOrdinal, bytes: u64) -> Result<Self> {
        let range = backend.memory().allocate(device, bytes)?;
        Ok(Self { backend, range, process: Owner::current() })
    }

    pub(crate) fn allocate_as(
        backend: Arc<dyn DeviceIpc>,
        device: DeviceOrdinal,
        bytes: u64,
        kind: HandleKind,
    ) -> Result<Self> {
        let range = backend.memory().allocate_as(device, bytes, kind)?;
        Ok(Self { backend, range, process: Owner::current() })
    }

    /// The bytes.
    pub const fn range(&self) -> DeviceRange {
        self.range
    }

    pub(crate) const fn as_region(&self) -> &[DeviceRange] {
        std::slice::from_ref(&self.range)
    }

    /// The elements, to be read by work on `stream`.
    ///
    /// # Errors
    ///
    /// [`Error::Layout`] where the bytes are not whole elements.
    pub fn view<T: Element>(&self, stream: &Stream) -> Result<View<'_, T>> {
        whole_elements::<T>(self.range)?;
        // SAFETY: the buffer outlives the view, and the elements are whole.
        unsafe { stream.view(self.range) }
    }

    /// The elements, to be read and written by work on `stream`.
    ///
    /// # Errors
    ///
    /// As [`view`](Self::view).
    pub fn view_mut<T: Element>(&self, stream: &Stream) -> Result<ViewMut<'_, T>> {
        whole_elements::<T>(self.range)?;
        // SAFETY: the buffer outlives the view, and the elements are whole.
        unsafe { stream.view_mut(self.range) }
    }

    pub(crate) const fn backend(&self) -> &Arc<dyn DeviceIpc> {
        &self.backend
    }

    /// A part of the buffer as an owner of its own that keeps the whole: for sharing what lies inside an allocation.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRegion`] where the part does not lie in the buffer.
    pub fn slice(self: &Arc<Self>, offset: u64, len: u64) -> Result<BufferSlice> {
        let range = self.range.slice(offset, len).ok_or_else(|| {
            Error::InvalidRegion(format!(
                "{len} bytes at offset {offset} do not lie in a buffer of {}",
                self.range.len
            ))
        })?;
        Ok(BufferSlice { buffer: Arc::clone(self), range })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if !self.process.is_here() {
            return;
        }
        // SAFETY: the range came from `allocate`, and is freed here alone. Views borrow the buffer, so no more work is
        // submitted; `free` waits for pending work.
        if let Err(error) = unsafe { self.backend.memory().free(self.range) } {
            tracing::warn!(%error, "a buffer could not be freed");
        }
    }
}

// SAFETY: the memory is freed by drop alone.
unsafe impl DeviceOwner for Buffer {
    fn region(&self) -> Region {
        Region::new(self.backend.info().name, self.range).with_allocation(self.range)
    }
}

/// A part of a [`Buffer`].
#[derive(Clone, Debug)]
pub struct BufferSlice {
    buffer: Arc<Buffer>,
    range: DeviceRange,
}

// SAFETY: the buffer lives as long as this.
unsafe impl DeviceOwner for BufferSlice {
    fn region(&self) -> Region {
        Region { range: self.range, ..self.buffer.region() }
    }
}

/// A stream that [`Ipc::create_stream`](crate::Ipc::create_stream) created. Clones are the same stream; the last one
/// destroys it, and work that was submitted still runs.
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

    /// The device that the stream runs on.
    pub fn device(&self) -> DeviceOrdinal {
        self.as_stream().device()
    }

    /// Submits a pause of at least `time`: for demos, tests and benchmarks.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where the backend has no [`TestKernels`], else the vendor's error.
    pub fn delay(&self, time: Duration) -> Result<()> {
        self.test_kernels()?.delay(time, self.as_stream())
    }

    fn test_kernels(&self) -> Result<&dyn TestKernels> {
        let backend = &self.inner.backend;
        backend.test_kernels().ok_or_else(|| Error::Unsupported {
            backend: backend.info().name,
            what: "run a test kernel".into(),
            why: "it implements no `TestKernels`; submit a kernel of your own to the stream".into(),
        })
    }

    /// Waits on the host until everything submitted to the stream has finished.
    ///
    /// # Errors
    ///
    /// The vendor's, also of the work itself.
    pub fn synchronize(&self) -> Result<()> {
        self.inner.backend.memory().synchronize(self.as_stream())
    }
}

impl AsStream for Stream {
    fn as_stream(&self) -> BorrowedStream<'_> {
        self.inner.stream.as_borrowed()
    }
}

/// The views on a [`Stream`].
impl ViewTypes for () {
    type View<'m, T: Element> = View<'m, T>;
    type ViewMut<'m, T: Element> = ViewMut<'m, T>;
}

impl ViewStream for Stream {
    unsafe fn view<'m, T: Element>(&self, range: DeviceRange) -> Result<View<'m, T>> {
        whole_elements::<T>(range)?;
        Ok(View { range, stream: self.clone(), elements: PhantomData })
    }

    unsafe fn view_mut<'m, T: Element>(&self, range: DeviceRange) -> Result<ViewMut<'m, T>> {
        // SAFETY: what the caller promised.
        Ok(ViewMut { view: unsafe { self.view(range)? } })
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.stream.fmt(f)
    }
}

/// Elements in device memory that work on a stream reads.
#[derive(Debug)]
pub struct View<'m, T> {
    range: DeviceRange,
    stream: Stream,
    elements: PhantomData<&'m [T]>,
}

impl<T: Element> View<'_, T> {
    /// The bytes.
    pub const fn range(&self) -> DeviceRange {
        self.range
    }

    /// The number of elements.
    pub const fn len(&self) -> usize {
        self.range.len as usize / size_of::<T>()
    }

    /// Are there no elements?
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the elements to the host, after the work submitted to the stream before, and waits for that.
    ///
    /// # Errors
    ///
    /// The vendor's.
    pub fn to_vec(&self) -> Result<Vec<T>> {
        let count = self.len();
        let mut elements = Vec::<T>::with_capacity(count);
        if self.is_empty() {
            return Ok(elements);
        }
        // SAFETY: the capacity is that of `count` elements, whose bytes are all set by the read: zeroed first, as
        // uninitialised memory may not be lent as a slice. Every bit pattern is a `T`.
        unsafe {
            let bytes = elements.as_mut_ptr().cast::<u8>();
            bytes.write_bytes(0, count * size_of::<T>());
            let bytes = std::slice::from_raw_parts_mut(bytes, count * size_of::<T>());
            // The view keeps the range mapped.
            self.stream.inner.backend.memory().read(self.range, bytes, self.stream.as_stream())?;
            elements.set_len(count);
        }
        Ok(elements)
    }
}

/// Elements in device memory that work on a stream reads and writes.
#[derive(Debug)]
pub struct ViewMut<'m, T> {
    view: View<'m, T>,
}

impl<T: Element> ViewMut<'_, T> {
    /// Submits a copy of host elements to the device. They may be re-used when the call returns.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRegion`] for another number of elements than the view's, else the vendor's.
    pub fn copy_from(&mut self, elements: &[T]) -> Result<()> {
        if self.is_empty() && elements.is_empty() {
            return Ok(());
        }
        // SAFETY: a slice of plain data without padding is so many bytes.
        let bytes =
            unsafe { std::slice::from_raw_parts(elements.as_ptr().cast::<u8>(), size_of_val(elements)) };
        let (memory, range) = (self.stream.inner.backend.memory(), self.range);
        // SAFETY: the view keeps the range mapped, read-write.
        unsafe { memory.write(range, bytes, self.stream.as_stream()) }
    }

    /// Submits a copy of other elements in device memory.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRegion`] for another number of elements than the view's, else the vendor's.
    pub fn copy_from_device(&mut self, source: &View<'_, T>) -> Result<()> {
        if self.is_empty() && source.is_empty() {
            return Ok(());
        }
        let (memory, range) = (self.stream.inner.backend.memory(), self.range);
        // SAFETY: both views keep their ranges mapped, this one read-write.
        unsafe { memory.copy(range, source.range, self.stream.as_stream()) }
    }

    /// Submits setting every byte.
    ///
    /// # Errors
    ///
    /// The vendor's.
    pub fn fill_bytes(&mut self, byte: u8) -> Result<()> {
        if self.is_empty() {
            return Ok(());
        }
        let (memory, range) = (self.stream.inner.backend.memory(), self.range);
        // SAFETY: the view keeps the range mapped, read-write.
        unsafe { memory.fill(range, byte, self.stream.as_stream()) }
    }
}

impl ViewMut<'_, f32> {
    /// Submits a kernel that adds `value` to every element, in place: for demos, tests and benchmarks.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] where the backend has no [`TestKernels`], else the vendor's error.
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

pub(crate) fn whole_elements<T: Element>(range: DeviceRange) -> Result<()> {
    let element = size_of::<T>() as u64;
    let aligned = range.ptr.get().is_multiple_of(align_of::<T>() as u64);
    if !aligned || !range.len.is_multiple_of(element) {
        return Err(LayoutError::Misaligned { address: range.ptr.get(), len: range.len, element }.into());
    }
    Ok(())
}
