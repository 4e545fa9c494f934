//! Tensors in mapped, received or allocated memory.

use std::any::Any;
use std::ffi::c_int;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use device_ipc::{AsStream as _, DeviceRange, Dtype, TensorLayout};
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::dtype::to_typestr;
use crate::error::OrRaise as _;
use crate::mapping_inner::MappingInner;
use crate::ring::ReadSlotInner;
use crate::session::not_picklable;
use crate::stream::DlpackStream;
use crate::uses::Use;
use crate::{backend, buffer, cuda_array_interface, dlpack};

/// A guard that keeps the memory of a tensor mapped.
#[derive(Clone)]
pub(crate) enum Keeper {
    Mapping(Arc<Use>),
    /// Memory of this process.
    Owned(#[expect(dead_code, reason = "the owner is only dropped")] Arc<dyn Any + Send + Sync>),
    ReadSlot(Arc<ReadSlotInner>),
    /// Mappings side by side in a reservation.
    SideBySide(Arc<[Arc<Use>]>),
}

impl Keeper {
    /// Makes the consumer's stream wait until the bytes are ready; for memory that the host reads, waits.
    fn wait_ready(&self, py: Python<'_>, tensor: &TensorData, stream: DlpackStream) -> PyResult<()> {
        match self {
            Self::Mapping(mapping) => mapping.inner.wait_ready(py, tensor, stream),
            Self::ReadSlot(slot) => slot.wait_ready(py, tensor),
            Self::Owned(_) => Ok(()),
            Self::SideBySide(parts) => {
                parts.iter().try_for_each(|part| part.inner.wait_ready(py, tensor, stream))
            }
        }
    }

    /// Fails if the memory is that of a suspended mapping.
    pub(crate) fn check_mapped(&self, py: Python<'_>) -> PyResult<()> {
        self.parts().iter().try_for_each(|part| part.inner.check_mapped(py))
    }

    /// Returns whether the caller has asked for capsules of read-only memory of a device.
    fn allows_read_only(&self) -> bool {
        let parts = self.parts();
        !parts.is_empty() && parts.iter().all(|part| part.inner.allow_read_only)
    }

    /// Returns the streams in whose order the bytes are ready, each once, as `__cuda_array_interface__` states it.
    pub(crate) fn stream_numbers(&self) -> Vec<u64> {
        let streams = self.parts().iter().filter_map(|part| part.inner.stream.as_ref());
        // The interface forbids 0; 1 names the same stream.
        let mut numbers: Vec<_> = streams.map(|stream| stream.as_stream().raw().max(1)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    /// Returns the uses of mappings.
    fn parts(&self) -> &[Arc<Use>] {
        match self {
            Self::Mapping(mapping) => std::slice::from_ref(mapping),
            Self::SideBySide(parts) => parts,
            Self::Owned(_) | Self::ReadSlot(_) => &[],
        }
    }
}

/// A tensor, as far as it concerns other frameworks.
#[derive(Clone)]
pub(crate) struct TensorData {
    pub(crate) backend: &'static str,
    /// From the first element to the end of the last.
    pub(crate) range: DeviceRange,
    /// Without its offset: the first element is at the start of the range.
    layout: TensorLayout,
    pub(crate) is_writable: bool,
    pub(crate) keeper: Keeper,
}

impl TensorData {
    /// A tensor of this layout, whose first element is at the start of the range.
    pub(crate) fn new(
        backend: &'static str,
        range: DeviceRange,
        layout: &TensorLayout,
        is_writable: bool,
        keeper: Keeper,
    ) -> Self {
        Self { backend, range, layout: layout.clone(), is_writable, keeper }
    }

    /// The bytes of a range.
    pub(crate) fn bytes(
        backend: &'static str,
        range: DeviceRange,
        is_writable: bool,
        keeper: Keeper,
    ) -> Self {
        let layout =
            TensorLayout::contiguous(Dtype::U8, [range.len]).expect("any number of bytes is a layout");
        Self { backend, range, layout, is_writable, keeper }
    }

    pub(crate) const fn dtype(&self) -> Dtype {
        self.layout.dtype()
    }

    pub(crate) fn shape(&self) -> &[u64] {
        self.layout.shape()
    }

    /// Returns the strides in elements.
    pub(crate) fn strides(&self) -> &[u64] {
        self.layout.strides()
    }

    /// The tensor in the slot of a ring, whose bytes are a range; without a layout, its bytes.
    pub(crate) fn in_slot(
        backend: &'static str,
        slot: DeviceRange,
        layout: Option<&TensorLayout>,
        is_writable: bool,
        keeper: Keeper,
    ) -> Self {
        let place = |layout: &TensorLayout| {
            slot.slice(layout.start_bytes(), layout.span_bytes().saturating_sub(layout.start_bytes()))
        };
        match layout.and_then(|layout| Some((layout, place(layout)?))) {
            Some((layout, range)) => Self::new(backend, range, layout, is_writable, keeper),
            None => Self::bytes(backend, slot, is_writable, keeper),
        }
    }

    /// Waits until the bytes are ready, for memory that the host reads.
    pub(crate) fn wait_on_host(&self, py: Python<'_>) -> PyResult<()> {
        self.keeper.wait_ready(py, self, DlpackStream::new(None))
    }

    /// Returns whether the elements lie one after the other: in rows, as in C, or in columns, as in Fortran.
    pub(crate) fn is_contiguous(&self, in_columns: bool) -> bool {
        let mut expected = 1;
        let mut is_next = |(size, stride): (&u64, &u64)| {
            let is_next = *size == 1 || *stride == expected;
            expected *= size;
            is_next
        };
        let mut axes = self.shape().iter().zip(self.strides());
        self.shape().contains(&0) || if in_columns { axes.all(is_next) } else { axes.rev().all(&mut is_next) }
    }

    /// Returns the name of the device as PyTorch writes it.
    pub(crate) fn device(&self) -> String {
        device_name(self.backend, self.range.device.get())
    }
}

/// Returns the name of a device as the frameworks write it.
pub(crate) fn device_name(backend: &str, ordinal: u32) -> String {
    format!("{}:{ordinal}", backend::kind(backend))
}

/// A tensor in memory that this process may access: of a `Mapping`, of a ring's slot, or made by `empty`.
///
/// Any framework takes it without a copy through `__dlpack__`. What a framework makes of it keeps the memory mapped.
///
/// Two tensors are equal if they are the same memory of this process with the same element type, shape and strides; elements are
/// not compared.
#[pyclass(frozen, eq, hash, weakref, module = "device_ipc")]
pub(crate) struct Tensor {
    pub(crate) data: TensorData,
}

impl Tensor {
    /// Returns the properties that make tensors equal.
    fn place(&self) -> (&str, DeviceRange, Dtype, &[u64], &[u64]) {
        let data = &self.data;
        (data.backend, data.range, data.dtype(), data.shape(), data.strides())
    }
}

impl PartialEq for Tensor {
    fn eq(&self, other: &Self) -> bool {
        self.place() == other.place()
    }
}

impl Hash for Tensor {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.place().hash(state);
    }
}

#[pymethods]
impl Tensor {
    /// The size of each dimension.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.data.shape())
    }

