//! Mappings of names to tensors of any framework, as sets of tensors of the library.
//!
//! A state dict has thousands of tensors: each is added to the set as it is read, and one owner keeps the memory of all.

use std::sync::{Arc, OnceLock};

use device_ipc::{
    DescriptorError, DeviceOrdinal, DevicePtr, Dtype, Error, Ipc, OwnedRegion, Region, TensorSet,
};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::backend;
use crate::dlpack::DlTensor;
use crate::dtype::{DlDtype, from_dlpack};
use crate::error::{PlacementError, exception};
use crate::exchange::Exchange;
use crate::owner::PyOwner;
use crate::share::{Owner, Source, SourceOwner, device_here};

/// Refuses tensors that the caller cannot use.
pub(crate) type Check<'a> = dyn Fn(&str, &Source) -> PyResult<()> + 'a;

/// Named tensors that are read one after the other.
pub(crate) struct NamedTensors<'a, 'py> {
    py: Python<'py>,
    /// Returns the entry point for the backend of the first tensor.
    entry_point: &'a dyn Fn(&'static str) -> PyResult<Ipc>,
    check: Option<&'a Check<'a>>,
    begun: Option<Begun>,
    /// The objects that keep the memory allocated.
    objects: Vec<Py<PyAny>>,
    owner: Arc<OnceLock<PyOwner<Vec<Py<PyAny>>>>>,
}

struct Begun {
    backend: &'static str,
    ipc: Ipc,
    set: TensorSet,
    /// Each once.
    devices: Vec<DeviceOrdinal>,
    /// The devices whose memory is kept by the objects.
    of_objects: Vec<DeviceOrdinal>,
    /// The devices and element types in DLPack of tensors whose memory is kept by the objects.
    kinds: Vec<Kind>,
}

/// A device and an element type, in DLPack and here.
#[derive(Clone, Copy)]
struct Kind {
    dlpack: (i32, i32, DlDtype),
    device: DeviceOrdinal,
    dtype: Dtype,
}

impl Begun {
    /// Returns the device and the element type of a tensor, if the objects keep other memory of this device.
    fn kind_of(&mut self, found: &DlTensor) -> Option<Kind> {
        let dlpack = (found.device_type, found.device_id, found.dtype);
        if let Some(known) = self.kinds.iter().find(|known| known.dlpack == dlpack) {
            return Some(*known);
        }
        let backend = backend::of_dlpack_type(found.device_type).filter(|found| *found == self.backend)?;
        let device = device_here(backend, u32::try_from(found.device_id).ok()?);
        let dtype = from_dlpack(found.dtype).filter(|_| self.of_objects.contains(&device))?;
        let kind = Kind { dlpack, device, dtype };
        self.kinds.push(kind);
        Some(kind)
    }
}

