//! Copies of blocks between tensors of a framework.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use device_ipc::backend::{BlockedTensors, DeviceEvent, check_blocks};
use device_ipc::front_end::Claims;
use device_ipc::{
    AsStream as _, BorrowedStream, DeviceOrdinal, DevicePtr, DeviceRange, Error, Ipc, Result, Stream,
};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyIndexError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyList};

use crate::block_numbers::unpack;
use crate::claims::_Claims;
use crate::error::OrRaise as _;
use crate::session::{DeviceArg, check_fork, ipc};
use crate::stream::StreamArg;
use crate::wait;

/// The address, the bytes, and the bytes from block to block of a tensor.
type Place = (u64, u64, u64);

/// Copies of blocks between pairs of tensors, which the caller keeps. See `device_ipc._blocks`.
#[pyclass(frozen, module = "device_ipc")]
pub(crate) struct _BlockCopy {
    /// The destinations' device; `None` is the host.
    device: Option<(Ipc, DeviceOrdinal)>,
    /// The tensors of each size of a block.
    tensors: Vec<(u64, Vec<BlockedTensors>)>,
    /// The number of blocks that every source has, and every destination.
    blocks: [u64; 2],
}

#[pymethods]
impl _BlockCopy {
    /// Takes the destination, the source and the bytes of a block of each pair. Loads the kernel too, for which the driver may wait
    /// until all streams of the device are idle.
    #[new]
    fn new(
        py: Python<'_>,
        device: Option<&Bound<'_, PyAny>>,
        tensors: Vec<(Place, Place, u64)>,
    ) -> PyResult<Self> {
        let device = device_of(py, device)?;
        let ordinal = device.as_ref().map_or(0.into(), |(_, ordinal)| *ordinal);
        let range = |(ptr, bytes, _): Place| DeviceRange::new(ordinal, DevicePtr::new(ptr), bytes);
        let count = |range: DeviceRange, stride: u64, block: u64| {
            range.len.checked_sub(block).map_or(0, |last| last / stride.max(1) + 1)
        };
        let mut by_size = BTreeMap::<u64, Vec<_>>::new();
        let mut blocks = [u64::MAX; 2];
        for (dst, src, block) in tensors {
            let pair =
                BlockedTensors { dst: range(dst), dst_stride: dst.2, src: range(src), src_stride: src.2 };
            let counts = [count(pair.src, pair.src_stride, block), count(pair.dst, pair.dst_stride, block)];
            blocks = [blocks[0].min(counts[0]), blocks[1].min(counts[1])];
            by_size.entry(block).or_default().push(pair);
        }
        let made = Self { device, tensors: by_size.into_iter().collect(), blocks };
        if let Some((ipc, device)) = &made.device {
            let load = || made.submit(&[], &[], ipc, ipc.create_stream(*device)?.as_stream());
            py.detach(load).or_raise(py)?;
        }
        Ok(made)
    }

    /// Submits the copies to a stream, given by its handle, or to PyTorch's current one. On the host, copies.
    #[pyo3(signature = (sources, destinations, stream=None))]
    fn copy(
        &self,
        py: Python<'_>,
        sources: &Bound<'_, PyAny>,
        destinations: &Bound<'_, PyAny>,
        stream: Option<u64>,
    ) -> PyResult<()> {
        let (sources, destinations) = self.numbers(sources, destinations)?;
        if sources.is_empty() && destinations.is_empty() {
            return Ok(());
        }
        let copied = match &self.device {
            None => py.detach(|| self.copy_on_host(&sources, &destinations)),
            Some((ipc, device)) => {
                let stream = match stream {
                    Some(raw) => StreamArg::of_framework(ipc, *device, raw),
                    None => current(py, ipc, *device)?,
                };
                // A driver whose queue is full waits, possibly for work that another thread of Python is to release.
                py.detach(|| self.submit(&sources, &destinations, ipc, stream.as_stream()))
            }
        };
        match copied {
            Err(error @ Error::InvalidRegion(_)) => Err(invalid(error)),
            copied => copied.or_raise(py),
        }
    }
}

impl _BlockCopy {
    /// Reads the numbers of sources and destinations.
    fn numbers(
        &self,
        sources: &Bound<'_, PyAny>,
        destinations: &Bound<'_, PyAny>,
    ) -> PyResult<(Vec<u32>, Vec<u32>)> {
        let [of, to] = self.blocks;
        Ok((numbers(sources, "source", of)?, numbers(destinations, "destination", to)?))
    }

    fn submit(
        &self,
        sources: &[u32],
        destinations: &[u32],
        ipc: &Ipc,
        stream: BorrowedStream<'_>,
    ) -> Result<()> {
        let memory = ipc.backend().memory();
        self.tensors.iter().try_for_each(|(bytes, tensors)| {
            // SAFETY: the caller keeps the tensors until the stream has passed the copy.
            unsafe { memory.copy_blocks(tensors, *bytes, sources, destinations, stream) }
        })
    }

