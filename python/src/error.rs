//! Exceptions. Their classes are defined in `device_ipc/_errors.py`.

use device_ipc::{Error, ErrorKind, RecoverableError};
use pyo3::prelude::*;

use crate::export::Holder;

pyo3::import_exception!(device_ipc._errors, DescriptorError);
pyo3::import_exception!(device_ipc._errors, LayoutError);
pyo3::import_exception!(device_ipc._errors, PlacementError);
pyo3::import_exception!(device_ipc._errors, StaleError);

/// Converts results of the library into Python's.
pub(crate) trait OrRaise<T> {
    /// Returns the value, or raises the exception of the error's class.
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for Result<T, Error> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| exception(py, &error))
    }
}

impl<T, V> OrRaise<T> for Result<T, RecoverableError<V>> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| exception(py, error.error()))
    }
}

/// Returns the exception for an error of the library, with the same text, whose remedies are those of `remedy.rs`.
pub(crate) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    made(py, error).unwrap_or_else(|failed| failed)
}

fn made(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let (subclass, holders): (_, Vec<Holder>) = match error.innermost() {
        Error::StillHeld { holders, .. } => {
            (Some("StillHeldError"), holders.iter().map(Holder::from).collect())
        }
        Error::HolderDied { holders } => {
            (Some("HolderDiedError"), holders.died().map(Holder::from).collect())
        }
        _ => (None, Vec::new()),
    };
    let errors = py.import("device_ipc._errors")?;
    let made = errors.getattr(subclass.unwrap_or(class_of(error.kind())))?.call1((error.to_string(),))?;
    if subclass.is_some() {
        made.setattr("holders", holders)?;
    }
    Ok(PyErr::from_value(made))
}

/// Returns the name of the exception class. Two have a subclass with the holders.
const fn class_of(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Backend => "BackendError",
        ErrorKind::Unsupported => "UnsupportedError",
        ErrorKind::Descriptor => "DescriptorError",
        ErrorKind::Layout => "LayoutError",
        ErrorKind::Placement => "PlacementError",
        ErrorKind::NotFound => "NoSuchTensorError",
        ErrorKind::OutOfMemory => "OutOfMemoryError",
        ErrorKind::NotPermitted => "NotPermittedError",
        ErrorKind::Stale => "StaleError",
        ErrorKind::Gone | ErrorKind::Closed => "GoneError",
        ErrorKind::Timeout => "TimeoutError",
        ErrorKind::Forked => "ForkedError",
        _ => "Error",
    }
}
