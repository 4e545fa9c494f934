//! Storages of PyTorch: the blocks of memory that tensors are views of.

use std::sync::{Arc, Weak};

use device_ipc::{DevicePtr, DeviceRange, OwnedRegion, Region};
use pyo3::prelude::*;

use crate::error::OrRaise as _;
use crate::export::Export;
use crate::grant::Grant;
use crate::mapping::{Mapping, MappingInner};
use crate::owner::PyOwner;
use crate::session::{DeviceArg, ipc};
use crate::stream::StreamArg;
use crate::tensor::device_name;
use crate::wait;

/// Shares the memory of a storage as one region of bytes, behind the work of the framework's current stream. The export keeps a
/// reference to the object. An importer of one storage receives leases on the next ones of the same block of the allocator.
#[pyfunction]
pub(crate) fn share_storage(
    py: Python<'_>,
    storage: &Bound<'_, PyAny>,
    device: &Bound<'_, PyAny>,
    ptr: u64,
    nbytes: u64,
) -> PyResult<Export> {
    let device = DeviceArg::parse(device)?;
    let ipc = ipc(py, device.backend)?;
    let range = DeviceRange::new(device.ordinal, DevicePtr::new(ptr), nbytes);
    let stream = StreamArg::current(py, &ipc, device.ordinal)?;
    let owner = PyOwner::new(storage.clone().unbind());
    // SAFETY: a storage keeps its memory allocated.
    let owned = unsafe { OwnedRegion::new(owner, Region::new(ipc.backend().info().name, range)) };
    let shared = py.detach(|| {
        let builder = ipc.share(owned).lease_ahead();
        match &stream {
            Some(stream) => builder.ready_on(stream).start(),
            None => builder.start(),
        }
    });
    shared.or_raise(py).map(|export| Export::new(export, device.ordinal))
}

/// A mapping that storages of PyTorch keep open, and this object does not.
#[pyclass(frozen, module = "device_ipc")]
pub(crate) struct WeakMapping {
    inner: Weak<MappingInner>,
}

#[pymethods]
impl WeakMapping {
    /// Creates a weak reference to a mapping.
    #[new]
    fn new(mapping: &Mapping) -> PyResult<Self> {
        Ok(Self { inner: Arc::downgrade(&mapping.inner()?) })
    }

    /// The device in whose address space the memory is; `None` once the mapping has ended.
    #[getter]
    fn device(&self) -> Option<String> {
        let inner = self.inner.upgrade()?;
        Some(device_name(inner.backend, inner.mapping.device().get()))
    }

    /// Returns a right to open the export once, as `Mapping.grant`; `None` once the mapping has ended.
    fn grant(&self, py: Python<'_>, limit: Option<f64>) -> PyResult<Option<Grant>> {
        let limit = wait::limit(limit)?;
        let Some(inner) = self.inner.upgrade() else { return Ok(None) };
        let grant = py.detach(move || inner.mapping.grant(limit)).or_raise(py)?;
        Ok(Some(grant.into()))
    }
}
