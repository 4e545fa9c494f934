//! Rings: memory that is shared once and written repeatedly.
//!
//! This file has the writer; threads that use one object take turns (`turns.rs`).

mod reader;
mod readers;
mod turns;

pub(crate) use readers::{ReaderPosition, RingReaders};

pub(crate) use reader::{ReadSlotInner, RingReadSlot, RingReader, join};

use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use device_ipc::{Access, DeviceRange, Error, Ipc, TensorLayout};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use turns::{Turn, Writing};

use crate::dlpack;
use crate::error::{LayoutError, OrRaise as _};
use crate::export::{Changes, Descriptor, Holder};
use crate::session::{access, check_fork, ipc_for_users, not_picklable, note_use};
use crate::share::Source;
use crate::stream::StreamArg;
use crate::tensor::{Keeper, Tensor, TensorData, to_dlpack, to_numpy};
use crate::wait::{self, Waiting};

/// The bytes of a slot are a multiple of this.
const ALIGNMENT: u64 = 256;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn closed(what: &str) -> PyErr {
    PyValueError::new_err(format!("the {what} is closed"))
}

/// A ring with what its slots need.
struct RingInner {
    ring: Mutex<device_ipc::Ring>,
    /// Needs no lock, which a thread that writes holds.
    readers: RingReaders,
    waiting: Waiting,
    /// Ends the waits of other threads.
    closed: AtomicBool,
    turn: Turn,
    ipc: Ipc,
    backend: &'static str,
    /// For calls of a host that has no stream.
    stream: device_ipc::Stream,
    /// The tensor in each slot.
    layout: Option<TensorLayout>,
    keeper: Keeper,
}

/// The writer of a ring. Readers open its text, `str(ring)`, with `join`.
///
/// `memory` is a contiguous tensor, whose first axis is divided into `slots` slots: each is a tensor of its element type, and of the shape
/// behind the first axis if that has `slots` elements. The bytes of a slot are a multiple of 256; memory of one axis is used up to
/// the last such multiple. `access` is that of readers, `"r"` or `"rw"`.
/// `allow_users` lists user ids that may join beside this user; by default none. Raises `TypeError` if `memory` is no tensor
/// of device memory, and `LayoutError` if it cannot be divided into `slots`.
#[pyclass(frozen, weakref, module = "device_ipc")]
pub(crate) struct Ring {
    inner: Mutex<Option<Arc<RingInner>>>,
    descriptor: device_ipc::Descriptor,
}

impl Ring {
    fn inner(&self) -> PyResult<Arc<RingInner>> {
        check_fork()?;
        lock(&self.inner).clone().ok_or_else(|| closed("ring"))
    }
}

