//! Waits that release the interpreter lock and that Ctrl-C ends.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use device_ipc::{Error, ErrorKind, Result};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;

use crate::error::OrRaise as _;

/// The longest time between two looks at pending signals.
pub(crate) const SLICE: Duration = Duration::from_millis(50);

/// The time limit of a wait without one.
pub(crate) const FOREVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// The time limit of requests to other processes, unless the caller sets one.
pub(crate) const DEFAULT: f64 = 30.0;

/// Returns a time limit in seconds as a duration; `None` is no limit.
pub(crate) fn limit(seconds: Option<f64>) -> PyResult<Duration> {
    let Some(seconds) = seconds else { return Ok(FOREVER) };
    if seconds.is_nan() || seconds < 0.0 {
        return Err(PyValueError::new_err(format!(
            "the timeout is {seconds} s; it must be 0 or more, or None"
        )));
    }
    Ok(Duration::try_from_secs_f64(seconds).map_or(FOREVER, |limit| limit.min(FOREVER)))
}

/// Repeats a call that may be repeated after its time limit, with short time limits, until it returns something else.
///
/// The error of a wait that runs out of time states the whole time.
pub(crate) fn wait<T: Send>(
    py: Python<'_>,
    limit: Duration,
    mut call: impl FnMut(Duration) -> Result<T> + Send,
) -> PyResult<T> {
    let begun = Instant::now();
    loop {
        let left = limit.saturating_sub(begun.elapsed());
        let result = py.detach(|| call(left.min(SLICE)));
        py.check_signals()?;
        match result {
            Err(error) if error.kind() == ErrorKind::Timeout && begun.elapsed() < limit => {}
            Err(error) => return Err(with_time(error, limit)).or_raise(py),
            Ok(value) => return Ok(value),
        }
    }
}

/// As [`wait`], for an object that is taken out of its place when another thread closes it, which ends the wait.
pub(crate) fn while_open<O: Send + Sync, T: Send>(
    py: Python<'_>,
    limit: Duration,
    what: &str,
    object: impl Fn() -> Option<Arc<O>> + Send + Sync,
    call: impl Fn(&O, Duration) -> Result<T> + Send + Sync,
) -> PyResult<T> {
    let result = wait(py, limit, |slice| object().map(|object| call(&object, slice)).transpose())?;
    result.ok_or_else(|| closed_meanwhile(what))
}

/// As [`wait`], until another thread sets the flag, because it closes the object.
pub(crate) fn unless<T: Send>(
    py: Python<'_>,
    limit: Duration,
    what: &str,
    closed: &AtomicBool,
    mut call: impl FnMut(Duration) -> Result<T> + Send,
) -> PyResult<T> {
    let result =
        wait(
            py,
            limit,
            |slice| {
                if closed.load(Ordering::Acquire) { Ok(None) } else { call(slice).map(Some) }
            },
        )?;
    result.ok_or_else(|| closed_meanwhile(what))
}

pub(crate) fn closed_meanwhile(what: &str) -> PyErr {
    PyValueError::new_err(format!("the {what} is closed; another thread closed it during this call"))
}

/// Waits until the calls of other threads on an object that was taken out of its place have returned, which takes 50 ms at most for
/// those that wait. Returns the object, or the reference if one remains.
pub(crate) fn sole<O: Send + Sync>(py: Python<'_>, object: Arc<O>) -> std::result::Result<O, Arc<O>> {
    let until = Instant::now() + 20 * SLICE;
    py.detach(|| {
        let mut object = object;
        loop {
            match Arc::try_unwrap(object) {
                Ok(sole) => return Ok(sole),
                Err(shared) if Instant::now() > until => return Err(shared),
                Err(shared) => object = shared,
            }
            thread::sleep(Duration::from_millis(1));
        }
    })
}

/// As [`wait`]. A time limit of zero makes one attempt instead, after which the object's descriptor is readable when another
/// attempt is worthwhile.
pub(crate) fn try_or_wait<T: Send>(
    py: Python<'_>,
    limit: Duration,
    what: &str,
    attempt: impl FnOnce() -> Result<Option<T>> + Send,
    call: impl FnMut(Duration) -> Result<T> + Send,
) -> PyResult<T> {
    if limit.is_zero() { try_once(py, what, attempt) } else { wait(py, limit, call) }
}

