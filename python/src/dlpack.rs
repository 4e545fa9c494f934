//! DLPack capsules in both directions.
//!
//! A deleter drops a reference to a guard of the library and nothing else: it calls no Python.

use std::ffi::{CStr, c_void};
use std::ptr;

use device_ipc::{Dtype, Error, TensorLayout};
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use pyo3::{ffi, intern};

use crate::backend;
use crate::dtype::{DlDtype, from_dlpack, to_dlpack};
use crate::error::OrRaise as _;
use crate::tensor::{Keeper, TensorData};

/// `kDLCPU`: memory of the host.
pub(crate) const CPU: i32 = 1;
/// `kDLCUDA`, whose streams have numbers of their own: 1 is the legacy default stream.
pub(crate) const KDL_CUDA: i32 = 2;
/// `kDLExtDev`: memory of a device that PyTorch has an extension for, with storages of its own.
pub(crate) const EXTENSION: i32 = 12;

/// `DLPACK_FLAG_BITMASK_READ_ONLY`.
const READ_ONLY: u64 = 1;

const NAME: &CStr = c"dltensor";
const VERSIONED_NAME: &CStr = c"dltensor_versioned";

/// `DLTensor`.
#[repr(C)]
pub(crate) struct DlTensor {
    pub(crate) data: *mut c_void,
    pub(crate) device_type: i32,
    pub(crate) device_id: i32,
    pub(crate) ndim: i32,
    pub(crate) dtype: DlDtype,
    pub(crate) shape: *mut i64,
    pub(crate) strides: *mut i64,
    pub(crate) byte_offset: u64,
}

impl DlTensor {
    pub(crate) const EMPTY: Self = Self {
        data: ptr::null_mut(),
        device_type: 0,
        device_id: 0,
        ndim: 0,
        dtype: DlDtype { code: 0, bits: 0, lanes: 0 },
        shape: ptr::null_mut(),
        strides: ptr::null_mut(),
        byte_offset: 0,
    };

    /// Returns the sizes and the strides, which are in elements; `None` where one is negative, or there are no strides.
    ///
    /// # Safety
    ///
    /// `shape` has `ndim` elements, and `strides` too unless it is null.
    pub(crate) unsafe fn sizes(&self) -> Option<(&[u64], &[u64])> {
        let dimensions = usize::try_from(self.ndim).ok()?;
        let list = |at: *mut i64| {
            if dimensions == 0 {
                return Some(&[][..]);
            }
            // SAFETY: the caller knows that it has as many elements.
            (!at.is_null()).then(|| unsafe { std::slice::from_raw_parts(at, dimensions) }).and_then(unsigned)
        };
        Some((list(self.shape)?, list(self.strides)?))
    }

    /// Returns the address of the first element.
    pub(crate) fn ptr(&self) -> u64 {
        (self.data as u64).wrapping_add(self.byte_offset)
    }
}

/// Returns numbers none of which is negative.
fn unsigned(numbers: &[i64]) -> Option<&[u64]> {
    if numbers.iter().any(|number| *number < 0) {
        return None;
    }
    // SAFETY: both types have the same size and alignment, and all values of one are values of the other.
    Some(unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), numbers.len()) })
}

/// `DLManagedTensor`.
#[repr(C)]
struct DlManaged {
    tensor: DlTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlManaged)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
pub(crate) struct DlVersioned {
    major: u32,
    minor: u32,
    pub(crate) context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DlVersioned)>,
    flags: u64,
    tensor: DlTensor,
}

impl DlVersioned {
    /// Describes a tensor, without a context.
    pub(crate) fn new(tensor: DlTensor, is_writable: bool, deleter: unsafe extern "C" fn(*mut Self)) -> Self {
        let flags = if is_writable { 0 } else { READ_ONLY };
        Self { major: 1, minor: 0, context: ptr::null_mut(), deleter: Some(deleter), flags, tensor }
    }
}

/// The fields of a managed tensor that both layouts have.
trait Managed: Sized {
    const NAME: &'static CStr;
    fn delete(&mut self) -> Option<unsafe extern "C" fn(*mut Self)>;
}

impl Managed for DlManaged {
    const NAME: &'static CStr = NAME;
    fn delete(&mut self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }
}

impl Managed for DlVersioned {
    const NAME: &'static CStr = VERSIONED_NAME;
    fn delete(&mut self) -> Option<unsafe extern "C" fn(*mut Self)> {
        self.deleter
    }
}

/// A managed tensor with the memory that its pointers refer to. The managed tensor is the first field, so that the address of
/// one is the address of the other.
#[repr(C)]
struct Exported<M> {
    managed: M,
    /// The shape, and behind it the strides.
    _sizes: Box<[i64]>,
    _keeper: Keeper,
}

