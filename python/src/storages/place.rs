//! Where the memory of a storage of PyTorch lies, and who uses the storage.

use std::sync::{Arc, Mutex, PoisonError};

use device_ipc::{DeviceOrdinal, DevicePtr, DeviceRange};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::backend;
use crate::mapping_inner::MappingInner;

/// The place of a storage's memory.
pub(super) struct Place {
    pub(super) backend: &'static str,
    pub(super) device: DeviceOrdinal,
    pub(super) ptr: u64,
    pub(super) nbytes: u64,
}

impl Place {
    pub(super) fn of(storage: &Bound<'_, PyAny>, nbytes: u64) -> PyResult<Self> {
        let py = storage.py();
        let device = storage.getattr(intern!(py, "device"))?;
        let (backend, index) =
            TorchDevice::with(&device, |known| (backend::named(&known.kind), known.index))?;
        Ok(Self {
            backend: backend.expect("the methods of devices that can be shared are replaced"),
            device: index.into(),
            ptr: storage.call_method0(intern!(py, "data_ptr"))?.extract()?,
            nbytes,
        })
    }

    /// Returns its addresses.
    pub(super) const fn range(&self) -> DeviceRange {
        DeviceRange::new(self.device, DevicePtr::new(self.ptr), self.nbytes)
    }

    /// Returns whether the storage is in memory that this mapping has open at the same address.
    pub(super) fn is_in(&self, mapping: &MappingInner) -> bool {
        let is_there = self.device == mapping.device || backend::is_host(self.backend);
        is_there && self.backend == mapping.backend && self.nbytes <= mapping.nbytes
    }
}

/// A `torch.device`, which takes less time to compare than to read: its `type` is a new string each time.
struct TorchDevice {
    device: Py<PyAny>,
    kind: String,
    index: u32,
}

impl TorchDevice {
    /// Calls a function with the attributes of a device.
    fn with<T>(device: &Bound<'_, PyAny>, call: impl FnOnce(&Self) -> T) -> PyResult<T> {
        static KNOWN: Mutex<Vec<Arc<TorchDevice>>> = Mutex::new(Vec::new());
        let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut position = 0;
        loop {
            let Some(next) = known().get(position).cloned() else { break };
            if device.eq(&next.device)? {
                return Ok(call(&next));
            }
            position += 1;
        }
        let kind = device.getattr(intern!(device.py(), "type"))?.extract()?;
        let index: Option<u32> = device.getattr(intern!(device.py(), "index"))?.extract()?;
        let read = Arc::new(Self { device: device.clone().unbind(), kind, index: index.unwrap_or(0) });
        known().push(Arc::clone(&read));
        Ok(call(&read))
    }
}

pub(super) fn number_of(storage: &Bound<'_, PyAny>) -> PyResult<u64> {
    storage.getattr(intern!(storage.py(), "_cdata"))?.extract()
}

/// Returns the number of references of PyTorch to the storage.
pub(super) fn use_count(py: Python<'_>, cdata: u64) -> PyResult<u64> {
    static COUNT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let count = COUNT.get_or_try_init(py, || -> PyResult<_> {
        Ok(py.import("torch._C")?.getattr("_storage_Use_Count")?.unbind())
    })?;
    count.call1(py, (cdata,))?.extract(py)
}
