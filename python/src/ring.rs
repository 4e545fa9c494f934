//! Rings: memory that is shared once and written repeatedly.

use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Poll;

use device_ipc::{Access, DeviceRange, Ipc};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::dlpack;
use crate::error::{OrRaise as _, exception};
use crate::export::{Changes, Descriptor, Holder, parse};
use crate::open::Place;
use crate::session::{access, ipc, ipc_for_users, not_picklable};
use crate::share::Source;
use crate::stream::StreamArg;
use crate::tensor::{Keeper, Tensor, TensorData, to_dlpack};
use crate::wait::{self, DEFAULT, Waiting};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn closed(what: &str) -> PyErr {
    PyValueError::new_err(format!("the {what} is closed"))
}

/// A ring with what its slots need.
struct RingInner {
    ring: Mutex<device_ipc::Ring>,
    waiting: Waiting,
    /// Of the slot that is being written.
    writing: Mutex<Weak<()>>,
    ipc: Ipc,
    backend: &'static str,
    /// For calls of a host that has no stream.
    stream: device_ipc::Stream,
    keeper: Keeper,
}

/// The writer of a ring. Readers open its text, `str(ring)`, with `join`.
#[pyclass(frozen, module = "device_ipc")]
pub(crate) struct Ring {
    inner: Mutex<Option<Arc<RingInner>>>,
    descriptor: device_ipc::Descriptor,
}

impl Ring {
    fn inner(&self) -> PyResult<Arc<RingInner>> {
        lock(&self.inner).clone().ok_or_else(|| closed("ring"))
    }
}

#[pymethods]
impl Ring {
    /// Shares a tensor's memory as slots of equal size.
    #[new]
    #[pyo3(signature = (memory, *, slots=2, access="rw", allow_users=Vec::new()))]
    fn new(
        py: Python<'_>,
        memory: &Bound<'_, PyAny>,
        slots: u32,
        access: &str,
        allow_users: Vec<u32>,
    ) -> PyResult<Self> {
        let access = self::access(Some(access))?.unwrap_or(Access::ReadWrite);
        let source = Source::read(py, memory)?
            .ok_or_else(|| PyTypeError::new_err("the memory of a ring is a tensor of device memory"))?;
        let ipc = ipc_for_users(py, Some(source.backend), &allow_users)?;
        let device = source.device;
        let (owner, keeper) = source.kept();
        let made = py.detach(|| -> device_ipc::Result<_> {
            let stream = ipc.create_stream(device)?;
            Ok((ipc.ring(owner).slots(slots).access(access).start()?, stream))
        });
        let (ring, stream) = made.or_raise(py)?;
        let descriptor = ring.descriptor().clone();
        let backend = ipc.backend().info().name;
        let inner = RingInner {
            ring: Mutex::new(ring),
            waiting: Waiting::default(),
            writing: Mutex::default(),
            ipc,
            backend,
            stream,
            keeper,
        };
        Ok(Self { inner: Mutex::new(Some(Arc::new(inner))), descriptor })
    }

    /// The descriptor, which readers open.
    #[getter]
    fn descriptor(&self) -> Descriptor {
        Descriptor { descriptor: self.descriptor.clone() }
    }

    /// The number of publications so far.
    #[getter]
    fn sequence(&self, py: Python<'_>) -> PyResult<u64> {
        let inner = self.inner()?;
        Ok(py.detach(|| lock(&inner.ring).sequence()))
    }

    /// The number of readers.
    #[getter]
    fn readers(&self, py: Python<'_>) -> PyResult<usize> {
        let inner = self.inner()?;
        Ok(py.detach(|| lock(&inner.ring).readers()))
    }

    /// Returns the processes that hold a lease on the memory.
    fn holders(&self, py: Python<'_>) -> PyResult<Vec<Holder>> {
        let inner = self.inner()?;
        Ok(py.detach(|| lock(&inner.ring).holders()).iter().map(Holder::from).collect())
    }

    /// Waits until there are this many readers.
    #[pyo3(signature = (count=1, timeout=None))]
    fn wait_readers(&self, py: Python<'_>, count: usize, timeout: Option<f64>) -> PyResult<()> {
        let inner = self.inner()?;
        let watch = py.detach(|| lock(&inner.ring).watch());
        wait::wait(py, wait::limit(timeout)?, |slice| watch.wait_readers(count, slice))
    }