impl<M> Exported<M> {
    /// Describes a tensor. `managed` makes the outer structure of the description.
    fn new(tensor: &TensorData, managed: impl FnOnce(DlTensor) -> M) -> PyResult<Box<Self>> {
        let dtype = to_dlpack(tensor.dtype()).ok_or_else(|| {
            PyBufferError::new_err(format!(
                "DLPack has no element type {}; take the bytes (Tensor.bytes) and view them, as device_ipc.torch.open does",
                tensor.dtype()
            ))
        })?;
        let numbers = tensor.shape().iter().chain(tensor.strides());
        let mut sizes: Box<[i64]> = numbers.map(|number| signed(*number)).collect::<PyResult<_>>()?;
        let (shape, strides) = sizes.split_at_mut(tensor.shape().len());
        let (device_type, device_id) = device_of(tensor.backend, tensor.range.device.get())?;
        let dl = DlTensor {
            data: tensor.range.ptr.get() as *mut c_void,
            device_type,
            device_id,
            ndim: shape.len() as i32,
            dtype,
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        };
        Ok(Box::new(Self { managed: managed(dl), _sizes: sizes, _keeper: tensor.keeper.clone() }))
    }
}

impl Exported<DlVersioned> {
    fn versioned(tensor: &TensorData) -> PyResult<Box<Self>> {
        let is_writable = tensor.is_writable;
        Self::new(tensor, |tensor| DlVersioned::new(tensor, is_writable, delete::<DlVersioned>))
    }
}

/// Returns a dimension or a stride as DLPack has it.
pub(crate) fn signed(number: u64) -> PyResult<i64> {
    i64::try_from(number).map_err(|_| PyBufferError::new_err("a dimension or a stride exceeds 2^63 - 1"))
}

/// Returns the DLPack device of memory of this backend.
pub(crate) fn device_of(backend: &str, ordinal: u32) -> PyResult<(i32, i32)> {
    match backend::dlpack_type(backend) {
        Some(CPU) => Ok((CPU, 0)),
        Some(number) => Ok((number, ordinal as i32)),
        None => {
            Err(PyBufferError::new_err(format!("DLPack has no type of device for the backend {backend:?}")))
        }
    }
}

/// Returns a capsule of the tensor, which keeps the tensor's memory mapped.
pub(crate) fn capsule(py: Python<'_>, tensor: &TensorData, is_versioned: bool) -> PyResult<Py<PyAny>> {
    if is_versioned {
        return new_capsule(py, Exported::versioned(tensor)?);
    }
    let managed = |tensor| DlManaged { tensor, context: ptr::null_mut(), deleter: Some(delete::<DlManaged>) };
    new_capsule(py, Exported::new(tensor, managed)?)
}

/// Returns a managed tensor for one consumer, who calls its deleter. Until then it keeps the tensor's memory mapped.
pub(crate) fn versioned(tensor: &TensorData) -> PyResult<*mut DlVersioned> {
    Exported::versioned(tensor).map(|exported| Box::into_raw(exported).cast())
}

fn new_capsule<M: Managed>(py: Python<'_>, exported: Box<Exported<M>>) -> PyResult<Py<PyAny>> {
    let exported = Box::into_raw(exported);
    // SAFETY: the pointer is not null, and the name is static.
    let made = unsafe { ffi::PyCapsule_New(exported.cast(), M::NAME.as_ptr(), Some(destroy::<M>)) };
    // SAFETY: a new reference, or null with an exception set.
    let capsule = unsafe { Bound::from_owned_ptr_or_err(py, made) };
    capsule.map(Bound::unbind).inspect_err(|_| {
        // SAFETY: no capsule has taken the pointer.
        drop(unsafe { Box::from_raw(exported) });
    })
}

/// The deleter of a managed tensor, called by its consumer.
unsafe extern "C" fn delete<M>(managed: *mut M) {
    // SAFETY: the consumer passes the pointer that it was given, once; it points to the first field of `Exported<M>`.
    drop(unsafe { Box::from_raw(managed.cast::<Exported<M>>()) });
}

/// The destructor of a capsule: deletes the managed tensor of a capsule that no consumer took.
unsafe extern "C" fn destroy<M: Managed>(capsule: *mut ffi::PyObject) {
    // SAFETY: called by the interpreter with the capsule. A consumer renames a capsule that it takes.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) == 0 {
            return;
        }
        let managed = ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()).cast::<M>();
        if let Some(deleter) = managed.as_mut().and_then(Managed::delete) {
            deleter(managed);
        }
    }
}

/// A tensor of another framework.
pub(crate) struct Foreign {
    pub(crate) backend: &'static str,
    pub(crate) ordinal: u32,
    pub(crate) ptr: u64,
    pub(crate) layout: TensorLayout,
    /// Whether the framework permits writing; true if it does not say.
    pub(crate) is_writable: bool,
    /// The object that keeps the memory allocated.
    pub(crate) owner: Py<PyAny>,
}

