//! The backend of a call: by the name of a device, by a descriptor, or by the environment.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};

use device_ipc::front_end::process_epoch;
use device_ipc::{AllowList, CopyPolicy, DeviceOrdinal, Error, Ipc, IpcBuilder, Result, nixl};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::backend;
use crate::error::{OrRaise as _, exception};

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
                "{text:?} is not a device: expected {} or an ordinal",
                backend::device_names(":N")
            ))
        };
        let ordinal: u32 = ordinal.parse().map_err(|_| invalid())?;
        let backend = backend::named(name).ok_or_else(invalid)?;
        if name == "cpu" && host_backend().is_none() {
            return Err(PyValueError::new_err(format!(
                "\"cpu\" is host memory, not a device; name a device: {}",
                backend::device_names(":0")
            )));
        }
        Ok(Self { backend: Some(backend), ordinal: ordinal.into() })
    }
}

/// The process that has objects of the library, by its epoch; `NO_USER` for none so far.
static USER: AtomicU64 = AtomicU64::new(NO_USER);
const NO_USER: u64 = u64::MAX;

/// Notes that this process has an object of the library.
pub(crate) fn note_use() {
    if USER.load(Ordering::Relaxed) == NO_USER {
        USER.store(process_epoch().into(), Ordering::Relaxed);
    }
}

/// Fails in a process that was forked from one with objects of the library, where they do nothing.
pub(crate) fn check_fork() -> PyResult<()> {
    let user = USER.load(Ordering::Relaxed);
    if user == NO_USER || user == u64::from(process_epoch()) {
        return Ok(());
    }
    Python::attach(|py| Err(exception(py, &device_ipc::Error::Forked)))
}

/// The entry points that were used, by the name of the backend. Loading a backend takes long, and finding a loaded one takes a lock.
static KNOWN: RwLock<Vec<(Option<String>, Ipc)>> = RwLock::new(Vec::new());

/// Returns the backend that frameworks' memory of the host can belong to: the first one with such memory that this process has used,
/// or else the one that the environment selects.
pub(crate) fn host_backend() -> Option<&'static str> {
    let known = KNOWN.read().unwrap_or_else(PoisonError::into_inner);
    let used = known.iter().map(|(_, ipc)| ipc.backend().info().name).find(|name| backend::is_host(name));
    used.or_else(|| backend::backends().requested().ok()?.filter(|name| backend::is_host(name)))
}

/// Returns the entry point of this backend, or of the default one.
pub(crate) fn ipc(py: Python<'_>, backend: Option<&str>) -> PyResult<Ipc> {
    crate::log::refresh(py)?;
    ipc_in_use(py, backend)
}

/// As [`ipc`], without a look at the levels of `logging`, which calls Python: for each of many tensors.
pub(crate) fn ipc_in_use(py: Python<'_>, backend: Option<&str>) -> PyResult<Ipc> {
    let find = |known: &[(Option<String>, Ipc)]| {
        known.iter().find(|(name, _)| name.as_deref() == backend).map(|(_, ipc)| ipc.clone())
    };
    if let Some(ipc) = find(&KNOWN.read().unwrap_or_else(PoisonError::into_inner)) {
        return Ok(ipc);
    }
    let ipc = select(py, backend, AllowList::own_user())?;
    let mut known = KNOWN.write().unwrap_or_else(PoisonError::into_inner);
    if let Some(ipc) = find(&known) {
        return Ok(ipc);
    }
    known.push((backend.map(str::to_owned), ipc.clone()));
    Ok(ipc)
}

/// Returns the entry point of this backend for these further users.
pub(crate) fn ipc_for_users(py: Python<'_>, backend: Option<&str>, users: &[u32]) -> PyResult<Ipc> {
    if users.is_empty() {
        return ipc(py, backend);
    }
    let allow = users.iter().fold(AllowList::own_user(), |allow, user| allow.user(*user));
    select(py, backend, allow)
}

/// Selects a backend, with the settings of this process for copies between hosts.
fn select(py: Python<'_>, backend: Option<&str>, allow: AllowList) -> PyResult<Ipc> {
    crate::log::refresh(py)?;
    // A misspelt name is an error also where the caller or a descriptor names the backend.
    backend::backends().requested().or_raise(py)?;
    let builder = || -> Result<IpcBuilder> { Ok(Ipc::builder().allow(allow).remote(nixl::remote()?)) };
    py.detach(|| match backend {
        Some(name) => builder()?.named(name),
        None => builder()?.auto(),
    })
    .or_raise(py)
}

/// Lets processes of other hosts copy the memory that this process shares from now on, with NIXL. The address is `"IP"` or
/// `"IP:PORT"` of a network interface of this host. Returns it with its port.
///
/// The environment variable `DEVICE_IPC_REMOTE` does the same for a whole process.
///
/// On trusted networks only: UCX, which NIXL uses, listens on every network interface without authentication
/// (`UCX_NET_DEVICES` limits them), and every process that reaches its port can read and write the memory of this process.
///
/// Raises `UnsupportedError` without NIXL, and `Error` if the address cannot be bound.
#[pyfunction]
pub(crate) fn enable_remote(py: Python<'_>, address: String) -> PyResult<String> {
    let listening = py.detach(|| nixl::listen(&address)).or_raise(py)?;
    KNOWN.write().unwrap_or_else(PoisonError::into_inner).clear();
    Ok(listening.address().map_or_else(String::new, |address| address.to_string()))
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

/// Parses the argument `copy`.
pub(crate) fn copy_policy(text: &str) -> PyResult<CopyPolicy> {
    text.parse().map_err(|error: Error| PyValueError::new_err(error.to_string()))
}

/// Returns the error of an attempt to pickle a guard.
pub(crate) fn not_picklable(what: &str, instead: &str) -> PyErr {
    PyTypeError::new_err(format!(
        "cannot pickle {what}: it is a guard of this process, and a copy would not keep the memory; {instead}"
    ))
}