    fn copy_on_host(&self, sources: &[u32], destinations: &[u32]) -> Result<()> {
        for (bytes, tensors) in &self.tensors {
            check_blocks(tensors, *bytes, sources, destinations)?;
        }
        for (bytes, tensors) in &self.tensors {
            copy_on_host(tensors, *bytes, sources, destinations);
        }
        Ok(())
    }
}

/// The blocks of one group of layers, of all loads that are submitted together.
struct Batch<'a> {
    copy: &'a _BlockCopy,
    sources: Vec<u32>,
    destinations: Vec<u32>,
    /// The position of each load, and the end of its blocks.
    loads: Vec<(usize, usize)>,
}

/// The position of a load whose blocks are invalid, and the reason.
type Failure = (usize, String);

impl<'a> Batch<'a> {
    const fn new(copy: &'a _BlockCopy) -> Self {
        Self { copy, sources: Vec::new(), destinations: Vec::new(), loads: Vec::new() }
    }

    /// Submits all loads at once, or each one separately if blocks of one of them are invalid. Returns the loads that have failed so.
    fn submit(&self, submit: impl Fn(&_BlockCopy, &[u32], &[u32]) -> Result<()>) -> Result<Vec<Failure>> {
        let (sources, destinations) = (&self.sources, &self.destinations);
        match submit(self.copy, sources, destinations) {
            Err(Error::InvalidRegion(_)) => {}
            submitted => return submitted.map(|()| Vec::new()),
        }
        let (mut failures, mut begin) = (Vec::new(), 0);
        for &(load, end) in &self.loads {
            match submit(self.copy, &sources[begin..end], &destinations[begin..end]) {
                Err(error @ Error::InvalidRegion(_)) => failures.push((load, error.to_string())),
                submitted => submitted?,
            }
            begin = end;
        }
        Ok(failures)
    }
}

type Event = Box<dyn DeviceEvent>;

/// A stream of its own for copies of blocks.
#[pyclass(frozen, module = "device_ipc")]
pub(crate) struct _CopyQueue {
    /// `None` is the host, which copies at once.
    device: Option<Arc<QueueDevice>>,
}

struct QueueDevice {
    ipc: Ipc,
    device: DeviceOrdinal,
    stream: Stream,
    /// Events whose copies have ended, for others.
    events: Mutex<Vec<Event>>,
}

impl QueueDevice {
    fn events(&self) -> MutexGuard<'_, Vec<Event>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn event(&self) -> Result<Event> {
        let known = self.events().pop();
        known.map_or_else(|| self.ipc.backend().create_local_event(self.device), Ok)
    }

    /// Submits copies behind the work of a stream, with the device's context current once for all calls. Returns the event behind
    /// them, and the copies whose blocks are invalid.
    fn submit(&self, batches: &[Batch<'_>], after: BorrowedStream<'_>) -> Result<(Event, Vec<Failure>)> {
        let mut submitted = None;
        self.ipc.backend().with_device_context(self.device, &mut || {
            submitted = Some(self.submit_in_context(batches, after));
        });
        submitted.expect("the context runs its body once")
    }

    fn submit_in_context(
        &self,
        batches: &[Batch<'_>],
        after: BorrowedStream<'_>,
    ) -> Result<(Event, Vec<Failure>)> {
        let (event, stream) = (self.event()?, self.stream.as_stream());
        // A wait takes the record that was submitted before it, so one event serves both.
        event.record(after)?;
        event.wait_on(stream)?;
        let mut failures = Vec::new();
        for batch in batches {
            failures.extend(batch.submit(|copy, from, to| copy.submit(from, to, &self.ipc, stream))?);
        }
        event.record(stream)?;
        Ok((event, failures))
    }
}

#[pymethods]
impl _CopyQueue {
    /// Creates the stream.
    #[new]
    fn new(py: Python<'_>, device: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let Some((ipc, device)) = device_of(py, device)? else { return Ok(Self { device: None }) };
        let stream = py.detach(|| ipc.create_stream(device)).or_raise(py)?;
        Ok(Self { device: Some(Arc::new(QueueDevice { ipc, device, stream, events: Mutex::default() })) })
    }

    /// Waits until all copies have ended.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        let Some(device) = self.device.clone() else { return Ok(()) };
        wait::aside(py, move || device.stream.synchronize())?.or_raise(py)
    }
}

/// The caches of one exporter, whose claimed blocks are copied on a queue.
#[pyclass(frozen, module = "device_ipc")]
pub(crate) struct _BlockReader {
    device: Option<Arc<QueueDevice>>,
    /// One for each group of layers.
    copies: Vec<Py<_BlockCopy>>,
    claims: Arc<Claims>,
}

