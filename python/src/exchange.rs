//! Descriptions of PyTorch tensors, and tensors in memory of this library, by the C functions of DLPack 1.3 that PyTorch 2.10 and
//! later has on its type.
//!
//! A state dict has thousands of tensors, and a dozen of attributes of each would cost more than the export.

use std::ffi::{c_int, c_void};
use std::ptr;

use device_ipc::DeviceOrdinal;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

use crate::dlpack::{self, DlTensor, DlVersioned, Foreign, foreign, versioned};
use crate::dtype::{is_complex, is_part_of_complex};
use crate::tensor::TensorData;

/// `DLPackExchangeAPI`, of version 1.
#[repr(C)]
struct ExchangeApi {
    major: u32,
    minor: u32,
    previous: *const ExchangeApi,
    allocate: *const c_void,
    managed_from_object: *const c_void,
    make: Option<Make>,
    read: Option<Read>,
    current_stream: Option<CurrentStream>,
}

/// `dltensor_from_py_object_no_sync`: describes a tensor, whose object keeps what the description points to. On failure it returns
/// another value than 0 and sets an exception.
type Read = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;

/// `managed_tensor_to_py_object_no_sync`: takes a managed tensor, and makes an object of it. On failure it returns another value than 0
/// and sets an exception.
type Make = unsafe extern "C" fn(*mut DlVersioned, *mut *mut c_void) -> c_int;

/// `current_work_stream`: writes the handle of the stream that the framework submits its work to. On failure it returns another value than 0
/// and sets an exception.
type CurrentStream = unsafe extern "C" fn(c_int, i32, *mut *mut c_void) -> c_int;

/// The functions of PyTorch.
pub(crate) struct Exchange {
    /// The types whose tensors are plain memory.
    types: [Py<PyType>; 2],
    read: Read,
    make: Make,
    current_stream: Option<CurrentStream>,
    storage: Method,
    is_neg: Method,
    is_conj: Method,
}

/// A method of PyTorch's tensors in C without arguments. Its call needs no look-up by name.
struct Method(ffi::PyCFunction);

impl Method {
    /// Returns the method of this tensor's type, if it is one in C without arguments.
    fn find(tensor: &Bound<'_, PyAny>, name: &str) -> PyResult<Option<Self>> {
        let bound = tensor.getattr(name)?;
        // SAFETY: the function reads the type of a live object.
        if unsafe { ffi::PyCFunction_Check(bound.as_ptr()) } == 0 {
            return Ok(None);
        }
        // SAFETY: the object is a function in C.
        let (flags, function) = unsafe {
            (ffi::PyCFunction_GetFlags(bound.as_ptr()), ffi::PyCFunction_GetFunction(bound.as_ptr()))
        };
        Ok(function.filter(|_| flags == ffi::METH_NOARGS).map(Self))
    }

    /// Calls the method of a tensor of the same type, or of one derived from it.
    fn call<'py>(&self, tensor: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        // SAFETY: the caller passes an object of the method's type. Methods without arguments get a null pointer.
        let returned = unsafe { (self.0)(tensor.as_ptr(), ptr::null_mut()) };
        // SAFETY: a new reference, or null with an exception set.
        unsafe { Bound::from_owned_ptr_or_err(tensor.py(), returned) }
    }
}

static KNOWN: PyOnceLock<Option<Exchange>> = PyOnceLock::new();

impl Exchange {
    /// Returns the functions of PyTorch, which this call imports, or `None` where it lacks them.
    pub(crate) fn of_torch(py: Python<'_>) -> Option<&Self> {
        KNOWN.get_or_init(py, || find(py).unwrap_or(None)).as_ref()
    }

