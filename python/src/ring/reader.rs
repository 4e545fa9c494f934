//! The readers of rings.

use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;

use device_ipc::{Access, DeviceRange, Ipc, TensorLayout};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::turns::{Held, HeldSlot};
use super::{closed, lock};
use crate::error::{OrRaise as _, exception};
use crate::export::parse;
use crate::open::Place;
use crate::session::{access, check_fork, copy_policy, ipc, not_picklable, note_use};
use crate::stream::StreamArg;
use crate::tensor::{Keeper, Tensor, TensorData, to_dlpack, to_numpy};
use crate::wait::{self, Waiting};
use crate::{backend, dlpack};

/// A reader with what its slots need.
pub(super) struct ReaderInner {
    reader: Mutex<device_ipc::RingReader>,
    waiting: Waiting,
    /// Ends the waits of other threads.
    closed: AtomicBool,
    pub(super) held: Held,
    ipc: Ipc,
    backend: &'static str,
    /// The tensor in each slot.
    layout: Option<TensorLayout>,
    is_writable: bool,
}

/// A reader of a ring; an iterator over its publications until the writer closes the ring.
#[pyclass(frozen, weakref, module = "device_ipc")]
pub(crate) struct RingReader {
    inner: Mutex<Option<Arc<ReaderInner>>>,
}

impl RingReader {
    fn inner(&self) -> PyResult<Arc<ReaderInner>> {
        check_fork()?;
        lock(&self.inner).clone().ok_or_else(|| closed("reader"))
    }
}

#[pymethods]
impl RingReader {
    /// The sequence of the next slot.
    #[getter]
    fn sequence(&self, py: Python<'_>) -> PyResult<u64> {
        let inner = self.inner()?;
        Ok(py.detach(|| lock(&inner.reader).sequence()))
    }

