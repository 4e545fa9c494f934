//! Python objects that keep shared memory allocated.

use pyo3::prelude::*;

/// A reference to a Python object that a thread of the library may drop.
pub(crate) struct PyOwner(Option<Py<PyAny>>);

impl PyOwner {
    /// Takes a reference.
    pub(crate) fn new(object: Py<PyAny>) -> Self {
        Self(Some(object))
    }

    /// Calls the object without arguments on this thread. An exception is printed.
    pub(crate) fn call(&self) {
        let Some(callable) = &self.0 else { return };
        Python::try_attach(|py| {
            if let Err(error) = callable.call0(py) {
                error.write_unraisable(py, Some(callable.bind(py)));
            }
        });
    }
}

impl Drop for PyOwner {
    fn drop(&mut self) {
        let Some(object) = self.0.take() else { return };
        let mut object = Some(object);
        // A reference that is dropped without the interpreter lock is released at the next call of PyO3 only, which may never
        // come: the device memory would stay.
        Python::try_attach(|_| drop(object.take()));
        // The interpreter is shutting down, and the process with it.
        std::mem::forget(object);
    }
}