    /// The number of dimensions.
    #[getter]
    fn ndim(&self) -> usize {
        self.data.shape().len()
    }

    /// The number of elements: the product of `shape`, and 1 for a tensor without dimensions.
    #[getter]
    fn size(&self) -> u64 {
        self.data.shape().iter().product()
    }

    /// The size of an element in bytes.
    #[getter]
    fn itemsize(&self) -> PyResult<u64> {
        let dtype = self.data.dtype();
        dtype.bytes().ok_or_else(|| {
            PyValueError::new_err(format!(
                "this version does not know the element type {dtype}; use a newer one"
            ))
        })
    }

    /// The distance between neighbours in each dimension, in elements.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.data.strides())
    }

    /// The element type, as PyTorch names it: `"float32"`.
    #[getter]
    fn dtype(&self) -> String {
        self.data.dtype().to_string()
    }

    /// The device: `"cuda:0"`, `"npu:0"` or `"mock:0"`.
    #[getter]
    fn device(&self) -> String {
        self.data.device()
    }

    /// The address of the first element, in this process.
    #[getter]
    fn ptr(&self) -> u64 {
        self.data.range.ptr.get()
    }

    /// The number of bytes from the first element to the end of the last: `size * itemsize` for a tensor without gaps.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.data.range.len
    }

    /// Whether the memory is mapped without write access.
    #[getter]
    fn read_only(&self) -> bool {
        !self.data.is_writable
    }

    /// The bytes from the first element to the end of the last, as a tensor of `uint8` with one dimension.
    #[getter]
    fn bytes(&self) -> Self {
        let TensorData { backend, range, is_writable, ref keeper, .. } = self.data;
        Self { data: TensorData::bytes(backend, range, is_writable, keeper.clone()) }
    }

    /// Returns a DLPack capsule. The stream waits on the device until the bytes are ready.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        to_dlpack(py, &self.data, stream, max_version, dl_device, copy)
    }

    /// Returns a NumPy array of the memory, without a copy; for the mock only.
    ///
    /// Raises `TypeError` if the memory is that of a device.
    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        to_numpy(slf, &slf.get().data, dtype, copy)
    }

    // SAFETY: Python calls it as `bf_getbuffer`, whose rules are those of `fill`.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        // SAFETY: as above.
        unsafe { buffer::fill(&slf, view, flags) }
    }

    // SAFETY: Python calls it once for each buffer that `__getbuffer__` has filled.
    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: as above.
        unsafe { buffer::release(view) }
    }

    /// Returns the DLPack device: its type and ordinal.
    fn __dlpack_device__(&self) -> PyResult<(i32, i32)> {
        dlpack::device_of(self.data.backend, self.data.range.device.get())
    }

    /// The CUDA array interface; absent for memory or element types that it cannot describe.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        cuda_array_interface::interface(py, &self.data)
    }

    fn __len__(&self) -> PyResult<usize> {
        let first = self.data.shape().first();
        first
            .map(|size| *size as usize)
            .ok_or_else(|| PyTypeError::new_err("a tensor without dimensions has no len()"))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("a Tensor", "send the text of its export (str(export)) and open it there"))
    }

    fn __repr__(&self) -> String {
        let access = if self.data.is_writable { "" } else { ", read-only" };
        let (dtype, shape) = (self.data.dtype(), self.data.shape());
        format!("<device_ipc.Tensor {dtype} {shape:?} on {}{access}>", self.data.device())
    }
}