    /// Waits for the next publication, and returns its slot. `None` when the writer has closed the ring and every publication
    /// has been returned.
    ///
    /// `timeout` is in seconds; 0 makes one attempt, `None` is no limit. Raises `TimeoutError` after it, `GoneError` if
    /// the writer's process has ended, and `ValueError` if the reader is closed or holds all slots.
    #[pyo3(signature = (timeout=None))]
    fn next(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<RingReadSlot>> {
        let inner = self.inner()?;
        let limit = wait::limit(timeout)?;
        let attempt = || match lock(&inner.reader).try_next()? {
            Poll::Ready(slot) => Ok(Some(slot)),
            Poll::Pending => Ok(None),
        };
        let waiting = inner.waiting.begin(limit, "RingReader.next")?;
        let slot = if limit.is_zero() {
            wait::try_once(py, "the next publication", attempt)?
        } else {
            wait::unless(py, limit, "reader", &inner.closed, |slice| {
                let next = lock(&inner.reader).next(slice);
                inner.held.wait_for_others(next, slice)
            })?
        };
        drop(waiting);
        Ok(slot.map(|slot| RingReadSlot::new(inner, slot, None)))
    }

    /// A descriptor that becomes readable when `next(timeout=0)`, which has found no publication, may find one.
    fn fileno(&self, py: Python<'_>) -> PyResult<RawFd> {
        let inner = self.inner()?;
        Ok(py.detach(|| lock(&inner.reader).as_raw_fd()))
    }

    /// Returns the next slot ahead of its publication: the stream waits for it. The slot may never be published; use what was
    /// read only after the work has finished and `check` or `release` of the slot has raised no exception.
    ///
    /// Raises `UnsupportedError` if the ring has no timelines, `GoneError` at the end of the ring, and `PlacementError`
    /// or `TypeError` for a `stream` that is none of the reader's device.
    fn next_ahead(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<RingReadSlot> {
        let inner = self.inner()?;
        let device = py.detach(|| lock(&inner.reader).device());
        let stream = Arc::new(StreamArg::parse(stream, &inner.ipc, device)?);
        let slot = py.detach(|| lock(&inner.reader).next_ahead(&*stream)).or_raise(py)?;
        Ok(RingReadSlot::new(inner, slot, Some(stream)))
    }

    /// Releases the memory. Slots and tensors that are in use keep it mapped.
    fn close(slf: &Bound<'_, Self>) -> PyResult<()> {
        check_fork()?;
        let inner = lock(&slf.get().inner).take();
        if let Some(inner) = inner {
            inner.closed.store(true, Ordering::Release);
        }
        wait::wake_tasks(slf)
    }

    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<RingReadSlot>> {
        self.next(py, None)
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(slf: &Bound<'_, Self>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        Self::close(slf)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("a RingReader", "send the ring's text, and join it there"))
    }

    fn __repr__(&self) -> String {
        let state = if self.inner().is_ok() { "" } else { ", closed" };
        format!("<device_ipc.RingReader{state}>")
    }
}

/// A slot with what its tensors need; the reader outlives them, and keeps the memory mapped.
pub(crate) struct ReadSlotInner {
    slot: Mutex<Option<(device_ipc::RingReadSlot, HeldSlot)>>,
    range: DeviceRange,
    stream: Option<Arc<StreamArg>>,
    reader: Arc<ReaderInner>,
}

impl ReadSlotInner {
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| lock(&self.slot).as_ref().map_or(Ok(()), |(slot, _)| slot.check())).or_raise(py)
    }

    /// For memory that the host reads, waits until the stream has reached the publication.
    pub(crate) fn wait_ready(&self, py: Python<'_>, tensor: &TensorData) -> PyResult<()> {
        if backend::is_host(tensor.backend)
            && let Some(stream) = &self.stream
        {
            stream.synchronize(py)?;
        }
        self.check(py)
    }
}

/// A slot of a ring for reading. Releasing it lets the writer reuse it; as a context manager, the end of the block releases it, in
/// the order of the current stream.
#[pyclass(frozen, module = "device_ipc")]
pub(crate) struct RingReadSlot {
    /// `None` after the release, so that a variable that still names the slot does not keep the memory mapped.
    inner: Mutex<Option<Arc<ReadSlotInner>>>,
    sequence: u64,
}

impl RingReadSlot {
    fn new(reader: Arc<ReaderInner>, slot: device_ipc::RingReadSlot, stream: Option<Arc<StreamArg>>) -> Self {
        let (sequence, range) = (slot.sequence(), slot.range());
        Self {
            inner: Mutex::new(Some(Arc::new(ReadSlotInner {
                slot: Mutex::new(Some((slot, HeldSlot::of(&reader)))),
                range,
                stream,
                reader,
            }))),
            sequence,
        }
    }

    fn inner(&self) -> PyResult<Arc<ReadSlotInner>> {
        check_fork()?;
        let released =
            || PyValueError::new_err(format!("sequence {} of the ring was released", self.sequence));
        lock(&self.inner).clone().ok_or_else(released)
    }

    fn data(&self) -> PyResult<TensorData> {
        let inner = self.inner()?;
        let (backend, is_writable) = (inner.reader.backend, inner.reader.is_writable);
        let reader = Arc::clone(&inner.reader);
        Ok(TensorData::in_slot(
            backend,
            inner.range,
            reader.layout.as_ref(),
            is_writable,
            Keeper::ReadSlot(inner),
        ))
    }
}

#[pymethods]
impl RingReadSlot {
    /// The sequence of the publication.
    #[getter]
    fn sequence(&self) -> u64 {
        self.sequence
    }

    /// The tensor in the slot.
    #[getter]
    fn tensor(&self) -> PyResult<Tensor> {
        Ok(Tensor { data: self.data()? })
    }

    /// Raises an exception if the slot was never published or may have been overwritten. Call it when the work that reads the
    /// slot has finished.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.inner()?.check(py)
    }

