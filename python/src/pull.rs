//! Copies from other hosts into tensors that exist already.

use device_ipc::CopyProgress;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::OrRaise as _;
use crate::export::parse;
use crate::named_tensors::NamedTensors;
use crate::owner::PyOwner;
use crate::session::ipc_for_users;
use crate::share::Source;
use crate::wait;

/// Copies memory of another host into tensors that exist already, such as the weights of a model: one tensor, or a mapping of names
/// to those of the exporter's tensors that are wanted. Element types and shapes are those of the exporter's tensors.
///
/// The tensors must not be used until the call returns. After an error their contents are unspecified. If the exporter does not
/// answer, their memory is kept until NIXL has finished with it. `progress` is called with the number of bytes that have
/// arrived and the number of all bytes, on any thread.
///
/// `descriptor` names the export, `tensors` the destination. `timeout` limits the silence of the exporter, in seconds;
/// `None` is no limit. `allow_users` lists user ids whose exports may be copied beside those of this user; by default
/// none.
///
/// Raises `NoSuchTensorError` for a name that the export does not have, `LayoutError` if type or shape differ,
/// `TimeoutError` after `timeout` seconds, `GoneError` if the exporter has ended, `UnsupportedError` without NIXL, and
/// `ValueError` for read-only tensors.
#[pyfunction]
#[pyo3(signature = (descriptor, tensors, *, timeout=30.0, allow_users=None, progress=None))]
pub(crate) fn pull_into(
    py: Python<'_>,
    descriptor: &Bound<'_, PyAny>,
    tensors: &Bound<'_, PyAny>,
    timeout: Option<f64>,
    allow_users: Option<Vec<u32>>,
    progress: Option<Py<PyAny>>,
) -> PyResult<()> {
    let descriptor = parse(py, descriptor)?;
    let limit = wait::limit(timeout)?;
    let ipc = ipc_for_users(py, Some(descriptor.backend()), &allow_users.unwrap_or_default())?;
    let check = |name: &str, source: &Source| {
        if source.is_writable {
            return Ok(());
        }
        Err(PyValueError::new_err(format!("{name:?} is read-only; pull into writable tensors")))
    };
    let entry_point = |_: &str| Ok(ipc.clone());
    let mut named = NamedTensors::new(py, &entry_point, Some(&check));
    match Source::read(py, tensors)? {
        Some(source) if !source.is_writable => {
            return Err(PyValueError::new_err("the tensor is read-only; pull into a writable one"));
        }
        Some(source) => named.add("tensor", source)?,
        None => named.add_all("pull into", tensors)?,
    }
    let set = named.finish().map_or_else(|| ipc.tensors(), |(_, set, _)| set);
    let report = progress.map(report);
    let call = move || -> device_ipc::Result<()> {
        let mut builder = ipc.open(&descriptor).timeout(limit);
        if let Some(report) = &report {
            builder = builder.on_progress(report);
        }
        builder.pull_into(set)?;
        Ok(())
    };
    wait::interruptible(py, call)?.or_raise(py)
}

/// Returns a function that calls one of Python. Exceptions of the callback are printed.
pub(crate) fn report(callback: Py<PyAny>) -> impl Fn(CopyProgress) + Send + Sync {
    let callback = PyOwner::new(callback);
    move |progress| {
        // The interpreter may have ended.
        Python::try_attach(|py| {
            let Some(callback) = callback.get(py) else { return };
            if let Err(error) = callback.call1(py, (progress.copied_bytes, progress.total_bytes)) {
                error.write_unraisable(py, Some(callback.bind(py)));
            }
        });
    }
}
