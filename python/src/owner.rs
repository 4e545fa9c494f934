//! Python objects that keep shared memory allocated, and those that a thread of the library calls.

use std::sync::{Mutex, PoisonError};

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyWeakrefReference;

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
///
/// The collector clears the objects of a cycle one by one, and what refers to this value may come after the object, or may have been
/// freed before: a `functools.partial` that was cleared reads a null pointer when it is called. Before that, it clears the weak references
/// to all of them.
pub(crate) struct Callback(Mutex<Option<PyOwner<Callable>>>);

struct Callable {
    object: Py<PyAny>,
    /// `None` for an object of a type without weak references, such as a function in C, which the collector does not clear.
    alive: Option<Py<PyWeakrefReference>>,
}

impl Callback {
    /// Takes a reference.
    pub(crate) fn new(object: Bound<'_, PyAny>) -> Self {
        let alive = PyWeakrefReference::new(&object).ok().map(Bound::unbind);
        Self(Mutex::new(Some(PyOwner::new(Callable { object: object.unbind(), alive }))))
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
                .and_then(|owner| owner.0.as_ref()?.get(py))
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
        visit.call(owner.as_ref().and_then(|owner| owner.0.as_ref()).map(|callable| &callable.object))
    }

    /// Drops the references.
    pub(crate) fn clear(&self) {
        let owner = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(owner);
    }
}

impl Callable {
    /// Returns another reference, unless the collector has begun to clear the object.
    fn get(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let is_alive = self.alive.as_ref().is_none_or(|alive| alive.bind(py).upgrade().is_some());
        is_alive.then(|| self.object.clone_ref(py))
    }
}