impl<'a, 'py> NamedTensors<'a, 'py> {
    pub(crate) fn new(
        py: Python<'py>,
        entry_point: &'a dyn Fn(&'static str) -> PyResult<Ipc>,
        check: Option<&'a Check<'a>>,
    ) -> Self {
        Self { py, entry_point, check, begun: None, objects: Vec::new(), owner: Arc::default() }
    }

    /// Returns the entry point, the tensors and their devices, the first one's first; `None` if there are no tensors.
    pub(crate) fn finish(self) -> Option<(Ipc, TensorSet, Vec<DeviceOrdinal>)> {
        // It was not set before.
        let _ = self.owner.set(PyOwner::new(self.objects));
        self.begun.map(|Begun { ipc, set, devices, .. }| (ipc, set, devices))
    }

    /// Adds a tensor.
    pub(crate) fn add(&mut self, name: &str, source: Source) -> PyResult<()> {
        if let Some(check) = self.check {
            check(name, &source)?;
        }
        let Source { backend, device, region, layout, owner, .. } = source;
        let begun = match &mut self.begun {
            Some(begun) => begun,
            None => {
                let ipc = (self.entry_point)(backend)?;
                let (set, devices, of_objects, kinds) = (ipc.tensors(), Vec::new(), Vec::new(), Vec::new());
                self.begun.insert(Begun { backend, ipc, set, devices, of_objects, kinds })
            }
        };
        if begun.backend != backend {
            return Err(PlacementError::new_err(format!(
                "tensor {name:?} is on {backend}, and the first on {}; share them separately",
                begun.backend
            )));
        }
        if !begun.devices.contains(&device) {
            begun.devices.push(device);
        }
        let region = Region::new(backend, region).with_dtype(layout.dtype());
        let memory = match owner {
            SourceOwner::Object(object) => {
                self.objects.push(object);
                if begun.of_objects.contains(&device) {
                    let (place, dtype) = ((device, region.range.ptr), layout.dtype());
                    // SAFETY: the owner of the objects was added with the first memory of the device, and keeps this object too.
                    let added = unsafe {
                        begun.set.further_tensor(name, place, dtype, layout.shape(), layout.strides())
                    };
                    return added.map_err(|error| not_added(self.py, name, &error));
                }
                begun.of_objects.push(device);
                // SAFETY: `finish` gives the owner all objects, which keep their memory by the rules of their protocols. Before
                // that, the set is not shared.
                unsafe { OwnedRegion::new(Owner::Objects(Arc::clone(&self.owner)), region) }
            }
            // SAFETY: a guard of this library keeps its memory.
            SourceOwner::Native(keeper) => unsafe { OwnedRegion::new(Owner::Native(keeper), region) },
        };
        let memory = begun.set.memory(memory);
        begun.set.tensor(name, memory, 0, layout).map_err(|error| not_added(self.py, name, &error))
    }

    /// Adds a tensor of PyTorch in memory that needs no further owner. Returns false if it is another object, which is not added.
    fn add_known(&mut self, name: &str, object: &Bound<'py, PyAny>) -> PyResult<bool> {
        let (Some(begun), None) = (&mut self.begun, self.check) else { return Ok(false) };
        let Some(exchange) = Exchange::of_known(object) else { return Ok(false) };
        let Some((found, owner)) = exchange.describe(object)? else { return Ok(false) };
        // SAFETY: PyTorch has written the description, and the tensor is alive and unchanged.
        let (Some(kind), Some((shape, strides))) = (begun.kind_of(&found), unsafe { found.sizes() }) else {
            return Ok(false);
        };
        self.objects.push(owner.unbind());
        let place = (kind.device, DevicePtr::new(found.ptr()));
        // SAFETY: as in `add`, for the object that was just added.
        let added = unsafe { begun.set.further_tensor(name, place, kind.dtype, shape, strides) };
        added.map(|()| true).map_err(|error| not_added(self.py, name, &error))
    }

    /// Adds the tensors of a mapping. Those of nested mappings have dotted names: `"layer.weight"`. Errors name the verb of the caller.
    pub(crate) fn add_all(&mut self, verb: &str, tensors: &Bound<'py, PyAny>) -> PyResult<()> {
        if !tensors.hasattr("items")? {
            let found = tensors.get_type().name()?;
            return Err(PyTypeError::new_err(format!(
                "cannot {verb} {found}: expected a tensor with __dlpack__ or __cuda_array_interface__, or a mapping of names to \
                 tensors"
            )));
        }
        self.add_nested(tensors, "")
    }

    fn add_nested(&mut self, tensors: &Bound<'py, PyAny>, prefix: &str) -> PyResult<()> {
        for item in tensors.call_method0("items")?.try_iter()? {
            let (key, value): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item?.extract()?;
            let Ok(key) = key.cast::<PyString>() else {
                return Err(PyTypeError::new_err(format!(
                    "the key {} is of type {}, and the names of tensors are strings: use str(key)",
                    key.repr()?,
                    key.get_type().name()?
                )));
            };
            let key = key.to_cow()?;
            let name = if prefix.is_empty() { key } else { format!("{prefix}{key}").into() };
            if self.add_known(&name, &value)? {
                continue;
            }
            match Source::read(self.py, &value).map_err(|error| of_tensor(self.py, &name, error))? {
                Some(source) => self.add(&name, source)?,
                None if value.hasattr("items")? => self.add_nested(&value, &format!("{name}."))?,
                None => {
                    return Err(PyTypeError::new_err(format!(
                        "the value of {name:?} is of type {}, not a tensor of device memory",
                        value.get_type().name()?
                    )));
                }
            }
        }
        Ok(())
    }
}

/// Returns the exception for a tensor that was not added.
fn not_added(py: Python<'_>, name: &str, error: &Error) -> PyErr {
    if let Error::Descriptor(DescriptorError::TensorName { why, .. }) = error
        && why.starts_with("another tensor")
    {
        return PyValueError::new_err(format!(
            "two tensors are called {name:?}: the keys of nested mappings are joined with dots"
        ));
    }
    exception(py, error)
}

/// Returns the error with the name of the tensor, if its class is made from a text.
fn of_tensor(py: Python<'_>, name: &str, error: PyErr) -> PyErr {
    let text = format!("tensor {name:?}: {}", error.value(py));
    match error.get_type(py).call1((text,)) {
        Ok(named) => PyErr::from_value(named),
        Err(_) => error,
    }
}
