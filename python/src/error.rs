//! Exceptions. Their classes are defined in `device_ipc/_errors.py`.

use device_ipc::{Error, ErrorWith};
use pyo3::prelude::*;

use crate::export::Holder;

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

impl<T, V> OrRaise<T> for Result<T, ErrorWith<V>> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| exception(py, error.error()))
    }
}

/// Returns the exception for an error of the library, with the same text, whose remedies are those of `remedy.rs`.
pub(crate) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    made(py, error).unwrap_or_else(|failed| failed)
}

fn made(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let errors = py.import("device_ipc._errors")?;
    let made = errors.getattr(class_of(error.innermost()))?.call1((error.to_string(),))?;
    let holders: Option<Vec<Holder>> = match error.innermost() {
        Error::StillHeld { holders, .. } => Some(holders.iter().map(Holder::from).collect()),
        Error::HolderDied { holders } => Some(holders.died().map(Holder::from).collect()),
        _ => None,
    };
    if let Some(holders) = holders {
        made.setattr("holders", holders)?;
    }
    Ok(PyErr::from_value(made))
}

/// Returns the name of the exception class. The classes that have a predicate are chosen by that of the error.
fn class_of(error: &Error) -> &'static str {
    match error {
        Error::StillHeld { .. } => "StillHeldError",
        Error::HolderDied { .. } => "HolderDiedError",
        _ if error.is_timeout() => "TimeoutError",
        _ if error.is_gone() => "GoneError",
        _ if error.is_stale() => "StaleError",
        _ if error.is_not_permitted() => "NotPermittedError",
        Error::NoBackend(_) | Error::BackendUnavailable { .. } | Error::UnknownBackend { .. } => {
            "BackendError"
        }
        Error::Unsupported { .. }
        | Error::NotShareable { .. }
        | Error::SharedOn { .. }
        | Error::Exposes { .. } => "UnsupportedError",
        Error::Descriptor(_) => "DescriptorError",
        Error::Layout(_) | Error::InvalidRegion(_) | Error::NotDeviceMemory { .. } => "LayoutError",
        Error::NoSuchDevice { .. }
        | Error::HomeNotVisible { .. }
        | Error::NotInDeviceMap { .. }
        | Error::InvalidDeviceMap(_)
        | Error::NoPeerAccess { .. }
        | Error::WrongStream { .. }
        | Error::StreamCapturing { .. }
        | Error::WrongBackend { .. }
        | Error::AddressesInUse { .. }
        | Error::OtherHost { .. }
        | Error::OtherNetworkNamespace => "PlacementError",
        Error::NoSuchTensor { .. } => "NoSuchTensorError",
        Error::OutOfMemory { .. } => "OutOfMemoryError",
        Error::Forked => "ForkedError",
        _ => "Error",
    }
}
