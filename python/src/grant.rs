//! Grants: rights to open an export once, as bytes.

use device_ipc::Grant;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::OrRaise as _;
use crate::export::Export;
use crate::wait;

/// Makes a grant of an export that ends after this many seconds.
pub(crate) fn make<'py>(
    py: Python<'py>,
    export: &device_ipc::Export,
    limit: Option<f64>,
) -> PyResult<Bound<'py, PyBytes>> {
    let grant = export.grant(wait::limit(limit)?).or_raise(py)?;
    Ok(PyBytes::new(py, &grant.to_bytes()))
}

/// Reads the bytes of a grant.
pub(crate) fn parse(py: Python<'_>, bytes: &[u8]) -> PyResult<Grant> {
    Grant::from_bytes(bytes).or_raise(py)
}

/// Gives a grant back that is not needed, as this process has the memory open already. Does not wait.
#[pyfunction]
pub(crate) fn give_back(py: Python<'_>, grant: &[u8]) -> PyResult<()> {
    parse(py, grant)?.give_back();
    Ok(())
}

/// Ends an export that no process uses, and returns true; otherwise takes idle leases back and returns false.
#[pyfunction]
pub(crate) fn end_unless_used(py: Python<'_>, export: &Export) -> PyResult<bool> {
    let Ok(shared) = export.get() else { return Ok(true) };
    let is_used = py.detach(|| {
        shared.recall();
        shared.holders().iter().len() > 0
    });
    drop(shared);
    if !is_used {
        export.end(py);
    }
    Ok(!is_used)
}
