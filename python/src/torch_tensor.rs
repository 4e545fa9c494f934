//! Fast reading of PyTorch tensors, through the C functions of DLPack 1.3 that PyTorch 2.10 and later has.
//!
//! A state dict has thousands of tensors, and a dozen of attributes of each would cost more than the export.

use std::ffi::{c_int, c_void};
use std::ptr;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use pyo3::{ffi, intern};

use crate::dlpack::{DlTensor, Foreign, foreign};

/// `DLPackExchangeAPI`, of version 1.
#[repr(C)]
struct ExchangeApi {
    major: u32,
    minor: u32,
    previous: *const ExchangeApi,
    allocate: *const c_void,
    managed_from_object: *const c_void,
    managed_to_object: *const c_void,
    /// `dltensor_from_py_object_no_sync`: describes a tensor, whose object keeps what the description points to. On failure it returns
    /// another value than 0 and sets an exception.
    read: Option<Read>,
    current_stream: *const c_void,
}

type Read = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;

/// The types whose tensors are plain memory, and the function that reads them.
struct PlainTypes {
    types: [Py<PyType>; 2],
    read: Read,
}

/// Reads a tensor of `torch.Tensor` or `torch.nn.Parameter`. Returns `None` for other types, for tensors that are not plain memory, and
/// where PyTorch has no such function: then the attributes tell why.
pub(crate) fn read(tensor: &Bound<'_, PyAny>) -> PyResult<Option<Foreign>> {
    let py = tensor.py();
    let Some(known) = plain_types(py) else { return Ok(None) };
    let kind = tensor.get_type();
    if !known.types.iter().any(|known| kind.is(known)) {
        return Ok(None);
    }
    for lazy in [intern!(py, "is_conj"), intern!(py, "is_neg")] {
        if tensor.call_method0(lazy)?.is_truthy()? {
            return Ok(None);
        }
    }
    let mut found = DlTensor::EMPTY;
    // SAFETY: the object is of a type that has the function, which writes one `DLTensor`.
    if unsafe { (known.read)(tensor.as_ptr().cast(), &raw mut found) } != 0 {
        // The reason follows from the attributes.
        drop(PyErr::take(py));
        return Ok(None);
    }
    let owner = tensor.call_method0(intern!(py, "untyped_storage"))?.unbind();
    // SAFETY: the function has written it, and the tensor is alive and unchanged.
    Ok(unsafe { foreign(&found, owner) }.ok())
}

/// Returns the types of the imported torch, or `None` where it lacks the function.
fn plain_types(py: Python<'_>) -> Option<&PlainTypes> {
    static KNOWN: PyOnceLock<Option<PlainTypes>> = PyOnceLock::new();
    KNOWN.get_or_init(py, || find(py).unwrap_or(None)).as_ref()
}

fn find(py: Python<'_>) -> PyResult<Option<PlainTypes>> {
    let torch = py.import("torch")?;
    let tensor = torch.getattr("Tensor")?.cast_into::<PyType>()?;
    let parameter = torch.getattr("nn")?.getattr("Parameter")?.cast_into::<PyType>()?;
    let capsule = tensor.getattr("__dlpack_c_exchange_api__")?;
    // SAFETY: the interpreter checks the name of the capsule.
    let found = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), c"dlpack_exchange_api".as_ptr()) };
    if found.is_null() {
        return Err(PyErr::fetch(py));
    }
    let mut api: *const ExchangeApi = found.cast_const().cast();
    // SAFETY: a capsule of this name points to such a table, which lives as long as the process and may name one of an older version.
    // Every version begins with its number and that pointer.
    let read = unsafe {
        while let Some(newer) = api.as_ref()
            && newer.major != 1
        {
            api = newer.previous;
        }
        api.as_ref().and_then(|api| api.read)
    };
    Ok(read.map(|read| PlainTypes { types: [tensor.unbind(), parameter.unbind()], read }))
}

impl DlTensor {
    const EMPTY: Self = Self {
        data: ptr::null_mut(),
        device_type: 0,
        device_id: 0,
        ndim: 0,
        dtype: crate::dtype::DlDtype { code: 0, bits: 0, lanes: 0 },
        shape: ptr::null_mut(),
        strides: ptr::null_mut(),
        byte_offset: 0,
    };
}
