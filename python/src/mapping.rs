//! Mappings: named tensors of another process.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use device_ipc::{DeviceRange, Dtype, TensorLayout};
use pyo3::exceptions::{PyKeyError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyList, PyString, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

use crate::error::{OrRaise as _, exception};
use crate::export::Descriptor;
use crate::grant::Grant;
use crate::mapping_inner::MappingInner;
use crate::open::NextVersion;
use crate::owner::Callback;
use crate::session::{check_fork, not_picklable, note_use};
use crate::stream::StreamArg;
use crate::tensor::{Keeper, Tensor, TensorData, device_name, to_dlpack, to_numpy};
use crate::timeline::Timeline;
use crate::uses::{self, Use};
use crate::views::torch_views;
use crate::{cuda_array_interface, dlpack, wait};

/// Memory of another process: a mapping of names to tensors. A single tensor without a name has the name `""`, and the mapping
/// itself can be passed to frameworks.
///
/// As a context manager, it is released at the end of the block, in the order of its stream. A tensor that is still in use
/// after the block keeps the memory mapped.
#[pyclass(frozen, mapping, weakref, module = "device_ipc")]
pub(crate) struct Mapping {
    inner: Mutex<Option<Arc<MappingInner>>>,
    /// For the names of the tensors that are still in use when the mapping has been closed.
    weak: Weak<MappingInner>,
    /// The callables of `on_dropped` and `on_gone`. They usually refer to this object: the garbage collector finds that cycle.
    callbacks: Mutex<Vec<Arc<Callback>>>,
}

impl Mapping {
    pub(crate) fn new(inner: MappingInner) -> Self {
        note_use();
        let inner = Arc::new(inner);
        uses::note(&inner);
        Self { weak: Arc::downgrade(&inner), inner: Mutex::new(Some(inner)), callbacks: Mutex::default() }
    }

    /// Keeps a callable for the collector.
    fn callback(&self, callback: Bound<'_, PyAny>) -> Arc<Callback> {
        let callback = Arc::new(Callback::new(callback));
        self.callbacks.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&callback));
        callback
    }

    pub(crate) fn inner(&self) -> PyResult<Arc<MappingInner>> {
        check_fork()?;
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.clone().ok_or_else(|| PyValueError::new_err("the mapping is closed"))
    }

    /// Parses the argument `stream`, which is one of the mapping's first device if it states none.
    fn stream(
        &self,
        py: Python<'_>,
        inner: &MappingInner,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<StreamArg>> {
        let ipc = crate::session::ipc(py, Some(inner.backend))?;
        stream.map(|stream| StreamArg::parse(stream, &ipc, inner.device)).transpose()
    }

    fn only(&self, py: Python<'_>) -> PyResult<TensorData> {
        let inner = self.inner()?;
        let found = inner.view(py, |mapping| mapping.tensor().map(|tensor| data(&inner, "", &tensor)))?;
        found.map_err(|error| match error {
            device_ipc::Error::Layout(device_ipc::LayoutError::Named(count)) => PyTypeError::new_err(
                format!("the mapping has {count} named tensors; take one of them: mapping[name]"),
            ),
            other => exception(py, &other),
        })
    }
}

/// Returns a view of a mapping.
fn view<'py>(mapping: &Bound<'py, Mapping>, module: &str, name: &str) -> PyResult<Bound<'py, PyAny>> {
    mapping.get().inner()?;
    mapping.py().import(module)?.getattr(name)?.call1((mapping,))
}

/// Returns whether an exception is being handled: the block of a `with` statement has raised one, for example.
fn is_handling(py: Python<'_>) -> PyResult<bool> {
    let handled = py.import("sys")?.call_method0("exc_info")?;
    Ok(!handled.get_item(0)?.is_none())
}

/// A kind of tensors in the result of `Mapping._places`.
type Kind = (String, Option<usize>);

/// A tensor in the result of `Mapping._places`.
type Place<'py> = (Bound<'py, PyString>, usize, u64, Bound<'py, PyTuple>, Option<Bound<'py, PyTuple>>);

fn data(inner: &Arc<MappingInner>, name: &str, tensor: &device_ipc::Tensor<'_>) -> TensorData {
    let keeper = Keeper::Mapping(Use::new(inner, name.to_owned()));
    TensorData::new(inner.backend, tensor.range(), tensor.layout(), inner.is_writable(), keeper)
}

#[pymethods]
impl Mapping {
    /// The tensor without a name.
    #[getter]
    fn tensor(&self, py: Python<'_>) -> PyResult<Tensor> {
        Ok(Tensor { data: self.only(py)? })
    }