/// Makes one attempt, which does not wait.
pub(crate) fn try_once<T: Send>(
    py: Python<'_>,
    what: &str,
    attempt: impl FnOnce() -> Result<Option<T>> + Send,
) -> PyResult<T> {
    let late = || Error::Timeout { what: what.to_owned(), after: Duration::ZERO, detail: String::new() };
    py.detach(attempt).and_then(|taken| taken.ok_or_else(late)).or_raise(py)
}

/// The number of threads that wait for an object, which hold its lock.
#[derive(Default)]
pub(crate) struct Waiting(AtomicUsize);

impl Waiting {
    /// Counts this thread until the guard is dropped, if its call may wait. An attempt that does not wait is refused while other
    /// threads do, as it would wait for their lock.
    pub(crate) fn begin(&self, limit: Duration, call: &str) -> PyResult<impl Drop> {
        struct Guard<'a>(&'a AtomicUsize);
        impl Drop for Guard<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::AcqRel);
            }
        }
        let others = self.0.fetch_add(1, Ordering::AcqRel);
        let guard = Guard(&self.0);
        if others > 0 && limit.is_zero() {
            return Err(PyRuntimeError::new_err(format!(
                "another thread waits in {call}; let either threads or one event loop wait for an object"
            )));
        }
        Ok(guard)
    }
}

/// Has the tasks that wait for an object make an attempt, as it has changed or was closed; see `device_ipc.aio`.
pub(crate) fn wake_tasks(object: &Bound<'_, PyAny>) -> PyResult<()> {
    wake_tasks_of(object.py(), object.as_ptr().addr())
}

/// As [`wake_tasks`], for the object of this identity.
pub(crate) fn wake_tasks_of(py: Python<'_>, object: usize) -> PyResult<()> {
    let modules = py.import("sys")?.getattr("modules")?;
    if let Ok(aio) = modules.get_item("device_ipc.aio") {
        aio.call_method1("_wake", (object,))?;
    }
    Ok(())
}

/// Makes a call that must not be repeated. Ctrl-C ends its waits as if its time limit were over.
pub(crate) fn interruptible<T: Send>(py: Python<'_>, call: impl FnOnce() -> T + Send) -> PyResult<T> {
    let (result, raised) = py.detach(|| {
        let raised = Rc::new(RefCell::new(None));
        let seen = Rc::clone(&raised);
        // Does nothing on a thread that receives no signals.
        let check = move || match Python::attach(|py| py.check_signals()) {
            Ok(()) => false,
            Err(error) => {
                *seen.borrow_mut() = Some(error);
                true
            }
        };
        let result = device_ipc::front_end::interruptible(check, call);
        (result, raised.take())
    });
    raised.map_or(Ok(result), Err)
}

/// Runs a call that waits in the driver on another thread, and returns its result. The call continues there if Ctrl-C ends this
/// wait. A thread that receives no signals runs it itself.
pub(crate) fn aside<T: Send + 'static>(
    py: Python<'_>,
    call: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    if !is_main_thread(py)? {
        return Ok(py.detach(call));
    }
    let (sender, receiver) = mpsc::channel();
    let receiver = Mutex::new(receiver);
    let thread = thread::Builder::new().name("device-ipc-wait".to_owned());
    let started = thread.spawn(move || drop(sender.send(call())));
    started.map_err(|error| Error::io("starting a thread", error)).or_raise(py)?;
    loop {
        match py.detach(|| receiver.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(SLICE)) {
            Ok(result) => return Ok(result),
            Err(mpsc::RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(Error::Protocol("the thread of the call ended".into())).or_raise(py);
            }
        }
    }
}

/// Returns whether this is the thread that runs the handlers of signals.
fn is_main_thread(py: Python<'_>) -> PyResult<bool> {
    let threading = py.import(intern!(py, "threading"))?;
    let this = threading.call_method0(intern!(py, "get_ident"))?;
    threading.call_method0(intern!(py, "main_thread"))?.getattr(intern!(py, "ident"))?.eq(this)
}

/// Returns the error with the time limit of the whole wait.
pub(crate) fn with_time(mut error: Error, limit: Duration) -> Error {
    match &mut error {
        Error::Timeout { after, .. }
        | Error::StillHeld { after, .. }
        | Error::NotOpened { after, .. }
        | Error::NoListener { after, .. } => {
            *after = limit;
        }
        _ => {}
    }
    error
}