    /// Returns a descriptor for `wait_readers(timeout=0)`.
    fn changes(&self, py: Python<'_>) -> PyResult<Changes> {
        let inner = self.inner()?;
        Ok(Changes(py.detach(|| lock(&inner.ring).changes())))
    }

    /// A descriptor that becomes readable when `write(timeout=0)`, which has found readers in the slot, may find none.
    fn fileno(&self, py: Python<'_>) -> PyResult<RawFd> {
        let inner = self.inner()?;
        Ok(py.detach(|| lock(&inner.ring).as_raw_fd()))
    }

    /// Returns the next slot for writing. With a stream, that stream waits until the readers have released the slot; without
    /// one, this call waits.
    #[pyo3(signature = (stream=None, *, timeout=None))]
    fn write(
        &self,
        py: Python<'_>,
        stream: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<RingWriteSlot> {
        let inner = self.inner()?;
        let limit = wait::limit(timeout)?;
        let stream = StreamArg::given_or_current(py, stream, &inner.ipc, inner.stream.device())?;
        if lock(&inner.writing).strong_count() > 0 {
            return Err(PyValueError::new_err(
                "a slot of the ring is being written; publish or drop it first",
            ));
        }
        let taken = if let Some(stream) = &stream {
            let take = || lock(&inner.ring).write(stream).map(|slot| (slot.sequence(), slot.range()));
            py.detach(take).or_raise(py)?
        } else {
            let attempt = || {
                let mut ring = lock(&inner.ring);
                Ok(ring.try_write(&inner.stream)?.map(|slot| (slot.sequence(), slot.range())))
            };
            let call = |slice| {
                let mut ring = lock(&inner.ring);
                ring.wait_writable(slice)?;
                ring.write(&inner.stream).map(|slot| (slot.sequence(), slot.range()))
            };
            let waiting = inner.waiting.begin(limit, "Ring.write")?;
            let taken =
                wait::try_or_wait(py, limit, "the release of the slot by the readers", attempt, call)?;
            drop(waiting);
            py.detach(|| inner.stream.synchronize()).or_raise(py)?;
            taken
        };
        let (writing, (sequence, range)) = (Arc::new(()), taken);
        *lock(&inner.writing) = Arc::downgrade(&writing);
        Ok(RingWriteSlot { inner: Mutex::new(Some((inner, writing))), sequence, range, stream })
    }

    /// Ends the ring: readers receive the publications so far. Waits until no process holds the memory.
    #[pyo3(signature = (timeout=None))]
    fn close(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<()> {
        let (py, limit) = (slf.py(), wait::limit(timeout)?);
        let Some(inner) = lock(&slf.get().inner).take() else { return Ok(()) };
        wait::wake_tasks(slf)?;
        let inner = Arc::into_inner(inner).ok_or_else(|| {
            PyValueError::new_err("a slot of the ring is in use; publish or drop it before close()")
        })?;
        let ring = inner.ring.into_inner().unwrap_or_else(PoisonError::into_inner);
        wait::aside(py, move || ring.close(limit))?.or_raise(py)
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*exception))]
    fn __exit__(slf: &Bound<'_, Self>, exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        if exception.get_item(0).is_ok_and(|class| !class.is_none()) {
            drop(lock(&slf.get().inner).take());
            return wait::wake_tasks(slf);
        }
        Self::close(slf, None)
    }

    fn __str__(&self) -> String {
        self.descriptor.to_string()
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("a Ring", "send its text, str(ring)"))
    }

    fn __repr__(&self) -> String {
        let slots = self.descriptor.ring().map_or(0, |ring| ring.slots());
        format!(
            "<device_ipc.Ring of {slots} slots, {} B, {}>",
            self.descriptor.len(),
            self.descriptor.backend()
        )
    }
}

/// A slot of a ring for writing. Publishing it passes it to the readers; as a context manager, the end of the block publishes
/// it, unless the block failed.
#[pyclass(frozen, module = "device_ipc")]
pub(crate) struct RingWriteSlot {
    /// `None` after the publication, so that a variable that still names the slot does not keep the ring open.
    inner: Mutex<Option<(Arc<RingInner>, Arc<()>)>>,
    sequence: u64,
    range: DeviceRange,
    stream: Option<StreamArg>,
}

impl RingWriteSlot {
    fn inner(&self) -> PyResult<Arc<RingInner>> {
        let ended =
            || format!("sequence {} of the ring was published already, or its block failed", self.sequence);
        let inner = lock(&self.inner).as_ref().map(|(inner, _)| Arc::clone(inner));
        inner.ok_or_else(|| PyValueError::new_err(ended()))
    }