    /// Returns the functions for this tensor, if an earlier call has found them and the tensor is plain memory.
    pub(crate) fn of_known(tensor: &Bound<'_, PyAny>) -> Option<&'static Self> {
        let known = KNOWN.get(tensor.py())?.as_ref()?;
        known.is_plain(tensor).then_some(known)
    }

    fn is_plain(&self, tensor: &Bound<'_, PyAny>) -> bool {
        self.types.iter().any(|known| tensor.get_type_ptr().cast() == known.as_ptr())
    }

    /// Reads a tensor of `torch.Tensor` or `torch.nn.Parameter`. Returns `None` for other types and for tensors that are not plain
    /// memory: then the attributes tell why.
    pub(crate) fn read(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<Foreign>> {
        if !self.is_plain(tensor) {
            return Ok(None);
        }
        let Some((found, owner)) = self.describe(tensor)? else { return Ok(None) };
        // SAFETY: PyTorch has written it, and the tensor is alive and unchanged.
        Ok(unsafe { foreign(&found, owner) }.ok())
    }

    /// Describes a plain tensor, whose object keeps what the description points to, and returns the owner of its memory. Returns `None`
    /// as [`read`](Self::read) does.
    pub(crate) fn describe<'py>(
        &self,
        tensor: &Bound<'py, PyAny>,
    ) -> PyResult<Option<(DlTensor, Bound<'py, PyAny>)>> {
        let mut found = DlTensor::EMPTY;
        // SAFETY: the object is of a type that has the function, which writes one `DLTensor`.
        if unsafe { (self.read)(tensor.as_ptr().cast(), &raw mut found) } != 0 {
            // The reason follows from the attributes.
            drop(PyErr::take(tensor.py()));
            return Ok(None);
        }
        // The description says nothing of lazy tensors. `conj().imag` is a lazy negative, which cannot be viewed as another type.
        if is_part_of_complex(found.dtype) && self.is_neg.call(tensor)?.is_truthy()?
            || is_complex(found.dtype) && self.is_conj.call(tensor)?.is_truthy()?
        {
            return Ok(None);
        }
        // Not the tensor, nor a managed tensor of it: an assignment to `data` gives both another storage.
        let owner = self.storage.call(tensor)?;
        Ok(Some((found, owner)))
    }

    /// Makes a PyTorch tensor, with a storage of its own that keeps the memory mapped. No stream waits for the bytes.
    pub(crate) fn make<'py>(&self, py: Python<'py>, tensor: &TensorData) -> PyResult<Bound<'py, PyAny>> {
        let managed = versioned(tensor)?;
        // SAFETY: it is a new one.
        unsafe { self.make_managed(py, managed) }
    }

    /// As [`make`](Self::make), for the tensor of a description.
    ///
    /// # Safety
    ///
    /// The description is valid, and no other consumer has it.
    pub(crate) unsafe fn make_managed<'py>(
        &self,
        py: Python<'py>,
        managed: *mut DlVersioned,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut made = ptr::null_mut();
        // SAFETY: the function takes the managed tensor, and deletes it once.
        if unsafe { (self.make)(managed, &raw mut made) } != 0 {
            return Err(PyErr::fetch(py));
        }
        // SAFETY: a new reference.
        unsafe { Bound::from_owned_ptr_or_err(py, made.cast()) }
    }
}

impl Exchange {
    /// Returns the handle of PyTorch's current stream of a CUDA device, whose use PyTorch has begun.
    pub(crate) fn current_stream(&self, py: Python<'_>, device: DeviceOrdinal) -> PyResult<Option<u64>> {
        let Some(current_stream) = self.current_stream else { return Ok(None) };
        let mut stream = ptr::null_mut();
        // SAFETY: the function writes one handle.
        if unsafe { current_stream(dlpack::KDL_CUDA, device.get() as i32, &raw mut stream) } != 0 {
            return Err(PyErr::fetch(py));
        }
        Ok(Some(stream as u64))
    }
}

fn find(py: Python<'_>) -> PyResult<Option<Exchange>> {
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
    let (read, make, current_stream) = unsafe {
        while let Some(newer) = api.as_ref()
            && newer.major != 1
        {
            api = newer.previous;
        }
        let Some(api) = api.as_ref() else { return Ok(None) };
        (api.read, api.make, api.current_stream)
    };
    let on_host = PyDict::new(py);
    on_host.set_item("device", "cpu")?;
    let empty = torch.call_method("empty", (0,), Some(&on_host))?;
    let method = |name| Method::find(&empty, name);
    let (Some(read), Some(make), Some(storage), Some(is_neg), Some(is_conj)) =
        (read, make, method("untyped_storage")?, method("is_neg")?, method("is_conj")?)
    else {
        return Ok(None);
    };
    let types = [tensor.unbind(), parameter.unbind()];
    Ok(Some(Exchange { types, read, make, current_stream, storage, is_neg, is_conj }))
}
