//! Functions that concern the whole process, or all processes of the host.

use std::time::Duration;

use device_ipc::AllowList;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::error::{OrRaise as _, exception};
use crate::session::check_fork;
use crate::wait;

/// Returns the counters of the library's activity in this process, by name.
#[pyfunction]
pub(crate) fn counters(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    check_fork()?;
    let counters = PyDict::new(py);
    // The text is the only form that lists every counter with its name.
    for line in device_ipc::counters().to_prometheus().lines().filter(|line| !line.starts_with('#')) {
        let Some((name, value)) = line.split_once(' ') else { continue };
        let name = name.strip_prefix("device_ipc_").unwrap_or(name);
        counters.set_item(name, value.parse::<u64>().unwrap_or(0))?;
    }
    Ok(counters)
}

/// Releases all idle leases of this process, and waits until their memory is closed.
///
/// `timeout` limits the wait, in seconds; `None` is no limit. Raises `TimeoutError` after it.
#[pyfunction]
#[pyo3(signature = (timeout=30.0))]
pub(crate) fn close_unused(py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
    wait::wait(py, wait::limit(timeout)?, device_ipc::close_unused)
}

/// Ends all exports of this process, releases its idle leases, and waits until no other process holds a lease.
///
/// `timeout` limits the wait, in seconds; `None` is no limit. Raises `StillHeldError`, which lists the holders, after it.
#[pyfunction]
#[pyo3(signature = (timeout=30.0))]
pub(crate) fn shutdown(py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
    wait::wait(py, wait::limit(timeout)?, device_ipc::shutdown)
}

/// Returns the processes of this host that share memory, with their exports; an exception in place of a process that did not
/// reply.
///
/// `timeout` limits the wait for all replies, in seconds. Raises `Error` if the sockets of the host cannot be listed, and
/// `ValueError` for a negative number.
#[pyfunction]
#[pyo3(signature = (timeout=5.0))]
pub(crate) fn list_exports(py: Python<'_>, timeout: f64) -> PyResult<Vec<Py<PyAny>>> {
    let limit: Duration = wait::limit(Some(timeout))?;
    let listed = wait::interruptible(py, move || {
        device_ipc::front_end::list_exports(None, &AllowList::own_user(), limit)
    })?
    .or_raise(py)?;
    let mut processes = Vec::new();
    for process in listed {
        match process {
            Ok(process) => {
                let row = PyDict::new(py);
                row.set_item("pid", process.pid)?;
                row.set_item("program", &process.program)?;
                let exports = PyList::empty(py);
                for export in &process.exports {
                    let item = PyDict::new(py);
                    item.set_item("export", export.export.to_string())?;
                    item.set_item("backend", &export.backend)?;
                    item.set_item("nbytes", export.bytes)?;
                    item.set_item("opened", export.opened)?;
                    item.set_item("dropped", export.dropped)?;
                    item.set_item(
                        "holders",
                        export.holders.iter().map(|holder| holder.pid).collect::<Vec<_>>(),
                    )?;
                    exports.append(item)?;
                }
                row.set_item("exports", exports)?;
                processes.push(row.into_any().unbind());
            }
            Err(error) => processes.push(exception(py, &error).into_value(py).into_any()),
        }
    }
    Ok(processes)
}