/// Returns a NumPy array of the memory of `object`, which has `__dlpack__`; without a copy, unless `dtype` or `copy` requires one.
pub(crate) fn to_numpy<'py>(
    object: &Bound<'py, PyAny>,
    tensor: &TensorData,
    dtype: Option<&Bound<'py, PyAny>>,
    copy: Option<bool>,
) -> PyResult<Bound<'py, PyAny>> {
    if !backend::is_host(tensor.backend) {
        return Err(PyTypeError::new_err(format!(
            "the tensor is on {}, and a NumPy array is in the memory of the host; copy it with a framework of that device, such \
             as torch.from_dlpack(tensor).cpu().numpy()",
            tensor.device()
        )));
    }
    if to_typestr(tensor.dtype()).is_none() {
        return Err(PyTypeError::new_err(format!(
            "NumPy has no element type {}; tensor.bytes is an array of the bytes",
            tensor.dtype()
        )));
    }
    let numpy = object.py().import("numpy")?;
    let array = numpy.call_method1("from_dlpack", (object,))?;
    if dtype.is_none() && copy != Some(true) {
        return Ok(array);
    }
    let options = PyDict::new(object.py());
    options.set_item("dtype", dtype)?;
    options.set_item("copy", copy)?;
    numpy.call_method("array", (array,), Some(&options))
}

/// Returns a capsule, by the rules of the Python array API.
pub(crate) fn to_dlpack(
    py: Python<'_>,
    tensor: &TensorData,
    stream: Option<i64>,
    max_version: Option<(u32, u32)>,
    dl_device: Option<(i32, i32)>,
    copy: Option<bool>,
) -> PyResult<Py<PyAny>> {
    if copy == Some(true) {
        return Err(PyBufferError::new_err("device_ipc makes no copies; copy the imported tensor"));
    }
    let own = dlpack::device_of(tensor.backend, tensor.range.device.get())?;
    if dl_device.is_some_and(|wanted| wanted != own) {
        return Err(PyBufferError::new_err(format!(
            "the tensor is on the DLPack device {own:?}; open it on the wanted device instead (device_ipc.open(…, device=…))"
        )));
    }
    let versioned = max_version.is_some_and(|(major, _)| major >= 1);
    prepare(py, tensor, versioned, DlpackStream::new(stream))?;
    dlpack::capsule(py, tensor, versioned)
}

/// Refuses read-only memory that the consumer would take for writable, and makes the consumer's stream wait for the bytes.
pub(crate) fn prepare(
    py: Python<'_>,
    tensor: &TensorData,
    versioned: bool,
    stream: DlpackStream,
) -> PyResult<()> {
    if !tensor.is_writable {
        if !versioned {
            return Err(PyBufferError::new_err(
                "the memory is read-only, which a DLPack capsule before version 1.0 cannot state; use a newer framework, or \
                 open the memory for writing",
            ));
        }
        if !backend::is_host(tensor.backend) && !tensor.keeper.allows_read_only() {
            return Err(PyBufferError::new_err(
                "the memory is read-only, and PyTorch and CuPy ignore the DLPack flag that states it: a kernel that writes would \
                 end this process's use of the device; if no work writes the tensor, open it with allow_read_only=True",
            ));
        }
    }
    tensor.keeper.wait_ready(py, tensor, stream)
}

/// Makes a stream wait for the bytes of a mapping, or waits on the host.
impl MappingInner {
    fn wait_ready(&self, py: Python<'_>, tensor: &TensorData, stream: DlpackStream) -> PyResult<()> {
        self.check_mapped(py)?;
        if backend::is_host(tensor.backend) {
            // The host reads the memory.
            let Some(opened_on) = &self.stream else { return Ok(()) };
            return opened_on.synchronize(py);
        }
        let Some(stream) = stream.borrowed(tensor.backend, tensor.range.device) else { return Ok(()) };
        self.read(py, |mapping| py.detach(|| mapping.wait_ready(&stream)))?.or_raise(py)
    }
}