    fn data(&self) -> PyResult<TensorData> {
        let inner = self.inner()?;
        Ok(TensorData::bytes(inner.backend, self.range, true, inner.keeper.clone()))
    }
}

#[pymethods]
impl RingWriteSlot {
    /// The sequence that the slot will have.
    #[getter]
    fn sequence(&self) -> u64 {
        self.sequence
    }

    /// The bytes of the slot.
    #[getter]
    fn tensor(&self) -> PyResult<Tensor> {
        Ok(Tensor { data: self.data()? })
    }

    /// Publishes the slot: when the stream of `write` reaches this point, or at once where there is none.
    fn publish(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner()?;
        let published = py.detach(|| {
            let mut ring = lock(&inner.ring);
            if ring.sequence() != self.sequence {
                return Ok(false);
            }
            // The same slot as before: it was not published.
            match &self.stream {
                Some(stream) => ring.write(stream)?.publish(stream),
                None => ring.write(&inner.stream)?.publish_now(),
            }
            .map(|()| true)
        });
        let published = published.or_raise(py)?;
        drop(lock(&self.inner).take());
        if published {
            return Ok(());
        }
        Err(PyValueError::new_err(format!("sequence {} of the ring was published already", self.sequence)))
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*exception))]
    fn __exit__(&self, py: Python<'_>, exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        if exception.get_item(0).is_ok_and(|class| !class.is_none()) {
            drop(lock(&self.inner).take());
            return Ok(());
        }
        self.publish(py)
    }

    /// Returns a DLPack capsule of the bytes.
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

    /// Returns the DLPack device.
    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        dlpack::device_of(self.inner()?.backend, self.range.device.get())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("a slot of a ring", "send the ring's text, str(ring)"))
    }

    fn __repr__(&self) -> String {
        format!("<device_ipc.RingWriteSlot {}, {} B>", self.sequence, self.range.len)
    }
}

/// A reader with what its slots need.
struct ReaderInner {
    reader: Mutex<device_ipc::RingReader>,
    waiting: Waiting,
    ipc: Ipc,
    backend: &'static str,
    is_writable: bool,
}

/// A reader of a ring; an iterator over its publications until the writer closes the ring.
#[pyclass(frozen, module = "device_ipc")]
pub(crate) struct RingReader {
    inner: Mutex<Option<Arc<ReaderInner>>>,
}

