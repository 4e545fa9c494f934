//! Exceptions. Their classes are defined in `device_ipc/_errors.py`.

use device_ipc::{Error, ErrorWith};
use pyo3::prelude::*;

use crate::export::Holder;

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

/// Returns the exception for an error of the library, with the same text.
pub(crate) fn exception(py: Python<'_>, error: &Error) -> PyErr {
    made(py, error).unwrap_or_else(|failed| failed)
}

fn made(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let class = py.import("device_ipc._errors")?.getattr(class_of(error.innermost()))?;
    let made = class.call1((error.to_string(),))?;
    if let Error::StillHeld { holders, .. } = error.innermost() {
        let holders: Vec<Holder> = holders.iter().map(Holder::from).collect();
        made.setattr("holders", holders)?;
    }
    Ok(PyErr::from_value(made))
}

/// Returns the name of the exception class.
fn class_of(error: &Error) -> &'static str {
    match error {
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
        | Error::WrongBackend { .. }
        | Error::OtherHost { .. }
        | Error::OtherNetworkNamespace => "PlacementError",
        Error::ExporterGone { .. }
        | Error::ImporterGone { .. }
        | Error::LeaseEnded { .. }
        | Error::ExportDropped { .. }
        | Error::RingClosed { .. }
        | Error::RingUnpublished { .. }
        | Error::DismissedFromRing { .. }
        | Error::ChannelClosed { .. }
        | Error::PeerGone { .. } => "GoneError",
        Error::StaleGeneration(_) | Error::Rebooted => "StaleError",
        Error::AccessDenied { .. } | Error::NotPermitted(_) => "NotPermittedError",
        Error::Timeout { .. } | Error::NobodyListens { .. } => "TimeoutError",
        Error::StillHeld { .. } => "StillHeldError",
        Error::NoSuchTensor { .. } => "NoSuchTensorError",
        Error::OutOfMemory { .. } => "OutOfMemoryError",
        Error::Forked => "ForkedError",
        _ => "Error",
    }
}