/// A load: the name of its request, its ticket, and for each group of layers the exporter's blocks as a text of `_pack_blocks`, the
/// number of blocks at its beginning that are not to be read, and this process's blocks as 32-bit integers.
type Load<'py> = (Bound<'py, PyAny>, u64, Vec<(PyBackedStr, usize, Bound<'py, PyBytes>)>);

#[pymethods]
impl _BlockReader {
    /// The copies are those of the groups of layers, from the exporter's caches.
    #[new]
    fn new(queue: &_CopyQueue, copies: Vec<Py<_BlockCopy>>, claims: &_Claims) -> Self {
        Self { device: queue.device.clone(), copies, claims: Arc::clone(&claims.claims) }
    }

    /// Claims the tickets of loads, and submits their copies, which begin behind the work so far of the stream `after`, by default
    /// PyTorch's current one.
    ///
    /// A load whose ticket the exporter does not offer, or whose blocks are invalid, fails; others are copied.
    #[pyo3(signature = (loads, after=None))]
    fn submit(
        &self,
        py: Python<'_>,
        loads: &Bound<'_, PyList>,
        after: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<_SubmittedCopies> {
        check_fork()?;
        let mut submitted = _SubmittedCopies {
            event: Mutex::default(),
            failures: Vec::new(),
            claims: Arc::clone(&self.claims),
            tickets: Vec::with_capacity(loads.len()),
        };
        if let Err(error) = self.submit_claimed(py, loads, after, &mut submitted) {
            if let Some(device) = &self.device {
                // Copies of some groups of layers may run. A device that fails runs none.
                let _ = py.detach(|| device.stream.synchronize());
            }
            submitted.tickets.iter().for_each(|&ticket| self.claims.release(ticket));
            return Err(error);
        }
        Ok(submitted)
    }
}

impl _BlockReader {
    /// Claims the tickets of loads, and submits their copies.
    fn submit_claimed(
        &self,
        py: Python<'_>,
        loads: &Bound<'_, PyList>,
        after: Option<&Bound<'_, PyAny>>,
        submitted: &mut _SubmittedCopies,
    ) -> PyResult<()> {
        let mut batches: Vec<_> = self.copies.iter().map(|copy| Batch::new(copy.get())).collect();
        for (position, load) in loads.iter().enumerate() {
            match self.read(&load, &mut submitted.tickets) {
                Ok(blocks) => {
                    for (batch, (sources, destinations)) in batches.iter_mut().zip(blocks) {
                        batch.sources.extend(sources);
                        batch.destinations.extend(destinations);
                        batch.loads.push((position, batch.sources.len()));
                    }
                }
                Err(error) => submitted.failures.push((position, error.value(py).to_string())),
            }
        }
        batches.retain(|batch| !batch.sources.is_empty());
        match &self.device {
            None => {
                let copy = |batch: &Batch<'_>| batch.submit(_BlockCopy::copy_on_host);
                let failed = py.detach(|| batches.iter().map(copy).collect::<Result<Vec<_>>>());
                submitted.failures.extend(failed.or_raise(py)?.into_iter().flatten());
            }
            Some(_) if batches.is_empty() => {}
            Some(device) => {
                let after = match after {
                    Some(stream) => StreamArg::parse(stream, &device.ipc, device.device)?,
                    None => current(py, &device.ipc, device.device)?,
                };
                // Once for all calls. A driver whose queue is full waits, possibly for work that another thread of Python is to
                // release.
                let (behind, invalid) =
                    py.detach(|| device.submit(&batches, after.as_stream())).or_raise(py)?;
                submitted.failures.extend(invalid);
                submitted.event = Mutex::new(Some((behind, Arc::clone(device))));
            }
        }
        Ok(())
    }

    /// Claims the ticket of a load, and returns the sources and destinations of each group of layers.
    fn read(&self, load: &Bound<'_, PyAny>, claimed: &mut Vec<u64>) -> PyResult<Vec<(Vec<u32>, Vec<u32>)>> {
        let (_, ticket, parts) = load.extract::<Load<'_>>()?;
        if !self.claims.claim(ticket) {
            return Err(PyValueError::new_err("the other engine no longer has the blocks"));
        }
        claimed.push(ticket);
        if parts.len() != self.copies.len() {
            let text = format!("{} groups of blocks for {} copies", parts.len(), self.copies.len());
            return Err(PyValueError::new_err(text));
        }
        let read = |(copy, (sources, skipped, destinations)): (
            &Py<_BlockCopy>,
            &(PyBackedStr, usize, Bound<'_, PyBytes>),
        )| {
            let [of, to] = copy.get().blocks;
            let numbers = destinations.as_bytes().chunks_exact(size_of::<u32>());
            let destinations: Vec<_> =
                numbers.map(|bytes| u32::from_ne_bytes(bytes.try_into().expect("4 bytes"))).collect();
            below(&destinations, "destination", to)?;
            Ok((unpack(sources, *skipped, destinations.len(), of)?, destinations))
        };
        self.copies.iter().zip(&parts).map(read).collect()
    }
}

/// Copies that were submitted together.
#[pyclass(frozen, module = "device_ipc")]
pub(crate) struct _SubmittedCopies {
    /// Behind the copies; `None` once they have ended.
    event: Mutex<Option<(Event, Arc<QueueDevice>)>>,
    failures: Vec<Failure>,
    claims: Arc<Claims>,
    /// Those that were claimed.
    tickets: Vec<u64>,
}

#[pymethods]
impl _SubmittedCopies {
    /// Returns `None` while copies run, for `seconds` at least. Once they have ended, releases the tickets of all loads, and returns the
    /// loads that have failed, by their positions, with the reasons.
    #[pyo3(signature = (seconds=0.0))]
    fn query(&self, py: Python<'_>, seconds: f64) -> PyResult<Option<Vec<Failure>>> {
        check_fork()?;
        let begun = Instant::now();
        while !self.have_ended(py)? {
            if begun.elapsed().as_secs_f64() >= seconds {
                return Ok(None);
            }
            // Other threads of Python run meanwhile. A sleep would take longer than most copies.
            py.detach(thread::yield_now);
        }
        for &ticket in &self.tickets {
            self.claims.release(ticket);
        }
        Ok(Some(self.failures.clone()))
    }
}

impl _SubmittedCopies {
    fn have_ended(&self, py: Python<'_>) -> PyResult<bool> {
        let mut event = self.event.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((behind, _)) = &*event
            && !behind.query().or_raise(py)?
        {
            return Ok(false);
        }
        if let Some((behind, device)) = event.take() {
            device.events().push(behind);
        }
        Ok(true)
    }
}

fn device_of(py: Python<'_>, device: Option<&Bound<'_, PyAny>>) -> PyResult<Option<(Ipc, DeviceOrdinal)>> {
    let Some(device) = device.map(DeviceArg::parse).transpose()? else { return Ok(None) };
    Ok(Some((ipc(py, device.backend)?, device.ordinal)))
}

/// Returns PyTorch's current stream.
fn current(py: Python<'_>, ipc: &Ipc, device: DeviceOrdinal) -> PyResult<StreamArg> {
    StreamArg::of_torch(py, ipc, device)?.ok_or_else(|| {
        let name = ipc.backend().info().name;
        PyRuntimeError::new_err(format!("PyTorch has no current stream on a device of {name}"))
    })
}

/// Returns the exception for blocks that cannot be copied.
fn invalid(error: Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// Returns block numbers: those of a buffer of unsigned 32-bit integers at once, others one by one.
///
/// Raises `IndexError` for one that is not below `limit`.
fn numbers(given: &Bound<'_, PyAny>, what: &str, limit: u64) -> PyResult<Vec<u32>> {
    let found = match PyBuffer::<u32>::get(given) {
        Ok(buffer) => buffer.to_vec(given.py())?,
        Err(_) => {
            let numbers = given.extract::<Vec<i64>>()?;
            let number = |&number: &i64| u32::try_from(number).map_err(|_| outside(what, number, limit));
            numbers.iter().map(number).collect::<PyResult<_>>()?
        }
    };
    below(&found, what, limit)?;
    Ok(found)
}

/// Raises `IndexError` for a number that is not below `limit`.
fn below(numbers: &[u32], what: &str, limit: u64) -> PyResult<()> {
    match numbers.iter().find(|&&number| u64::from(number) >= limit) {
        Some(number) => Err(outside(what, number, limit)),
        None => Ok(()),
    }
}

/// Returns the exception for a block that a tensor does not have.
pub(crate) fn outside(what: &str, number: impl std::fmt::Display, limit: u64) -> PyErr {
    PyIndexError::new_err(format!("{what} block {number} of {limit}; copied nothing"))
}

/// Copies blocks of tensors in host memory.
fn copy_on_host(tensors: &[BlockedTensors], bytes: u64, sources: &[u32], destinations: &[u32]) {
    for tensor in tensors {
        for (&from, &to) in sources.iter().zip(destinations) {
            let from = tensor.src.ptr.get() + u64::from(from) * tensor.src_stride;
            let to = tensor.dst.ptr.get() + u64::from(to) * tensor.dst_stride;
            // SAFETY: the blocks were checked to lie in tensors in host memory, which the caller keeps.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes as usize) };
        }
    }
}
