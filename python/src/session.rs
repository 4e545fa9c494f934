//! The backend of a call: by the name of a device, by a descriptor, or by the environment.

use std::sync::OnceLock;

use device_ipc::{AllowList, DeviceOrdinal, Ipc};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::error::OrRaise as _;

/// A device as the caller names it: `"cuda:1"`, `"npu:0"`, `"mock"`, or an ordinal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceArg {
    /// The backend, where the name states one.
    pub(crate) backend: Option<&'static str>,
    /// The ordinal in this process.
    pub(crate) ordinal: DeviceOrdinal,
}

impl DeviceArg {
    /// Parses a device. Objects such as `torch.device` are read by their text.
    pub(crate) fn parse(device: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(ordinal) = device.extract::<u32>() {
            return Ok(Self { backend: None, ordinal: ordinal.into() });
        }
        let text: String = match device.cast::<PyString>() {
            Ok(text) => text.extract()?,
            Err(_) => device.str()?.extract()?,
        };
        let (name, ordinal) = text.split_once(':').unwrap_or((&text, "0"));
        let invalid = || {
            PyValueError::new_err(format!(
                "{text:?} is not a device: expected \"cuda:N\", \"npu:N\", \"mock:N\" or an ordinal"
            ))
        };
        let ordinal: u32 = ordinal.parse().map_err(|_| invalid())?;
        let backend = backend_of(name).ok_or_else(invalid)?;
        Ok(Self { backend: Some(backend), ordinal: ordinal.into() })
    }
}

/// Returns the backend that a framework's name of a kind of device means.
pub(crate) fn backend_of(name: &str) -> Option<&'static str> {
    match name {
        "cuda" => Some("cuda"),
        "npu" | "ascend" => Some("ascend"),
        // Frameworks see the memory of the mock as memory of the host.
        "mock" | "cpu" => Some("mock"),
        _ => None,
    }
}

/// Returns the entry point of this backend, or of the default one.
pub(crate) fn ipc(py: Python<'_>, backend: Option<&str>) -> PyResult<Ipc> {
    // Loading a backend takes long, and finding a loaded one takes a lock.
    static AUTO: OnceLock<Ipc> = OnceLock::new();
    static MOCK: OnceLock<Ipc> = OnceLock::new();
    static CUDA: OnceLock<Ipc> = OnceLock::new();
    static ASCEND: OnceLock<Ipc> = OnceLock::new();
    let known = match backend {
        None => &AUTO,
        Some("mock") => &MOCK,
        Some("cuda") => &CUDA,
        Some("ascend") => &ASCEND,
        Some(other) => return py.detach(|| Ipc::named(other)).or_raise(py),
    };
    if let Some(ipc) = known.get() {
        return Ok(ipc.clone());
    }
    let loaded = py.detach(|| backend.map_or_else(Ipc::auto, Ipc::named)).or_raise(py)?;
    Ok(known.get_or_init(|| loaded).clone())
}

/// Returns the entry point of this backend for these further users.
pub(crate) fn ipc_for_users(py: Python<'_>, backend: Option<&str>, users: &[u32]) -> PyResult<Ipc> {
    if users.is_empty() {
        return ipc(py, backend);
    }
    let allow = users.iter().fold(AllowList::own_user(), |allow, user| allow.user(*user));
    let builder = Ipc::builder().allow(allow);
    py.detach(|| match backend {
        Some(name) => builder.named(name),
        None => builder.auto(),
    })
    .or_raise(py)
}

/// Parses the argument `access`.
pub(crate) fn access(text: Option<&str>) -> PyResult<Option<device_ipc::Access>> {
    match text {
        None => Ok(None),
        Some("r") => Ok(Some(device_ipc::Access::ReadOnly)),
        Some("rw") => Ok(Some(device_ipc::Access::ReadWrite)),
        Some(other) => Err(PyValueError::new_err(format!("access is {other:?}; expected \"r\" or \"rw\""))),
    }
}

/// Returns the error of an attempt to pickle a guard.
pub(crate) fn not_picklable(what: &str, instead: &str) -> PyErr {
    PyTypeError::new_err(format!(
        "cannot pickle {what}: it is a guard of this process, and a copy would not keep the memory; {instead}"
    ))
}