#[pymethods]
impl Ring {
    #[new]
    #[pyo3(signature = (memory, *, slots=2, access="rw", allow_users=None))]
    fn new(
        py: Python<'_>,
        memory: &Bound<'_, PyAny>,
        slots: u32,
        access: &str,
        allow_users: Option<Vec<u32>>,
    ) -> PyResult<Self> {
        let access = self::access(Some(access))?.unwrap_or(Access::ReadWrite);
        let source = Source::read(py, memory)?
            .ok_or_else(|| PyTypeError::new_err("the memory of a ring is a tensor of device memory"))?;
        let ipc = ipc_for_users(py, Some(source.backend), &allow_users.unwrap_or_default())?;
        let device = source.device;
        let layout = slot_layout(py, &source.layout, slots)?;
        let (owner, keeper) = source.kept();
        let made = py.detach(|| -> device_ipc::Result<_> {
            let stream = ipc.create_stream(device)?;
            let builder = ipc.ring(owner).slots(slots).access(access);
            Ok((if let Some(layout) = layout { builder.layout(layout) } else { builder }.start()?, stream))
        });
        let (ring, stream) = made.or_raise(py)?;
        let descriptor = ring.descriptor().clone();
        let backend = ipc.backend().info().name;
        note_use();
        let inner = RingInner {
            readers: RingReaders(ring.watch()),
            ring: Mutex::new(ring),
            waiting: Waiting::default(),
            closed: AtomicBool::new(false),
            turn: Turn::default(),
            ipc,
            backend,
            stream,
            layout: descriptor.layout().cloned(),
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

    /// The number of the turn in which a thread or a task writes a slot; `None` while no slot is written. For `device_ipc.aio`.
    #[getter]
    fn _turn(&self) -> PyResult<Option<u64>> {
        Ok(self.inner()?.turn.number())
    }

    /// The number of readers.
    #[getter]
    fn readers(&self) -> PyResult<usize> {
        self.inner()?.readers.count()
    }

    /// Returns the readers that the next `write` waits for, the slowest first. Raises `ValueError` if the ring is closed.
    fn readers_behind(&self) -> PyResult<Vec<ReaderPosition>> {
        self.inner()?.readers.readers_behind()
    }

    /// Dismisses a reader, and returns whether it was one. Streams that wait for it continue, its slots are overwritten, and its next
    /// call raises `Error`. It may join the ring again.
    ///
    /// `reader` is one of `readers_behind()`. Raises `TypeError` for another object, and `ValueError` if the ring is closed.
    fn dismiss(&self, py: Python<'_>, reader: &Bound<'_, ReaderPosition>) -> PyResult<bool> {
        self.inner()?.readers.dismiss(py, reader)
    }

    /// Returns the readers as an object that stays usable while another thread closes the ring: a reader that holds up `close` can be
    /// dismissed. Raises `ValueError` if the ring is closed.
    fn watch(&self) -> PyResult<RingReaders> {
        Ok(self.inner()?.readers.clone())
    }

    /// Returns the processes that hold a lease on the memory.
    fn holders(&self, py: Python<'_>) -> PyResult<Vec<Holder>> {
        let inner = self.inner()?;
        Ok(py.detach(|| lock(&inner.ring).holders()).iter().map(Holder::from).collect())
    }

    /// Waits until there are this many readers.
    ///
    /// `count` is that number. `timeout` is in seconds; `None` is no limit. Raises `TimeoutError` after it, and
    /// `ValueError` if the ring is closed.
    #[pyo3(signature = (count=1, timeout=None))]
    fn wait_readers(&self, py: Python<'_>, count: usize, timeout: Option<f64>) -> PyResult<()> {
        let inner = self.inner()?;
        wait::unless(py, wait::limit(timeout)?, "ring", &inner.closed, |slice| {
            inner.readers.0.wait_readers(count, slice)
        })
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
    /// one, this call waits. Threads take turns: the call waits until another thread has published or dropped its slot.
    ///
    /// `timeout` limits the wait, in seconds; 0 makes one attempt, `None` is no limit. Raises `TimeoutError` after it,
    /// and `ValueError` if the ring is closed.
    #[pyo3(signature = (stream=None, *, timeout=None))]
    fn write(
        slf: &Bound<'_, Self>,
        stream: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
    ) -> PyResult<RingWriteSlot> {
        let (py, begun, limit) = (slf.py(), Instant::now(), wait::limit(timeout)?);
        let inner = slf.get().inner()?;
        let stream = StreamArg::given_or_current(py, stream, &inner.ipc, inner.stream.device())?;
        let writing = Writing::begin(py, &inner, slf.as_ptr().addr(), limit)?;
        let limit = limit.saturating_sub(begun.elapsed());
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
            let taken = if limit.is_zero() {
                wait::try_once(py, "the release of the slot by the readers", attempt)?
            } else {
                wait::unless(py, limit, "ring", &inner.closed, call)?
            };
            drop(waiting);
            py.detach(|| inner.stream.synchronize()).or_raise(py)?;
            taken
        };
        let (sequence, range) = taken;
        Ok(RingWriteSlot { inner: Mutex::new(Some(writing)), sequence, range, stream })
    }

    /// Ends the ring: readers receive the publications so far. Waits until no process holds the memory.
    ///
    /// `timeout` is in seconds; `None` is no limit. Raises `StillHeldError`, which lists the holders, after it, and
    /// `ValueError` if a slot is in use.
    #[pyo3(signature = (timeout=None))]
    fn close(slf: &Bound<'_, Self>, timeout: Option<f64>) -> PyResult<()> {
        let (py, limit) = (slf.py(), wait::limit(timeout)?);
        check_fork()?;
        let Some(inner) = lock(&slf.get().inner).take() else { return Ok(()) };
        inner.closed.store(true, Ordering::Release);
        wait::wake_tasks(slf)?;
        let inner = wait::sole(py, inner).map_err(|inner| {
            inner.closed.store(false, Ordering::Release);
            *lock(&slf.get().inner) = Some(inner);
            PyValueError::new_err("a slot of the ring is in use; publish or drop it before close()")
        })?;
        let ring = inner.ring.into_inner().unwrap_or_else(PoisonError::into_inner);
        wait::interruptible(py, move || ring.close(limit))?.or_raise(py)
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

/// Returns the tensor in each slot of memory with this layout; `None` for memory of one axis that has a rest, which becomes slots of one
/// axis.
fn slot_layout(py: Python<'_>, memory: &TensorLayout, slots: u32) -> PyResult<Option<TensorLayout>> {
    let slots = u64::from(slots);
    let refused = |why: String| Err(LayoutError::new_err(format!("the memory of a ring {why}")));
    if !memory.is_contiguous() {
        return refused("has gaps or is transposed; pass a contiguous tensor".to_owned());
    }
    let [first, inner @ ..] = memory.shape() else {
        return refused("is a tensor without axes; its first axis is divided into slots".to_owned());
    };
    let each = first.checked_div(slots).unwrap_or(0);
    let shape = if each == 1 { inner.to_vec() } else { [&[each], inner].concat() };
    let slot = TensorLayout::contiguous(memory.dtype(), shape).map_err(Error::from).or_raise(py)?;
    let is_whole = each * slots == *first;
    if is_whole && slot.span_bytes() > 0 && slot.span_bytes().is_multiple_of(ALIGNMENT) {
        return Ok(Some(slot));
    }
    if inner.is_empty() {
        return Ok(None);
    }
    if !is_whole {
        return refused(format!(
            "has {first} elements on its first axis, which cannot be divided into {slots} slots"
        ));
    }
    refused(format!(
        "gives slots of {} B, and a slot is a multiple of {ALIGNMENT} B: make the last axis longer, or pass memory of one axis",
        slot.span_bytes()
    ))
}

/// A slot of a ring for writing. Publishing it passes it to the readers; as a context manager, the end of the block publishes
/// it, unless the block failed.
#[pyclass(frozen, module = "device_ipc")]
pub(crate) struct RingWriteSlot {
    /// `None` after the publication, so that a variable that still names the slot does not keep the ring open.
    inner: Mutex<Option<Writing>>,
    sequence: u64,
    range: DeviceRange,
    stream: Option<StreamArg>,
}

impl RingWriteSlot {
    fn inner(&self) -> PyResult<Arc<RingInner>> {
        check_fork()?;
        let ended =
            || format!("sequence {} of the ring was published already, or its block failed", self.sequence);
        let inner = lock(&self.inner).as_ref().map(|writing| Arc::clone(&writing.inner));
        inner.ok_or_else(|| PyValueError::new_err(ended()))
    }

    fn data(&self) -> PyResult<TensorData> {
        let inner = self.inner()?;
        Ok(TensorData::in_slot(inner.backend, self.range, inner.layout.as_ref(), true, inner.keeper.clone()))
    }
}

#[pymethods]
impl RingWriteSlot {
    /// The sequence that the slot will have.
    #[getter]
    fn sequence(&self) -> u64 {
        self.sequence
    }

    /// The tensor in the slot.
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
                Some(stream) => ring.write(stream)?.publish(),
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
        dlpack::device_of(self.inner()?.backend, self.range.device.get())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("a slot of a ring", "send the ring's text, str(ring)"))
    }

    fn __repr__(&self) -> String {
        format!("<device_ipc.RingWriteSlot {}, {} B>", self.sequence, self.range.len)
    }
}