impl RingReader {
    fn inner(&self) -> PyResult<Arc<ReaderInner>> {
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
    #[pyo3(signature = (timeout=None))]
    fn next(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Option<RingReadSlot>> {
        let inner = self.inner()?;
        let limit = wait::limit(timeout)?;
        let attempt = || match lock(&inner.reader).try_next()? {
            Poll::Ready(slot) => Ok(Some(slot)),
            Poll::Pending => Ok(None),
        };
        let waiting = inner.waiting.begin(limit, "RingReader.next")?;
        let slot = wait::try_or_wait(py, limit, "the next publication", attempt, |slice| {
            lock(&inner.reader).next(slice)
        })?;
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
    fn next_ahead(&self, py: Python<'_>, stream: &Bound<'_, PyAny>) -> PyResult<RingReadSlot> {
        let inner = self.inner()?;
        let device = py.detach(|| lock(&inner.reader).device());
        let stream = StreamArg::parse(stream, &inner.ipc, device)?;
        let slot = py.detach(|| lock(&inner.reader).next_ahead(&stream)).or_raise(py)?;
        Ok(RingReadSlot::new(inner, slot, Some(stream)))
    }

    /// Releases the memory. Slots and tensors that are in use keep it mapped.
    fn close(slf: &Bound<'_, Self>) -> PyResult<()> {
        drop(lock(&slf.get().inner).take());
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
    slot: Mutex<Option<device_ipc::RingReadSlot>>,
    range: DeviceRange,
    stream: Option<StreamArg>,
    reader: Arc<ReaderInner>,
}

impl ReadSlotInner {
    /// For memory that the host reads, waits until the stream has reached the publication.
    pub(crate) fn wait_ready(&self, py: Python<'_>, tensor: &TensorData) -> PyResult<()> {
        if tensor.backend == "mock"
            && let Some(stream) = &self.stream
        {
            stream.synchronize(py)?;
        }
        py.detach(|| lock(&self.slot).as_ref().map_or(Ok(()), device_ipc::RingReadSlot::check)).or_raise(py)
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
    fn new(reader: Arc<ReaderInner>, slot: device_ipc::RingReadSlot, stream: Option<StreamArg>) -> Self {
        let (sequence, range) = (slot.sequence(), slot.range());
        Self {
            inner: Mutex::new(Some(Arc::new(ReadSlotInner {
                slot: Mutex::new(Some(slot)),
                range,
                stream,
                reader,
            }))),
            sequence,
        }
    }

    fn inner(&self) -> PyResult<Arc<ReadSlotInner>> {
        let released =
            || PyValueError::new_err(format!("sequence {} of the ring was released", self.sequence));
        lock(&self.inner).clone().ok_or_else(released)
    }

    fn data(&self) -> PyResult<TensorData> {
        let inner = self.inner()?;
        let (backend, is_writable) = (inner.reader.backend, inner.reader.is_writable);
        Ok(TensorData::bytes(backend, inner.range, is_writable, Keeper::ReadSlot(inner)))
    }
}

#[pymethods]
impl RingReadSlot {
    /// The sequence of the publication.
    #[getter]
    fn sequence(&self) -> u64 {
        self.sequence
    }

    /// The bytes of the slot.
    #[getter]
    fn tensor(&self) -> PyResult<Tensor> {
        Ok(Tensor { data: self.data()? })
    }

    /// Raises an exception if the slot was never published or may have been overwritten. Call it when the work that reads the
    /// slot has finished.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let inner = self.inner()?;
        py.detach(|| lock(&inner.slot).as_ref().map_or(Ok(()), device_ipc::RingReadSlot::check)).or_raise(py)
    }

    /// Lets the writer reuse the slot: when the stream reaches this point, or at once where there is none. By default it is the
    /// stream of `next_ahead`, or the current stream of the framework in use.
    #[pyo3(signature = (stream=None))]
    fn release(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let Ok(inner) = self.inner() else { return Ok(()) };
        let device = inner.range.device;
        let other = match (stream, &inner.stream) {
            (None, Some(_)) => None,
            _ => StreamArg::given_or_current(py, stream, &inner.reader.ipc, device)?,
        };
        let released = py.detach(|| {
            let Some(slot) = lock(&inner.slot).take() else { return Ok(()) };
            match other.as_ref().or(inner.stream.as_ref()) {
                Some(stream) => slot.release(stream),
                None => slot.release_now(),
            }
        });
        released.map_err(|failed| {
            let error = exception(py, failed.error());
            *lock(&inner.slot) = Some(failed.into_inner());
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

    /// Returns a DLPack capsule of the bytes.
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
/// `pulled` permits copies over the network, of each publication: `None` if the ring cannot be opened, `True` always. The writer's
/// process has to have called `enable_remote`. `timeout` is then also the longest silence of the writer's process, and of this one.
#[pyfunction]
#[pyo3(signature = (descriptor, *, device=None, access=None, pulled=false, timeout=Some(DEFAULT)))]
pub(crate) fn join(
    py: Python<'_>,
    descriptor: &Bound<'_, PyAny>,
    device: Option<&Bound<'_, PyAny>>,
    access: Option<&str>,
    pulled: Option<bool>,
    timeout: Option<f64>,
) -> PyResult<RingReader> {
    let access = self::access(access)?;
    let descriptor = parse(py, descriptor)?;
    let ipc = ipc(py, Some(descriptor.backend()))?;
    let place = Place::parse(py, &ipc, device, &descriptor)?;
    let backend = ipc.backend().info().name;
    let session = ipc.clone();
    let call = move |timeout| {
        let mut builder = session.open_ring(&descriptor).timeout(timeout);
        if let Some(access) = access {
            builder = builder.access(access);
        }
        builder = match pulled {
            None => builder.or_pulled(),
            Some(true) => builder.pulled(),
            Some(false) => builder,
        };
        match &place {
            Place::Home => builder.at_home(),
            Place::On(device) => builder.on_device(*device),
            Place::Mapped(map) => builder.on_mapped_devices(map),
        }
    };
    let limit = wait::limit(timeout)?;
    let reader = match pulled {
        Some(false) => wait::once(py, limit, call)?,
        // The limit is also that of the later silence of the writer, and not divided.
        _ => wait::aside(py, move || call(limit))?.or_raise(py)?,
    };
    let is_writable = reader.access() == Access::ReadWrite;
    let inner =
        ReaderInner { reader: Mutex::new(reader), waiting: Waiting::default(), ipc, backend, is_writable };
    Ok(RingReader { inner: Mutex::new(Some(Arc::new(inner))) })
}
