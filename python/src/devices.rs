//! Devices and backends.

use device_ipc::{BackendStatus, DeviceInfo, Ipc};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::backend;
use crate::error::OrRaise as _;
use crate::tensor::device_name;

/// A device of this process.
#[pyclass(frozen, module = "device_ipc", get_all)]
pub(crate) struct Device {
    /// The name for `device=` arguments: `"cuda:0"`.
    device: String,
    /// The backend.
    backend: String,
    /// The position among the devices of this process.
    ordinal: u32,
    /// The identity, equal in every process of the host.
    uuid: String,
    /// The vendor's name of the model.
    name: String,
    /// The size of the memory in bytes.
    memory_bytes: u64,
}

impl Device {
    fn new(backend: &str, info: &DeviceInfo) -> Self {
        Self {
            device: device_name(backend, info.ordinal.get()),
            backend: backend.to_owned(),
            ordinal: info.ordinal.get(),
            uuid: info.identity.to_string(),
            name: info.name.clone(),
            memory_bytes: info.memory_bytes,
        }
    }
}

#[pymethods]
impl Device {
    fn __repr__(&self) -> String {
        format!("<device_ipc.Device {} ({}, {})>", self.device, self.name, self.uuid)
    }
}

/// Returns the devices of all backends. Loads the vendors' libraries, and creates no context.
#[pyfunction]
pub(crate) fn devices(py: Python<'_>) -> PyResult<Vec<Device>> {
    let mut devices = Vec::new();
    for status in statuses(py)? {
        devices.extend(status.state.iter().flatten().map(|info| Device::new(status.name, info)));
    }
    Ok(devices)
}

/// Returns the state of each backend, unless `DEVICE_IPC_BACKEND` names an unknown one.
fn statuses(py: Python<'_>) -> PyResult<Vec<BackendStatus>> {
    backend::backends().requested().or_raise(py)?;
    Ok(py.detach(Ipc::available))
}

/// Returns each backend with its devices, or with the reason why it is unavailable, as a text.
#[pyfunction]
pub(crate) fn available(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let backends = PyDict::new(py);
    for status in statuses(py)? {
        match status.state {
            Ok(devices) => {
                let devices: Vec<_> = devices.iter().map(|info| Device::new(status.name, info)).collect();
                backends.set_item(status.name, devices)?;
            }
            Err(reason) => backends.set_item(status.name, reason.to_string())?,
        }
    }
    Ok(backends)
}
