//! Memory of the library's own, for programs without an allocator.

use std::sync::Arc;

use device_ipc::{DeviceRange, Dtype, MemoryUse, TensorLayout};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::OrRaise as _;
use crate::session::{DeviceArg, ipc};
use crate::tensor::{Keeper, Tensor, TensorData};

/// Parses an element type: a name, or an object such as `torch.float32` or `numpy.dtype("float32")`.
pub(crate) fn dtype(found: &Bound<'_, PyAny>) -> PyResult<Dtype> {
    let text: String = found.str()?.extract()?;
    let known = Dtype::from_name(&text);
    let known = known.or_else(|| {
        // numpy.float32 is a class.
        let name = found.getattr("__name__").ok()?.extract::<String>().ok()?;
        Dtype::from_name(&name)
    });
    known.ok_or_else(|| PyValueError::new_err(format!("unknown element type {text:?}")))
}

/// Allocates uninitialised memory that can be shared, as a tensor.
///
/// `shape` lists the sizes of the dimensions. `dtype` is a name such as `"float32"`, or an element type of torch or
/// NumPy. `device` is a name such as `"cuda:1"` or an ordinal; by default device 0 of the default backend. With
/// `read_only`, importers can be given the memory without write access.
///
/// Raises `OutOfMemoryError` if the device has not enough memory, `UnsupportedError` if it has no such memory,
/// `PlacementError` if there is no such device, `BackendError` if no backend has devices, and `ValueError` for an invalid argument.
#[pyfunction]
#[pyo3(signature = (shape, dtype, device=None, *, read_only=false))]
pub(crate) fn empty(
    py: Python<'_>,
    shape: Vec<u64>,
    dtype: &Bound<'_, PyAny>,
    device: Option<&Bound<'_, PyAny>>,
    read_only: bool,
) -> PyResult<Tensor> {
    let dtype = self::dtype(dtype)?;
    let layout = TensorLayout::contiguous(dtype, shape).map_err(device_ipc::Error::from).or_raise(py)?;
    let device = device.map(DeviceArg::parse).transpose()?;
    let ipc = ipc(py, device.and_then(|device| device.backend))?;
    let ordinal = device.map_or(0.into(), |device| device.ordinal);
    let bytes = layout.span_bytes().max(1);
    let wanted = if read_only { MemoryUse::new().read_only_importers() } else { MemoryUse::new() };
    let allocated = py.detach(|| ipc.allocate_for(ordinal, bytes, wanted));
    let buffer = Arc::new(allocated.or_raise(py)?);
    // A tensor without elements has no bytes, and an allocation has at least one.
    let range = buffer.range();
    let range = DeviceRange::new(range.device, range.ptr, layout.span_bytes());
    let backend = ipc.backend().info().name;
    Ok(Tensor { data: TensorData::new(backend, range, &layout, true, Keeper::Owned(buffer)) })
}
