//! Mappings of names to tensors of any framework, as sets of tensors of the library.
//!
//! A state dict has thousands of tensors: each is added to the set as it is read, and one owner keeps the memory of all.

use std::sync::{Arc, OnceLock};

use device_ipc::{DescriptorError, DeviceOrdinal, Error, Ipc, OwnedRegion, Region, TensorSet};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::error::{PlacementError, exception};
use crate::owner::PyOwner;
use crate::share::{Owner, Source, SourceOwner};

/// Named tensors that are read one after the other.
pub(crate) struct NamedTensors<'a, 'py> {
    py: Python<'py>,
    /// Returns the entry point for the backend of the first tensor.
    entry_point: &'a dyn Fn(&'static str) -> PyResult<Ipc>,
    /// Refuses tensors that the caller cannot use.
    check: &'a dyn Fn(&str, &Source) -> PyResult<()>,
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
}

impl<'a, 'py> NamedTensors<'a, 'py> {
    pub(crate) fn new(
        py: Python<'py>,
        entry_point: &'a dyn Fn(&'static str) -> PyResult<Ipc>,
        check: &'a dyn Fn(&str, &Source) -> PyResult<()>,
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
        (self.check)(name, &source)?;
        let Source { backend, device, region, layout, owner, .. } = source;
        let begun = match &mut self.begun {
            Some(begun) => begun,
            None => {
                let ipc = (self.entry_point)(backend)?;
                let (set, devices, of_objects) = (ipc.tensors(), Vec::new(), Vec::new());
                self.begun.insert(Begun { backend, ipc, set, devices, of_objects })
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
                    // SAFETY: the owner of the objects was added with the first memory of the device, and keeps this object too.
                    unsafe { begun.set.further_memory(region) }
                } else {
                    begun.of_objects.push(device);
                    // SAFETY: `finish` gives the owner all objects, which keep their memory by the rules of their protocols. Before
                    // that, the set is not shared.
                    begun
                        .set
                        .memory(unsafe { OwnedRegion::new(Owner::Objects(Arc::clone(&self.owner)), region) })
                }
            }
            SourceOwner::Native(keeper) => {
                // SAFETY: a guard of this library keeps its memory.
                begun.set.memory(unsafe { OwnedRegion::new(Owner::Native(keeper), region) })
            }
        };
        begun.set.tensor(name, memory, 0, layout).map_err(|error| not_added(self.py, name, &error))
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