    /// Lets the writer reuse the slot: when the stream reaches this point, or at once where there is none. By default it is the
    /// stream of `next_ahead`, or the current stream of the framework in use.
    ///
    /// Raises `Error` if the slot was never published or may have been overwritten, and `PlacementError` or `TypeError`
    /// for a `stream` that is none of the memory's device.
    #[pyo3(signature = (stream=None))]
    fn release(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        check_fork()?;
        let Ok(inner) = self.inner() else { return Ok(()) };
        let device = inner.range.device;
        let other = match (stream, &inner.stream) {
            (None, Some(_)) => None,
            _ => StreamArg::given_or_current(py, stream, &inner.reader.ipc, device)?,
        };
        let Some((slot, held)) = py.detach(|| lock(&inner.slot).take()) else { return Ok(()) };
        let released = py.detach(|| match other.as_ref().or(inner.stream.as_deref()) {
            Some(stream) => slot.release(stream),
            None => slot.release_now(),
        });
        released.map_err(|failed| {
            let error = exception(py, failed.error());
            *lock(&inner.slot) = Some((failed.into_inner(), held));
            error
        })?;
        drop(lock(&self.inner).take());
        Ok(())
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.release(py, None)
    }

    /// Returns a DLPack capsule of the tensor.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        to_dlpack(py, &self.data()?, stream, max_version, dl_device, copy)
    }

    /// Returns a NumPy array of the memory, without a copy; for the mock only.
    ///
    /// Raises `TypeError` if the memory is that of a device.
    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        to_numpy(slf, &slf.get().data()?, dtype, copy)
    }

    /// Returns the DLPack device.
    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        let inner = self.inner()?;
        dlpack::device_of(inner.reader.backend, inner.range.device.get())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("a slot of a ring", "send the ring's text, str(ring)"))
    }

    fn __repr__(&self) -> String {
        let state = if self.inner().is_ok() { "" } else { ", released" };
        format!("<device_ipc.RingReadSlot {}{state}>", self.sequence)
    }
}

/// Opens a ring of another process as a reader.
///
/// `copy` is the condition under which each publication is copied over the network, as in `open`: `"never"`, `"pulled-if-needed"` if
/// the ring cannot be opened, or `"pulled"`. The writer's process has to have called `enable_remote`. `timeout` is then also the longest silence of the writer's process, and of this one.
///
/// `descriptor` is the ring's text, its bytes or a `Descriptor`. `device` is a device here or a dict, as in `open`; by
/// default the ring's home device. `access` is `"r"` or `"rw"`; by default that of the ring. `timeout` limits the wait
/// for the writer's process, in seconds; `None` is no limit.
///
/// Raises `StaleError` if the ring has ended, `GoneError` if its process has, `PlacementError` if the device cannot reach
/// the memory, `NotPermittedError` if this user or the access is not permitted, `TimeoutError` after `timeout` seconds,
/// and `DescriptorError` if the text names no ring.
#[pyfunction]
#[pyo3(signature = (descriptor, *, device=None, access=None, copy="never", timeout=30.0))]
pub(crate) fn join(
    py: Python<'_>,
    descriptor: &Bound<'_, PyAny>,
    device: Option<&Bound<'_, PyAny>>,
    access: Option<&str>,
    copy: &str,
    timeout: Option<f64>,
) -> PyResult<RingReader> {
    let (access, copy) = (self::access(access)?, copy_policy(copy)?);
    let descriptor = parse(py, descriptor)?;
    let ipc = ipc(py, Some(descriptor.backend()))?;
    let place = Place::parse(py, &ipc, device, &descriptor)?;
    let backend = ipc.backend().info().name;
    // The limit is also that of the later silence of the writer.
    let limit = wait::limit(timeout)?;
    let call = || {
        let mut builder = ipc.open_ring(&descriptor).timeout(limit).copy(copy);
        if let Some(access) = access {
            builder = builder.access(access);
        }
        match &place {
            Place::Home => builder.at_home(),
            Place::On(device) => builder.on_device(*device),
            Place::Mapped(map) => builder.on_mapped_devices(map),
        }
    };
    let reader = wait::interruptible(py, call)?.or_raise(py)?;
    let layout = reader.layout().cloned();
    let is_writable = reader.access() == Access::ReadWrite;
    note_use();
    let inner = ReaderInner {
        reader: Mutex::new(reader),
        waiting: Waiting::default(),
        closed: AtomicBool::new(false),
        held: Held::default(),
        ipc,
        backend,
        layout,
        is_writable,
    };
    Ok(RingReader { inner: Mutex::new(Some(Arc::new(inner))) })
}
