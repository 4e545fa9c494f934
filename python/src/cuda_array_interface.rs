//! `__cuda_array_interface__`, version 3, in both directions.

use pyo3::exceptions::{PyAttributeError, PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::dlpack::{Foreign, row_major};
use crate::dtype::{from_typestr, to_typestr};
use crate::tensor::TensorData;
use crate::{backend, dlpack};

/// Returns the interface of a tensor. Consumers of the interface ignore or refuse read-only memory, so only writable tensors of
/// CUDA have it.
pub(crate) fn interface<'py>(py: Python<'py>, tensor: &TensorData) -> PyResult<Bound<'py, PyDict>> {
    let absent = |why: String| {
        PyAttributeError::new_err(format!("no __cuda_array_interface__: {why}; use __dlpack__"))
    };
    if backend::dlpack_type(tensor.backend) != Some(dlpack::KDL_CUDA) {
        return Err(absent(format!("the memory is of the backend {}", tensor.backend)));
    }
    if !tensor.is_writable {
        return Err(absent("the memory is read-only".into()));
    }
    tensor.keeper.check_mapped(py)?;
    let streams = tensor.keeper.stream_numbers();
    if streams.len() > 1 {
        return Err(absent("its parts were opened on several streams".into()));
    }
    let typestr = to_typestr(tensor.dtype())
        .ok_or_else(|| absent(format!("it has no element type {}", tensor.dtype())))?;
    let element = tensor.dtype().bytes().unwrap_or(1);
    let strides: Vec<u64> = tensor.strides().iter().map(|stride| stride * element).collect();
    let interface = PyDict::new(py);
    interface.set_item("version", 3)?;
    interface.set_item("shape", PyTuple::new(py, tensor.shape())?)?;
    interface.set_item("strides", PyTuple::new(py, strides)?)?;
    interface.set_item("typestr", typestr)?;
    interface.set_item("data", (tensor.range.ptr.get(), false))?;
    // The readiness of the bytes is a wait of the stream that the mapping was opened on, or was waited for by the host.
    interface.set_item("stream", streams.first())?;
    Ok(interface)
}

/// Reads a tensor through its `__cuda_array_interface__`; the object keeps the memory.
pub(crate) fn import(object: &Bound<'_, PyAny>, interface: &Bound<'_, PyAny>) -> PyResult<Foreign> {
    let item = |name: &str| interface.get_item(name);
    let typestr: String = item("typestr")?.extract()?;
    let dtype = from_typestr(&typestr)
        .ok_or_else(|| PyBufferError::new_err(format!("the element type {typestr:?} is not supported")))?;
    let shape: Vec<i64> = item("shape")?.extract()?;
    let (ptr, is_read_only): (u64, bool) = item("data")?.extract()?;
    let element = dtype.bytes().unwrap_or(1) as i64;
    let strides = match item("strides") {
        Ok(strides) if !strides.is_none() => {
            let bytes: Vec<i64> = strides.extract()?;
            if bytes.iter().any(|stride| stride % element != 0) {
                return Err(PyValueError::new_err("a stride is not a multiple of the element size"));
            }
            bytes.into_iter().map(|stride| stride / element).collect()
        }
        _ => row_major(&shape),
    };
    // The interface names no device; the driver knows it by the address. CuPy and numba state it.
    let ordinal = device_of(object).unwrap_or(0);
    let (is_writable, owner) = (!is_read_only, object.clone().unbind());
    let backend = backend::of_dlpack_type(dlpack::KDL_CUDA).ok_or_else(|| {
        PyBufferError::new_err(
            "this build of device_ipc has no backend for memory with __cuda_array_interface__",
        )
    })?;
    let layout = dlpack::layout(object.py(), dtype, &shape, &strides)?;
    Ok(Foreign { backend, ordinal, ptr, layout, is_writable, owner })
}

fn device_of(object: &Bound<'_, PyAny>) -> Option<u32> {
    let device = object.getattr("device").ok()?;
    device.getattr("id").ok()?.extract().ok()
}
