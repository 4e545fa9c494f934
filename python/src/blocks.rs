//! Copies of blocks between tensors of a framework.

use device_ipc::backend::{BlockedTensors, check_blocks};
use device_ipc::{AsStream as _, DevicePtr, DeviceRange, Error, Ipc};
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyIndexError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::error::OrRaise as _;
use crate::session::{DeviceArg, ipc};
use crate::stream::StreamArg;

/// The address, the bytes, and the bytes from block to block of a tensor.
type Place = (u64, u64, u64);

/// Copies of blocks between pairs of tensors, which the caller keeps. See `device_ipc._blocks`.
#[pyclass(frozen, module = "device_ipc")]
pub(crate) struct _BlockCopy {
    /// The destinations' device; `None` is the host.
    device: Option<(Ipc, DeviceArg)>,
    tensors: Vec<BlockedTensors>,
    block_bytes: u64,
    /// The number of blocks that every source has, and every destination.
    blocks: [u64; 2],
}

#[pymethods]
impl _BlockCopy {
    /// Loads the kernel too, for which the driver may wait until all streams of the device are idle.
    #[new]
    fn new(
        py: Python<'_>,
        device: Option<&Bound<'_, PyAny>>,
        tensors: Vec<(Place, Place)>,
        block_bytes: u64,
    ) -> PyResult<Self> {
        let device = match device.map(DeviceArg::parse).transpose()? {
            Some(device) => Some((ipc(py, device.backend)?, device)),
            None => None,
        };
        let ordinal = device.as_ref().map_or(0.into(), |(_, device)| device.ordinal);
        let range = |(ptr, bytes, _): Place| DeviceRange::new(ordinal, DevicePtr::new(ptr), bytes);
        let blocked = |(dst, src): (Place, Place)| BlockedTensors {
            dst: range(dst),
            dst_stride: dst.2,
            src: range(src),
            src_stride: src.2,
        };
        let tensors: Vec<_> = tensors.into_iter().map(blocked).collect();
        let count = |range: DeviceRange, stride: u64| {
            range.len.checked_sub(block_bytes).map_or(0, |last| last / stride.max(1) + 1)
        };
        let sources = tensors.iter().map(|one| count(one.src, one.src_stride)).min();
        let destinations = tensors.iter().map(|one| count(one.dst, one.dst_stride)).min();
        let blocks = [sources, destinations].map(Option::unwrap_or_default);
        let made = Self { device, tensors, block_bytes, blocks };
        made.submit(py, &[], &[], None)?;
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
        let [of, to] = self.blocks;
        let (sources, destinations) =
            (numbers(sources, "source", of)?, numbers(destinations, "destination", to)?);
        if sources.is_empty() && destinations.is_empty() {
            return Ok(());
        }
        self.submit(py, &sources, &destinations, stream)
    }
}

impl _BlockCopy {
    /// Checks blocks, and copies them.
    fn submit(
        &self,
        py: Python<'_>,
        sources: &[u32],
        destinations: &[u32],
        stream: Option<u64>,
    ) -> PyResult<()> {
        let (tensors, bytes) = (&self.tensors, self.block_bytes);
        let Some((ipc, device)) = &self.device else {
            check_blocks(tensors, bytes, sources, destinations).map_err(invalid)?;
            py.detach(|| copy_on_host(tensors, bytes, sources, destinations));
            return Ok(());
        };
        let stream = match stream {
            Some(raw) => Some(StreamArg::of_framework(ipc, device.ordinal, raw)),
            None => StreamArg::of_torch(py, ipc, device.ordinal)?,
        };
        let Some(stream) = stream else {
            let name = ipc.backend().info().name;
            return Err(PyRuntimeError::new_err(format!(
                "PyTorch has no current stream on a device of {name}"
            )));
        };
        let memory = ipc.backend().memory();
        // A driver whose queue is full waits, possibly for work that another thread of Python is to release.
        let copied = py.detach(|| {
            // SAFETY: the caller keeps the tensors until the stream has passed the copy.
            unsafe { memory.copy_blocks(tensors, bytes, sources, destinations, stream.as_stream()) }
        });
        match copied {
            Err(error @ Error::InvalidRegion(_)) => Err(invalid(error)),
            copied => copied.or_raise(py),
        }
    }
}

/// Returns the exception for blocks that cannot be copied.
fn invalid(error: Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

/// Returns block numbers: those of a buffer of unsigned 32-bit integers at once, others one by one.
///
/// Raises `IndexError` for one that is not below `limit`.
fn numbers(given: &Bound<'_, PyAny>, what: &str, limit: u64) -> PyResult<Vec<u32>> {
    let outside = |number: &dyn std::fmt::Display| {
        PyIndexError::new_err(format!("{what} block {number} of {limit}; copied nothing"))
    };
    let found = match PyBuffer::<u32>::get(given) {
        Ok(buffer) => buffer.to_vec(given.py())?,
        Err(_) => {
            let numbers = given.extract::<Vec<i64>>()?;
            let number = |&number: &i64| u32::try_from(number).map_err(|_| outside(&number));
            numbers.iter().map(number).collect::<PyResult<_>>()?
        }
    };
    match found.iter().find(|&&number| u64::from(number) >= limit) {
        Some(number) => Err(outside(number)),
        None => Ok(found),
    }
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
