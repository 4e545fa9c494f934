//! Memory of the library's own, for programs without an allocator.

use std::sync::Arc;

use device_ipc::{Buffer, Dtype, MemoryUse, TensorLayout};
use pyo3::exceptions::{PyTypeError, PyValueError};
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
    known.map_or_else(|| Err(unknown_dtype(found.py(), &text)?), Ok)
}

/// Returns the error for an unknown element type, with the names that are most like it.
fn unknown_dtype(py: Python<'_>, text: &str) -> PyResult<PyErr> {
    let names: Vec<_> = Dtype::ALL.iter().filter_map(|dtype| dtype.name()).collect();
    let like =
        py.import("difflib")?.call_method1("get_close_matches", (text, &names))?.extract::<Vec<String>>()?;
    let suggestion = match like.as_slice() {
        [] => format!("the types are {}", names.join(", ")),
        like => format!("did you mean {}?", like.join(" or ")),
    };
    Ok(PyValueError::new_err(format!("unknown element type {text:?}; {suggestion}")))
}

/// Parses a shape: one size, or a sequence of sizes.
pub(crate) fn parse_shape(shape: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let sizes = match shape.extract::<i64>() {
        Ok(size) => vec![size],
        Err(_) => shape.extract::<Vec<i64>>().map_err(|_| {
            PyTypeError::new_err("a shape is a size or a sequence of sizes, such as 4 or (2, 3)")
        })?,
    };
    let size = |size: i64| {
        u64::try_from(size)
            .map_err(|_| PyValueError::new_err(format!("the shape {sizes:?} has the negative size {size}")))
    };
    sizes.iter().copied().map(size).collect()
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
    shape: &Bound<'_, PyAny>,
    dtype: &Bound<'_, PyAny>,
    device: Option<&Bound<'_, PyAny>>,
    read_only: bool,
) -> PyResult<Tensor> {
    let shape = parse_shape(shape)?;
    let dtype = self::dtype(dtype)?;
    let layout = TensorLayout::contiguous(dtype, shape).map_err(device_ipc::Error::from).or_raise(py)?;
    let device = device.map(DeviceArg::parse).transpose()?;
    let (block, backend) = allocate(py, device, layout.span_bytes(), read_only)?;
    Ok(tensor_at(&block, backend, 0, &layout))
}

/// The first byte of a tensor in a block is a multiple of this one.
const ALIGNMENT: u64 = 256;

/// Allocates tensors in one block, which importers open once. `layouts` has their shapes and the names of their element types.
#[pyfunction]
pub(crate) fn _empty_block(
    py: Python<'_>,
    layouts: Vec<(Vec<u64>, String)>,
    device: Option<&Bound<'_, PyAny>>,
    read_only: bool,
) -> PyResult<Vec<Tensor>> {
    let device = device.map(DeviceArg::parse).transpose()?;
    let too_long = || PyValueError::new_err("the tensors have more than 2^64 bytes");
    let (mut places, mut end) = (Vec::new(), 0_u64);
    for (shape, name) in layouts {
        let dtype = Dtype::from_name(&name).map_or_else(|| Err(unknown_dtype(py, &name)?), Ok)?;
        let layout = TensorLayout::contiguous(dtype, shape).map_err(device_ipc::Error::from).or_raise(py)?;
        let start = end.checked_next_multiple_of(ALIGNMENT).ok_or_else(too_long)?;
        end = start.checked_add(layout.span_bytes()).ok_or_else(too_long)?;
        places.push((start, layout));
    }
    let (block, backend) = allocate(py, device, end, read_only)?;
    Ok(places.iter().map(|(start, layout)| tensor_at(&block, backend, *start, layout)).collect())
}

/// Allocates bytes, and returns them with the name of the backend.
fn allocate(
    py: Python<'_>,
    device: Option<DeviceArg>,
    bytes: u64,
    read_only: bool,
) -> PyResult<(Arc<Buffer>, &'static str)> {
    let ipc = ipc(py, device.and_then(|device| device.backend))?;
    let ordinal = device.map_or(0.into(), |device| device.ordinal);
    let wanted = if read_only { MemoryUse::new().read_only_importers() } else { MemoryUse::new() };
    // A tensor without elements has no bytes, and an allocation has at least one.
    let allocated = py.detach(|| ipc.allocate_for(ordinal, bytes.max(1), wanted));
    Ok((Arc::new(allocated.or_raise(py)?), ipc.backend().info().name))
}

/// Returns the tensor at an offset of a block in bytes, which contains it.
fn tensor_at(block: &Arc<Buffer>, backend: &'static str, offset: u64, layout: &TensorLayout) -> Tensor {
    // A tensor without elements may begin behind the block.
    let offset = if layout.span_bytes() == 0 { 0 } else { offset };
    let range = block.range().slice(offset, layout.span_bytes()).expect("the block contains the tensor");
    let keeper = Arc::clone(block);
    Tensor { data: TensorData::new(backend, range, layout, true, Keeper::Owned(keeper)) }
}
