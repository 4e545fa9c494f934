//! Python objects that keep shared memory allocated, and those that a thread of the library calls.

use std::sync::{Mutex, PoisonError};

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;

use crate::mapping_inner::NoWait;

/// References to Python objects that a thread of the library may drop.
pub(crate) struct PyOwner<T = Py<PyAny>>(Option<T>);

impl<T> PyOwner<T> {
    /// Takes references.
    pub(crate) fn new(objects: T) -> Self {
        Self(Some(objects))
    }
}

impl PyOwner {
    /// Returns another reference.
    pub(crate) fn get(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.0.as_ref().map(|object| object.clone_ref(py))
    }
}

impl<T> Drop for PyOwner<T> {
    fn drop(&mut self) {
        let Some(objects) = self.0.take() else { return };
        let mut objects = Some(objects);
        // A reference that is dropped without the interpreter lock is released at the next call of PyO3 only, which may never
        // come: the device memory would stay.
        let _no_wait = NoWait::begin();
        Python::try_attach(|_| drop(objects.take()));
        // The interpreter is shutting down, and the process with it.
        std::mem::forget(objects);
    }
}

/// A Python object that a thread of the library calls, and that the garbage collector may take back.
pub(crate) struct Callback(Mutex<Option<PyOwner>>);

impl Callback {
    /// Takes a reference.
    pub(crate) fn new(object: Py<PyAny>) -> Self {
        Self(Mutex::new(Some(PyOwner::new(object))))
    }

    /// Calls the object without arguments on this thread. An exception is printed.
    pub(crate) fn call(&self) {
        let _no_wait = NoWait::begin();
        Python::try_attach(|py| {
            // The object may replace or drop this callback: the lock is not held during the call.
            let Some(callable) = self
                .0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .as_ref()
                .and_then(|owner| owner.get(py))
            else {
                return;
            };
            if let Err(error) = callable.call0(py) {
                error.write_unraisable(py, Some(callable.bind(py)));
            }
        });
    }

    /// Shows the object to the garbage collector.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        let Ok(owner) = self.0.try_lock() else { return Ok(()) };
        visit.call(owner.as_ref().and_then(|owner| owner.0.as_ref()))
    }

    /// Drops the object.
    pub(crate) fn clear(&self) {
        let owner = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(owner);
    }
}