/// Reads a tensor through its `__dlpack__`. The capsule, which is not consumed, keeps the memory.
pub(crate) fn import(object: &Bound<'_, PyAny>) -> PyResult<Foreign> {
    let py = object.py();
    let device = object.call_method0(intern!(py, "__dlpack_device__"))?;
    let device_type = device.get_item(0)?.call_method0("__index__")?.extract::<i32>()?;
    let method = object.getattr(intern!(py, "__dlpack__"))?;
    let arguments = PyDict::new(py);
    if device_type != CPU {
        // The caller states the stream that writes the memory; the producer need not wait.
        arguments.set_item("stream", -1)?;
    }
    let plain = arguments.copy()?;
    arguments.set_item("max_version", (1, 0))?;
    let capsule = match method.call((), Some(&arguments)) {
        // A producer of before DLPack 1.0.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => method.call((), Some(&plain))?,
        other => other?,
    };
    // SAFETY: the names select the layout; the capsule is alive, and so is the tensor in it.
    let (tensor, is_writable) = unsafe {
        if ffi::PyCapsule_IsValid(capsule.as_ptr(), VERSIONED_NAME.as_ptr()) != 0 {
            let managed = ffi::PyCapsule_GetPointer(capsule.as_ptr(), VERSIONED_NAME.as_ptr());
            let managed = &*managed.cast::<DlVersioned>();
            if managed.major != 1 {
                return Err(PyBufferError::new_err(format!(
                    "the tensor uses DLPack {}.{}; version 1 is supported",
                    managed.major, managed.minor
                )));
            }
            (&managed.tensor, managed.flags & READ_ONLY == 0)
        } else if ffi::PyCapsule_IsValid(capsule.as_ptr(), NAME.as_ptr()) != 0 {
            let managed = ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr());
            (&(*managed.cast::<DlManaged>()).tensor, true)
        } else {
            return Err(PyTypeError::new_err("__dlpack__ returned something that is not a DLPack capsule"));
        }
    };
    // SAFETY: it is alive, and so are its sizes.
    let found = unsafe { foreign(tensor, capsule) };
    found.map(|found| Foreign { is_writable, ..found })
}

/// Returns the tensor that a `DLTensor` describes.
///
/// # Safety
///
/// `shape` has `ndim` elements, and `strides` too unless it is null.
pub(crate) unsafe fn foreign(tensor: &DlTensor, owner: Bound<'_, PyAny>) -> PyResult<Foreign> {
    let backend = backend::of_dlpack_type(tensor.device_type).ok_or_else(|| {
        PyBufferError::new_err(format!(
            "the tensor is on a device of DLPack type {}; memory of {} can be shared",
            tensor.device_type,
            backend::device_names("")
        ))
    })?;
    let dtype = from_dlpack(tensor.dtype).ok_or_else(|| {
        PyBufferError::new_err(format!("the DLPack element type {:?} is not supported", tensor.dtype))
    })?;
    let dimensions = usize::try_from(tensor.ndim).unwrap_or(0);
    let list = |at: *mut i64| {
        // SAFETY: a tensor has `ndim` sizes and as many strides, or none where the pointer is null.
        (dimensions > 0 && !at.is_null()).then(|| unsafe { std::slice::from_raw_parts(at, dimensions) })
    };
    let shape = list(tensor.shape).unwrap_or_default();
    let layout = match list(tensor.strides) {
        Some(strides) => layout(owner.py(), dtype, shape, strides)?,
        None => layout(owner.py(), dtype, shape, &row_major(shape))?,
    };
    Ok(Foreign {
        backend,
        ordinal: tensor.device_id.max(0) as u32,
        ptr: tensor.ptr(),
        layout,
        is_writable: true,
        owner: owner.unbind(),
    })
}

/// Returns the layout of a tensor of a framework. The strides are in elements.
pub(crate) fn layout(py: Python<'_>, dtype: Dtype, shape: &[i64], strides: &[i64]) -> PyResult<TensorLayout> {
    let checked = |numbers, what| {
        unsigned(numbers)
            .ok_or_else(|| PyValueError::new_err(format!("the tensor has a negative {what}; copy it first")))
    };
    let layout = TensorLayout::strided(dtype, checked(shape, "size")?, checked(strides, "stride")?);
    layout.map_err(Error::from).or_raise(py)
}

/// Returns the strides of a row-major tensor, in elements.
pub(crate) fn row_major(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1_i64; shape.len()];
    for dimension in (1..shape.len()).rev() {
        strides[dimension - 1] = strides[dimension].saturating_mul(shape[dimension].max(1));
    }
    strides
}