    /// The regions of the memory as tensors of bytes: each named tensor lies in one of them. One import of each into a framework is
    /// enough for views of all tensors.
    #[getter]
    fn regions(&self, py: Python<'_>) -> PyResult<Vec<Tensor>> {
        let inner = self.inner()?;
        let made = |(position, range)| {
            let keeper = Keeper::Mapping(Use::new(&inner, format!("regions[{position}]")));
            Tensor { data: TensorData::bytes(inner.backend, range, inner.is_writable(), keeper) }
        };
        inner.view(py, |mapping| mapping.regions().enumerate().map(made).collect())
    }

    /// Returns the kinds of tensors and the tensors, for views of the regions. A kind is an element type and the position of a region in
    /// `regions`, or None for tensors without elements. A tensor is its name, the position of its kind, its offset in the region in
    /// elements, its shape, and its strides in elements or None where they follow from the
    /// shape.
    fn _places<'py>(&self, py: Python<'py>) -> PyResult<(Vec<Kind>, Vec<Place<'py>>)> {
        let inner = self.inner()?;
        let (mut regions, ranges) = inner.view(py, |mapping| {
            let ranges: Vec<_> = mapping.tensors().map(|(_, tensor)| tensor.range()).collect();
            (mapping.regions().enumerate().collect::<Vec<_>>(), ranges)
        })?;
        regions.sort_unstable_by_key(|(_, region)| (region.device, region.ptr));
        let mut kinds: Vec<(Dtype, Option<usize>)> = Vec::new();
        let place = |((name, layout), range): ((&str, &TensorLayout), DeviceRange)| {
            let behind = regions
                .partition_point(|(_, region)| (region.device, region.ptr) <= (range.device, range.ptr));
            let region = behind.checked_sub(1).map(|before| regions[before]);
            let element = layout.dtype().bytes().unwrap_or(1);
            let offset = |region: DeviceRange| {
                let bytes = range.ptr.offset_from(region.ptr)?;
                (range.len > 0 && region.contains(&range) && bytes.is_multiple_of(element))
                    .then_some(bytes / element)
            };
            let found = region.and_then(|(position, region)| Some((position, offset(region)?)));
            let kind = (layout.dtype(), found.map(|(position, _)| position));
            let known = kinds.iter().rposition(|known| *known == kind);
            let kind = known.unwrap_or_else(|| {
                kinds.push(kind);
                kinds.len() - 1
            });
            let strides = (!is_row_major(layout)).then(|| PyTuple::new(py, layout.strides())).transpose()?;
            let shape = PyTuple::new(py, layout.shape())?;
            Ok((PyString::new(py, name), kind, found.map_or(0, |(_, offset)| offset), shape, strides))
        };
        let places = inner.contents.tensors().zip(ranges).map(place).collect::<PyResult<_>>()?;
        Ok((kinds.into_iter().map(|(dtype, region)| (dtype.to_string(), region)).collect(), places))
    }

    /// Returns PyTorch tensors by name, each with a storage of its own that keeps the memory mapped; `None` where PyTorch has no function
    /// that makes them. `other(tensor, view)` is called for tensors that the function cannot make: it returns a tensor with the storage of
    /// `view`, which is at the same place, or with one of its own if that is `None`.
    fn _torch_views<'py>(
        &self,
        py: Python<'py>,
        other: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyDict>>> {
        torch_views(py, &self.inner()?, other)
    }

    /// The devices in whose address space the tensors are.
    #[getter]
    fn devices(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let inner = self.inner()?;
        let devices = inner.read(py, device_ipc::Mapping::devices)?;
        Ok(devices.iter().map(|device| device_name(inner.backend, device.get())).collect())
    }

    /// The length in bytes of all regions.
    #[getter]
    fn nbytes(&self) -> PyResult<u64> {
        Ok(self.inner()?.nbytes)
    }

    /// Whether the memory is mapped without write access.
    #[getter]
    fn read_only(&self) -> PyResult<bool> {
        Ok(!self.inner()?.is_writable())
    }

    /// Whether the memory is a copy that was made when it was opened.
    #[getter]
    fn is_copy(&self, py: Python<'_>) -> PyResult<bool> {
        self.inner()?.read(py, device_ipc::Mapping::is_copy)
    }

    /// The descriptor that the memory was opened by, or replaced by last; send its text to let another process open the memory.
    #[getter]
    fn descriptor(&self, py: Python<'_>) -> PyResult<Descriptor> {
        let descriptor = self.inner()?.read(py, |mapping| mapping.descriptor().clone())?;
        Ok(Descriptor { descriptor })
    }

    /// Returns a right to open the export once, for a process that the memory is sent on to; as `Export.grant`.
    ///
    /// `limit` is in seconds; `None` is no limit. Raises `GoneError` if the exporter has ended, `UnsupportedError` for a
    /// copy, and `ValueError` if the mapping is closed.
    #[pyo3(signature = (limit=600.0))]
    fn grant(&self, py: Python<'_>, limit: Option<f64>) -> PyResult<Grant> {
        let (inner, limit) = (self.inner()?, crate::wait::limit(limit)?);
        inner.read(py, |mapping| py.detach(|| mapping.grant(limit)))?.or_raise(py).map(Grant::from)
    }

    /// Returns the timeline between this process and the exporter, for memory that is written repeatedly. Mappings with the same lease
    /// share it.
    ///
    /// Raises `UnsupportedError` if the device has no timelines, and for a copy, `GoneError` or `StaleError` if the exporter or the
    /// export has ended, and `ValueError` if the mapping is closed.
    fn timeline(&self, py: Python<'_>) -> PyResult<Timeline> {
        let inner = self.inner()?;
        let ipc = crate::session::ipc(py, Some(inner.backend))?;
        // A request to the exporter.
        let timeline =
            inner.read(py, |mapping| wait::interruptible(py, || mapping.timeline()))??.or_raise(py)?;
        Ok(Timeline::new(timeline, ipc, inner.device))
    }

    /// Checks that the exporter has written the bytes, or still may; raises `GoneError` if it died before that.
    ///
    /// A stream that waits for an exporter that dies continues, also over memory that was never written: call this when the work
    /// behind the wait is complete, before its result is used. `close` and the end of the block call it too. Raises `ValueError` if
    /// the mapping is closed.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.inner()?.read(py, device_ipc::Mapping::check)?.or_raise(py)
    }

    /// Takes the memory away and ends the lease, so that the exporter can free the memory; addresses and tensors stay, for
    /// `resume`. For a mapping that was opened with `reserved=True`. Does nothing if it is suspended.
    ///
    /// Waits for all work of this process on the devices of the mapping. Until `resume`, new views raise `Error`. Existing
    /// tensors of frameworks must not be used: that is an illegal address on a device, and ends the process on the mock.
    ///
    /// Raises `UnsupportedError` for other mappings, and `ValueError` if the mapping is closed.
    fn suspend(&self, py: Python<'_>) -> PyResult<()> {
        self.inner()?.exchange(py, device_ipc::Mapping::suspend)
    }

    /// Maps an export at the addresses of a suspended mapping, and waits until its bytes are ready: the same export, or another
    /// one with equal names, element types, shapes, strides and offsets. Existing tensors then have its bytes.
    ///
    /// `descriptor` is a `Descriptor`, its text or its bytes, or `"keeper:NAME"`, and `grant` a right to open it once. The time
    /// limit, access and users are those of `open`. Raises `LayoutError` with the first difference, `UnsupportedError` if the mapping is
    /// not suspended, and otherwise as `open`; the mapping then stays suspended. Raises `ValueError` if it is closed.
    #[pyo3(signature = (descriptor, *, grant=None))]
    fn resume(
        &self,
        py: Python<'_>,
        descriptor: &Bound<'_, PyAny>,
        grant: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let inner = self.inner()?;
        let next = NextVersion::parse(py, &inner, descriptor, grant)?;
        inner.exchange(py, |mapping| mapping.resume(next.builder()?))
    }

    /// Exchanges the memory for that of another export of equal layout, at the same addresses, and ends the lease on the former.
    /// Waits until the new bytes are ready, and for the work of this process on the devices of the mapping.
    ///
    /// `descriptor` and `grant` are those of `resume`. With a `stream`, only the work that was submitted to it is waited for; order work
    /// of other streams before that, by events. Raises `Error` if the mapping is suspended, `PlacementError` or `TypeError` for a
    /// `stream` that is none of the memory's device or is being captured, and otherwise as `resume`: the mapping then has its former
    /// memory.
    #[pyo3(signature = (descriptor, stream=None, *, grant=None))]
    fn replace(
        &self,
        py: Python<'_>,
        descriptor: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
        grant: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let inner = self.inner()?;
        let next = NextVersion::parse(py, &inner, descriptor, grant)?;
        let stream = self.stream(py, &inner, stream)?;
        inner.exchange(py, |mapping| match &stream {
            Some(stream) => mapping.replace_on(next.builder()?, stream),
            None => mapping.replace(next.builder()?),
        })
    }

    /// Exchanges the memory for that of the keeper's present export, at the same addresses, as `replace` does. For a mapping of
    /// `open("keeper:NAME", reserved=True)`. Returns the keeper's version of it, or `None` if the mapping has that export already:
    /// compare with `None`, as a version may be 0. Without a change since the last call, it reads shared memory and does not wait.
    ///
    /// `stream` is that of `replace`. Raises `TimeoutError`, without waiting, if the keeper's process has ended or no longer has the name,
    /// `UnsupportedError` for a mapping of no keeper, and otherwise as `replace`. The mapping then has its former memory.
    #[pyo3(signature = (stream=None))]
    fn follow(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<Option<u64>> {
        let inner = self.inner()?;
        let stream = self.stream(py, &inner, stream)?;
        inner.exchange(py, |mapping| match &stream {
            Some(stream) => mapping.follow_on(stream),
            None => mapping.follow(),
        })
    }

    /// Whether the addresses hold no memory: after `suspend`, until `resume`.
    #[getter]
    fn is_suspended(&self) -> PyResult<bool> {
        Ok(self.inner()?.is_suspended())
    }

    /// Whether the mapping was closed.
    #[getter]
    fn closed(&self) -> PyResult<bool> {
        check_fork()?;
        Ok(self.inner.lock().unwrap_or_else(PoisonError::into_inner).is_none())
    }

    /// Releases the memory in the order of a stream: by default the stream that it was opened on. Tensors that are still in use
    /// keep it mapped. Does not wait.
    ///
    /// Raises `GoneError` as `check` does, after the release, unless another exception is being handled; `PlacementError` or
    /// `TypeError` for a `stream` that is none of the memory's device. Closing it again does nothing.
    #[pyo3(signature = (stream=None))]
    fn close(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        check_fork()?;
        let Ok(inner) = self.inner() else { return Ok(()) };
        let stream = self.stream(py, &inner, stream)?;
        // Not while another thread exchanges the memory, which then releases it.
        let checked = inner.try_read(|mapping| if mapping.is_suspended() { Ok(()) } else { mapping.check() });
        drop(inner);
        let taken = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Tensors that are in use have a reference, and the last of them ends the lease.
        if let Some((mapping, opened_on)) = taken.and_then(Arc::into_inner).map(MappingInner::into_mapping)
            && let Some(stream) = stream.map(Arc::new).or(opened_on)
        {
            // Where the stream cannot take the release, the mapping is dropped, which is ordered behind all work of the device.
            py.detach(|| drop(mapping.release(&*stream)));
        }
        checked
            .unwrap_or(Ok(()))
            .or_raise(py)
            .or_else(|error| if is_handling(py)? { Ok(()) } else { Err(error) })
    }

    /// Returns the tensor of this name, or `default`.
    ///
    /// Raises `ValueError` if the mapping is closed. `name` is the tensor's name.
    #[pyo3(signature = (name, /, default=None))]
    fn get(&self, py: Python<'_>, name: &str, default: Option<Py<PyAny>>) -> PyResult<Option<Py<PyAny>>> {
        match self.__getitem__(py, name) {
            Ok(tensor) => Ok(Some(Py::new(py, tensor)?.into_any())),
            Err(error) if error.is_instance_of::<PyKeyError>(py) => Ok(default),
            Err(error) => Err(error),
        }
    }

    /// Calls a function without arguments once when the exporter drops or closes the export, now if it has: a keeper has a new
    /// version of the weights, for example. This mapping stays valid. The function runs on a thread of the library; on an event loop, pass one
    /// that calls `loop.call_soon_threadsafe`. Not for memory of this process or a copy, nor after `close`.
    ///
    /// `callback` is that function. Raises `ValueError` if the mapping is closed.
    fn on_dropped(&self, py: Python<'_>, callback: Bound<'_, PyAny>) -> PyResult<()> {
        let inner = self.inner()?;
        let callback = self.callback(callback);
        inner.read(py, |mapping| py.detach(|| mapping.on_dropped(move || callback.call())))
    }

    /// Calls a function without arguments once when the exporter's process has ended, now if it has; otherwise as `on_dropped`.
    ///
    /// `callback` is that function. Raises `ValueError` if the mapping is closed.
    fn on_gone(&self, py: Python<'_>, callback: Bound<'_, PyAny>) -> PyResult<()> {
        let inner = self.inner()?;
        let callback = self.callback(callback);
        inner.read(py, |mapping| py.detach(|| mapping.on_gone(move |_| callback.call())))
    }

    /// Returns a view of the names, in the exporter's order.
    fn keys<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        view(slf, "collections.abc", "KeysView")
    }

    /// Returns a view of the tensors, in the exporter's order.
    fn values<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        view(slf, "device_ipc._mapping", "Values")
    }

    /// Returns a view of names and tensors, in the exporter's order.
    fn items<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        view(slf, "device_ipc._mapping", "Items")
    }

    /// Returns names and tensors, for the iterators of the views.
    fn _items(&self, py: Python<'_>) -> PyResult<Vec<(String, Tensor)>> {
        let inner = self.inner()?;
        let item = |(name, tensor): (&str, device_ipc::Tensor<'_>)| {
            (name.to_owned(), Tensor { data: data(&inner, name, &tensor) })
        };
        inner.view(py, |mapping| mapping.tensors().map(item).collect())
    }

    fn __getitem__(&self, py: Python<'_>, name: &str) -> PyResult<Tensor> {
        let inner = self.inner()?;
        let found = inner.view(py, |mapping| mapping.get(name).map(|tensor| data(&inner, name, &tensor)))?;
        Ok(Tensor { data: found.or_raise(py)? })
    }

    fn __contains__(&self, name: &Bound<'_, PyAny>) -> PyResult<bool> {
        let Ok(name) = name.extract::<String>() else { return Ok(false) };
        Ok(self.inner()?.contents.layout_of(&name).is_some())
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let inner = self.inner()?;
        let names: Vec<_> = inner.contents.tensors().map(|(name, _)| name).collect();
        PyList::new(py, names)?.call_method0("__iter__")
    }

    /// Compares names and tensors with those of another mapping; see `Tensor`.
    fn __eq__<'py>(slf: &Bound<'py, Self>, other: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        if slf.is(other) {
            return Ok(PyBool::new(py, true).to_owned().into_any());
        }
        py.import("collections.abc")?.getattr("Mapping")?.call_method1("__eq__", (slf, other))
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.inner()?.contents.tensors().len())
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*exception))]
    fn __exit__(&self, py: Python<'_>, exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.close(py, None)?;
        let is_orderly = exception.get_item(0).is_ok_and(|class| class.is_none());
        if is_orderly && let Some(inner) = self.weak.upgrade() {
            let names = inner.names_in_use();
            drop(inner);
            if !names.is_empty() {
                py.import("device_ipc._views")?.call_method1("warn_of_kept", (names,))?;
            }
        }
        Ok(())
    }

    /// Returns the names of the tensors that keep the memory mapped, also after `close`. For `device_ipc._views`.
    fn _in_use(&self) -> Vec<String> {
        self.weak.upgrade().map_or_else(Vec::new, |inner| inner.names_in_use())
    }

    /// Returns a DLPack capsule of the only tensor.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        to_dlpack(py, &self.only(py)?, stream, max_version, dl_device, copy)
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
        to_numpy(slf, &slf.get().only(slf.py())?, dtype, copy)
    }

    /// Returns the DLPack device of the only tensor.
    fn __dlpack_device__(&self, py: Python<'_>) -> PyResult<(i32, i32)> {
        let tensor = self.only(py)?;
        dlpack::device_of(tensor.backend, tensor.range.device.get())
    }

    /// The CUDA array interface of the only tensor.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let absent = |error: PyErr| pyo3::exceptions::PyAttributeError::new_err(error.to_string());
        cuda_array_interface::interface(py, &self.only(py).map_err(absent)?)
    }

    // The collector may run while another thread holds the lock. It then finds no cycle, and looks again later.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        let Ok(callbacks) = self.callbacks.try_lock() else { return Ok(()) };
        callbacks.iter().try_for_each(|callback| callback.traverse(&visit))
    }

    fn __clear__(&self) {
        let callbacks = std::mem::take(&mut *self.callbacks.lock().unwrap_or_else(PoisonError::into_inner));
        callbacks.iter().for_each(|callback| callback.clear());
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("a Mapping", "send str(mapping.descriptor), and open it there"))
    }

    fn __repr__(&self) -> String {
        let Ok(inner) = self.inner() else { return "<device_ipc.Mapping, closed>".into() };
        let device = device_name(inner.backend, inner.device.get());
        let MappingInner { contents, nbytes, access, .. } = &*inner;
        let state = if inner.is_suspended() { ", suspended" } else { "" };
        let tensors = contents.tensors().len();
        format!("<device_ipc.Mapping of {tensors} tensors, {nbytes} B, on {device}, {access}{state}>")
    }
}

/// Returns whether the strides are those that frameworks derive from the shape, also for dimensions of one element.
fn is_row_major(layout: &TensorLayout) -> bool {
    let mut expected = 1_u64;
    layout.shape().iter().zip(layout.strides()).rev().all(|(size, stride)| {
        let is_expected = *stride == expected;
        expected = expected.saturating_mul((*size).max(1));
        is_expected
    })
}
