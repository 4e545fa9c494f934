//! Copies of blocks between tensors of a framework.

use device_ipc::backend::BlockedTensors;
use device_ipc::{AsStream as _, DevicePtr, DeviceRange, Ipc};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::error::OrRaise as _;
use crate::session::{DeviceArg, ipc};
use crate::stream::StreamArg;

/// The address, the bytes, and the bytes from block to block of a tensor.
type Place = (u64, u64, u64);

/// Copies of blocks between pairs of tensors, which the caller keeps. See `device_ipc._blocks`.
#[pyclass(frozen, module = "device_ipc")]
pub(crate) struct _BlockCopy {
    ipc: Ipc,
    device: DeviceArg,
    tensors: Vec<BlockedTensors>,
    block_bytes: u64,
}

#[pymethods]
impl _BlockCopy {
    /// Loads the kernel too, for which the driver may wait until all streams of the device are idle.
    #[new]
    fn new(
        py: Python<'_>,
        device: &Bound<'_, PyAny>,
        tensors: Vec<(Place, Place)>,
        block_bytes: u64,
    ) -> PyResult<Self> {
        let device = DeviceArg::parse(device)?;
        let ipc = ipc(py, device.backend)?;
        let range = |(ptr, bytes, _): Place| DeviceRange::new(device.ordinal, DevicePtr::new(ptr), bytes);
        let blocked = |(dst, src): (Place, Place)| BlockedTensors {
            dst: range(dst),
            dst_stride: dst.2,
            src: range(src),
            src_stride: src.2,
        };
        let tensors = tensors.into_iter().map(blocked).collect();
        let made = Self { ipc, device, tensors, block_bytes };
        made.copy(py, Vec::new(), Vec::new())?;
        Ok(made)
    }

    /// Submits the copies to PyTorch's current stream.
    fn copy(&self, py: Python<'_>, sources: Vec<u32>, destinations: Vec<u32>) -> PyResult<()> {
        let memory = self.ipc.backend().memory();
        let Some(stream) = StreamArg::of_torch(py, &self.ipc, self.device.ordinal)? else {
            let name = self.ipc.backend().info().name;
            return Err(PyRuntimeError::new_err(format!(
                "PyTorch has no current stream on a device of {name}"
            )));
        };
        let (tensors, bytes) = (&self.tensors, self.block_bytes);
        // A driver whose queue is full waits, possibly for work that another thread of Python is to release.
        py.detach(|| {
            // SAFETY: the caller keeps the tensors until the stream has passed the copy, and writes no block twice.
            unsafe { memory.copy_blocks(tensors, bytes, &sources, &destinations, stream.as_stream()) }
        })
        .or_raise(py)
    }
}
