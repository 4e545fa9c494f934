//! Keepers: memory that other processes find by a name.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use device_ipc::{Error, Ipc, KeeperExport};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};

use crate::error::OrRaise as _;
use crate::export::Export;
use crate::session::{check_fork, ipc_for_users, not_picklable};
use crate::wait;

/// The prefix of a keeper's name that is passed instead of a descriptor.
const SCHEME: &str = "keeper:";

/// Returns the name if the argument of `open` is that of a keeper.
pub(crate) fn name_of(descriptor: &Bound<'_, PyAny>) -> PyResult<Option<String>> {
    let Ok(text) = descriptor.cast::<PyString>() else { return Ok(None) };
    let text = text.to_cow()?;
    Ok(text.starts_with(SCHEME).then(|| text.into_owned()))
}

/// Asks the keeper of this name for its present export.
pub(crate) fn find(py: Python<'_>, ipc: &Ipc, name: &str, limit: Duration) -> PyResult<KeeperExport> {
    // One attempt: a keeper that is busy may answer after any part of the time.
    wait::interruptible(py, || ipc.find(name, limit))?.or_raise(py)
}

/// Answers the processes that open a name, `device_ipc.open("keeper:llama")`, with an export, until it is
/// closed.
#[pyclass(frozen, weakref, module = "device_ipc")]
pub(crate) struct Keeper {
    keeper: Mutex<Option<Arc<device_ipc::Keeper>>>,
    /// Threads take turns to replace the export, so that each has the next version.
    replacing: Mutex<()>,
    name: String,
}

impl Keeper {
    fn get(&self) -> PyResult<Arc<device_ipc::Keeper>> {
        check_fork()?;
        let keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner).clone();
        keeper.ok_or_else(|| PyValueError::new_err("the keeper is closed"))
    }
}

#[pymethods]
impl Keeper {
    /// The name, without `keeper:`.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// The version of the present export.
    #[getter]
    fn version(&self) -> PyResult<u64> {
        Ok(self.get()?.version())
    }

    /// Answers with another export from now on, as the next version or the stated one. Processes that have the former export open
    /// keep it; they are notified when it is closed, or when no reference to it is left.
    ///
    /// Raises `ValueError` if the keeper or `export` is closed. `version` is the number of the new version.
    #[pyo3(signature = (export, *, version=None))]
    fn replace(&self, py: Python<'_>, export: &Export, version: Option<u64>) -> PyResult<()> {
        let (keeper, export) = (self.get()?, export.get()?);
        py.detach(|| {
            let _turn = self.replacing.lock().unwrap_or_else(PoisonError::into_inner);
            drop(keeper.replace(version.unwrap_or_else(|| keeper.version() + 1), export));
        });
        Ok(())
    }

    /// Frees the name. The export stays open.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        check_fork()?;
        py.detach(|| drop(self.keeper.lock().unwrap_or_else(PoisonError::into_inner).take()));
        Ok(())
    }

    /// Whether the keeper was closed.
    #[getter]
    fn closed(&self) -> PyResult<bool> {
        check_fork()?;
        Ok(self.keeper.lock().unwrap_or_else(PoisonError::into_inner).is_none())
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*exception))]
    fn __exit__(&self, py: Python<'_>, exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        let _ = exception;
        self.close(py)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("a Keeper", "send its name"))
    }

    fn __repr__(&self) -> String {
        match self.get() {
            Ok(keeper) => format!("<device_ipc.Keeper of {:?}, version {}>", self.name, keeper.version()),
            Err(_) => format!("<device_ipc.Keeper of {:?}, closed>", self.name),
        }
    }
}

/// Lets other processes open an export by a name: `device_ipc.open("keeper:llama")`.
///
/// `name` is the part after `keeper:`. `export` is the memory, and `version` its number. `allow_users` lists user ids
/// that may open it beside this user; by default none.
///
/// Raises `Error` if another process has the name, and `ValueError` if the export is closed.
#[pyfunction]
#[pyo3(signature = (name, export, *, version=1, allow_users=None))]
pub(crate) fn keep(
    py: Python<'_>,
    name: &str,
    export: &Export,
    version: u64,
    allow_users: Option<Vec<u32>>,
) -> PyResult<Keeper> {
    let export = export.get()?;
    let ipc = ipc_for_users(py, Some(export.descriptor().backend()), &allow_users.unwrap_or_default())?;
    let kept = py.detach(|| ipc.keep(name, version, export).map_err(Error::from));
    Ok(Keeper {
        keeper: Mutex::new(Some(Arc::new(kept.or_raise(py)?))),
        replacing: Mutex::default(),
        name: name.to_owned(),
    })
}
