//! The buffer protocol of tensors in memory of the host, such as that of the mock.

use std::ffi::{CStr, c_int, c_void};

use device_ipc::Dtype;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::backend;
use crate::tensor::{Tensor, TensorData};

/// What a buffer points to besides the memory. Python gives it back with the buffer.
struct Parts {
    shape: Vec<isize>,
    strides: Vec<isize>,
}

/// Fills a buffer with the memory of a tensor, which the buffer keeps mapped.
///
/// # Safety
///
/// `view` is null, or points to a buffer that this call may overwrite, as `bf_getbuffer` requires.
pub(crate) unsafe fn fill(slf: &Bound<'_, Tensor>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
    if view.is_null() {
        return Err(PyBufferError::new_err("there is no buffer to fill"));
    }
    // SAFETY: the caller passes a buffer that may be written. Python requires null on failure.
    unsafe { (*view).obj = std::ptr::null_mut() };
    let tensor = &slf.get().data;
    let format = check(tensor, flags)?;
    tensor.wait_on_host(slf.py())?;
    let element = tensor.dtype().bytes().unwrap_or(1) as isize;
    let mut parts = Box::new(Parts {
        shape: tensor.shape().iter().map(|size| *size as isize).collect(),
        strides: tensor.strides().iter().map(|stride| *stride as isize * element).collect(),
    });
    let has = |flag: c_int| flags & flag == flag;
    let elements: isize = parts.shape.iter().product();
    let is_shaped = has(ffi::PyBUF_ND);
    let pointer = |wanted: bool, values: &mut Vec<isize>| {
        if wanted { values.as_mut_ptr() } else { std::ptr::null_mut() }
    };
    let (shape, strides) =
        (pointer(is_shaped, &mut parts.shape), pointer(has(ffi::PyBUF_STRIDES), &mut parts.strides));
    let buffer = ffi::Py_buffer {
        buf: tensor.range.ptr.get() as *mut c_void,
        obj: slf.clone().into_ptr(),
        len: elements * element,
        itemsize: element,
        readonly: c_int::from(!tensor.is_writable),
        ndim: if is_shaped { tensor.shape().len() as c_int } else { 1 },
        format: if has(ffi::PyBUF_FORMAT) { format.as_ptr().cast_mut() } else { std::ptr::null_mut() },
        shape,
        strides,
        suboffsets: std::ptr::null_mut(),
        internal: Box::into_raw(parts).cast(),
    };
    // SAFETY: as above. The vectors that it points to are in `internal`, until `release`; the format is static.
    unsafe { view.write(buffer) };
    Ok(())
}

/// Frees what `fill` has allocated for a buffer.
///
/// # Safety
///
/// `view` was filled by `fill`, and is released once.
pub(crate) unsafe fn release(view: *mut ffi::Py_buffer) {
    // SAFETY: `fill` has made `internal` of a box of this type.
    drop(unsafe { Box::from_raw((*view).internal.cast::<Parts>()) });
}

/// Checks that the tensor has such a buffer, and returns the format of its elements.
fn check(tensor: &TensorData, flags: c_int) -> PyResult<&'static CStr> {
    let refused = |why: String| Err(PyBufferError::new_err(why));
    if !backend::is_host(tensor.backend) {
        return refused(format!(
            "the tensor is on {}, and a buffer is memory of the host; copy it with a framework of that device, such as \
             torch.from_dlpack(tensor).cpu().numpy()",
            tensor.device()
        ));
    }
    let Some(format) = format(tensor.dtype()) else {
        return refused(format!(
            "the buffer protocol has no format for {}; tensor.bytes has a buffer of the bytes",
            tensor.dtype()
        ));
    };
    let has = |flag: c_int| flags & flag == flag;
    if has(ffi::PyBUF_WRITABLE) && !tensor.is_writable {
        return refused("the memory is read-only".to_owned());
    }
    let (in_rows, in_columns) = (tensor.is_contiguous(false), tensor.is_contiguous(true));
    let is_permitted = match () {
        () if has(ffi::PyBUF_C_CONTIGUOUS) => in_rows,
        () if has(ffi::PyBUF_F_CONTIGUOUS) => in_columns,
        () if has(ffi::PyBUF_ANY_CONTIGUOUS) => in_rows || in_columns,
        () => has(ffi::PyBUF_STRIDES) || in_rows,
    };
    if is_permitted {
        return Ok(format);
    }
    refused("the tensor is not contiguous in the order that is asked for".to_owned())
}

/// Returns the format of an element, as the module `struct` writes it.
const fn format(dtype: Dtype) -> Option<&'static CStr> {
    Some(match dtype {
        Dtype::BOOL => c"?",
        Dtype::U8 => c"B",
        Dtype::I8 => c"b",
        Dtype::I16 => c"h",
        Dtype::U16 => c"H",
        Dtype::I32 => c"i",
        Dtype::U32 => c"I",
        Dtype::I64 => c"q",
        Dtype::U64 => c"Q",
        Dtype::F16 => c"e",
        Dtype::F32 => c"f",
        Dtype::F64 => c"d",
        Dtype::COMPLEX64 => c"Zf",
        Dtype::COMPLEX128 => c"Zd",
        _ => return None,
    })
}
