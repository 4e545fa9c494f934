//! Grants: rights to open an export once, as a text or as bytes.

use device_ipc::Grant as CoreGrant;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::error::OrRaise as _;

/// A right to open an export once, by `open(descriptor, grant=grant)`. `str(grant)` and `bytes(grant)` travel beside the descriptor.
///
/// The text contains a secret. The object is plain data: dropping it ends nothing.
///
/// `grant` is its text, its bytes or another `Grant`. Raises `DescriptorError` for a text or bytes that are none, and `TypeError`
/// for another object.
#[pyclass(frozen, eq, module = "device_ipc")]
#[derive(PartialEq, Eq)]
pub(crate) struct Grant {
    grant: CoreGrant,
}

#[pymethods]
impl Grant {
    #[new]
    fn new(py: Python<'_>, grant: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self { grant: parse(py, grant)? })
    }

    /// Gives the right back without an open, for a process that has the memory open already. Does not wait.
    fn give_back(&self) {
        self.grant.give_back();
    }

    fn __str__(&self) -> String {
        self.grant.to_string()
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.grant.to_bytes())
    }

    fn __hash__(&self) -> u64 {
        use std::hash::{DefaultHasher, Hash as _, Hasher as _};
        let mut hasher = DefaultHasher::new();
        self.grant.to_bytes().hash(&mut hasher);
        hasher.finish()
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> (Bound<'py, PyAny>, (String,)) {
        (slf.get_type().into_any(), (slf.get().__str__(),))
    }

    /// Without the secret.
    fn __repr__(&self) -> String {
        format!("<device_ipc.{:?}>", self.grant)
    }
}

impl From<CoreGrant> for Grant {
    fn from(grant: CoreGrant) -> Self {
        Self { grant }
    }
}

/// Parses a grant: an object of this package, its text or its bytes.
pub(crate) fn parse(py: Python<'_>, grant: &Bound<'_, PyAny>) -> PyResult<CoreGrant> {
    if let Ok(parsed) = grant.cast::<Grant>() {
        return Ok(parsed.get().grant.clone());
    }
    // Not as a sequence of numbers.
    if let Ok(bytes) = grant.cast::<PyBytes>() {
        return CoreGrant::from_bytes(bytes.as_bytes()).or_raise(py);
    }
    if let Ok(text) = grant.cast::<PyString>() {
        return text.to_cow()?.parse::<CoreGrant>().or_raise(py);
    }
    let bytes = grant.extract::<Vec<u8>>().map_err(|_| {
        PyTypeError::new_err(format!(
            "expected a Grant, its text or its bytes, not {}; pass what export.grant() has returned",
            grant.get_type()
        ))
    })?;
    CoreGrant::from_bytes(&bytes).or_raise(py)
}
