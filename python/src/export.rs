//! Exports and descriptors.

use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device_ipc::{Access, DeviceOrdinal, Error, ErrorKind, Holders};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::error::{OrRaise as _, exception};
use crate::grant::Grant;
use crate::owner::Callback;
use crate::release_wait::ReleaseWait;
use crate::session::{check_fork, ipc, not_picklable, note_use};
use crate::timeline::Timeline;
use crate::wait;

/// A process that holds a lease on an export.
#[pyclass(frozen, module = "device_ipc", get_all)]
pub(crate) struct Holder {
    /// The process id.
    pid: u32,
    /// The program.
    program: String,
    /// The bytes of the lease.
    nbytes: u64,
    /// The age of the lease in seconds.
    held_for: f64,
    /// The use of the lease: "in use", "draining", "idle" or "in a message".
    state: String,
}

impl From<&device_ipc::Holder> for Holder {
    fn from(holder: &device_ipc::Holder) -> Self {
        let device_ipc::Holder { pid, ref program, bytes, state, .. } = *holder;
        Self {
            pid,
            program: program.clone(),
            nbytes: bytes,
            held_for: holder.held_for().as_secs_f64(),
            state: state.to_string(),
        }
    }
}

#[pymethods]
impl Holder {
    fn __repr__(&self) -> String {
        let Self { pid, program, nbytes, held_for, state } = self;
        format!("<device_ipc.Holder process {pid} ({program}), {nbytes} B, {state}, for {held_for:.1} s>")
    }
}

/// The name of an export or a ring: one line of text that another process opens. It contains the token that permits it.
///
/// `descriptor` is its text, its bytes or another `Descriptor`. Raises `DescriptorError` for a text or bytes that are none, and
/// `TypeError` for another object.
#[pyclass(frozen, eq, module = "device_ipc")]
#[derive(PartialEq)]
pub(crate) struct Descriptor {
    pub(crate) descriptor: device_ipc::Descriptor,
}

#[pymethods]
impl Descriptor {
    #[new]
    fn new(py: Python<'_>, descriptor: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self { descriptor: parse(py, descriptor)? })
    }

    /// The name of the backend.
    #[getter]
    fn backend(&self) -> &str {
        self.descriptor.backend()
    }

    /// The process id of the exporter, in its own pid namespace.
    #[getter]
    fn pid(&self) -> u32 {
        self.descriptor.exporter().pid
    }

    /// The length of the memory in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.descriptor.len()
    }

    /// Whether importers may write.
    #[getter]
    fn read_only(&self) -> bool {
        self.descriptor.access() == Access::ReadOnly
    }

    /// The names of the tensors; empty for a single tensor without a name.
    #[getter]
    fn names(&self) -> Vec<String> {
        let names = self.descriptor.tensors().map(|(name, _)| name.to_owned());
        if self.descriptor.is_named() { names.collect() } else { Vec::new() }
    }

    /// The identities of the home devices.
    #[getter]
    fn homes(&self) -> Vec<String> {
        self.descriptor.homes().map(|home| home.to_string()).collect()
    }

    /// Whether it names a ring.
    #[getter]
    fn is_ring(&self) -> bool {
        self.descriptor.ring().is_some()
    }

    fn __str__(&self) -> String {
        self.descriptor.to_string()
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.descriptor.to_bytes())
    }

    fn __hash__(&self) -> u64 {
        use std::hash::{DefaultHasher, Hash as _, Hasher as _};
        let mut hasher = DefaultHasher::new();
        self.descriptor.to_bytes().hash(&mut hasher);
        hasher.finish()
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        Ok((slf.get_type().into_any(), (slf.get().__str__(),)))
    }

    fn __repr__(&self) -> String {
        let (backend, pid, bytes) = (self.backend(), self.pid(), self.nbytes());
        format!(
            "<device_ipc.Descriptor of {bytes} B of process {pid}, {backend}, {}>",
            self.descriptor.access()
        )
    }
}

/// Returns the exception for an object that is neither a descriptor nor its text or bytes.
fn not_a_descriptor(object: &Bound<'_, PyAny>) -> PyErr {
    let found = object.get_type().name().map_or_else(|_| "this object".to_owned(), |name| name.to_string());
    PyTypeError::new_err(format!(
        "expected a Descriptor, its text or its bytes, not {found}; pass str(export) or export.descriptor"
    ))
}

/// Parses a descriptor: an object of this package, its text or its bytes.
pub(crate) fn parse(py: Python<'_>, descriptor: &Bound<'_, PyAny>) -> PyResult<device_ipc::Descriptor> {
    if let Ok(parsed) = descriptor.cast::<Descriptor>() {
        return Ok(parsed.get().descriptor.clone());
    }
    let parsed = if let Ok(text) = descriptor.cast::<PyString>() {
        text.to_cow()?.parse::<device_ipc::Descriptor>()
    } else {
        let bytes = descriptor.extract::<Vec<u8>>().map_err(|_| not_a_descriptor(descriptor))?;
        // The text may have been read from a file in binary mode.
        match std::str::from_utf8(&bytes) {
            Ok(text) if text.trim_start().starts_with("dipc1:") => text.parse(),
            _ => device_ipc::Descriptor::from_bytes(&bytes).map_err(device_ipc::Error::from),
        }
    };
    parsed.or_raise(py)
}

/// A descriptor that becomes readable with every change of an export's holders, and when a reader joins a ring. Each object has
/// its own, so several event loops and threads may wait.
#[pyclass(frozen, module = "device_ipc")]
pub(crate) struct Changes(pub(crate) device_ipc::ExportChanges);

#[pymethods]
impl Changes {
    /// The descriptor.
    fn fileno(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Makes the descriptor unreadable until the next change. Call it before `wait_released(timeout=0)` and the like, so that no
    /// change is lost.
    fn clear(&self) {
        self.0.clear();
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("a descriptor of this process", "call changes() of an object of the other process"))
    }
}

/// Shared memory of this process. While it lives, other processes may open it by its text, `str(export)`.
///
/// Dropping it does not wait: processes that have opened the memory keep it. As a context manager, it waits at the end of the
/// block until no process holds it.
#[pyclass(frozen, weakref, module = "device_ipc")]
pub(crate) struct Export {
    export: Mutex<Option<Arc<device_ipc::Export>>>,
    /// The holders that the last slice of `close` has found.
    closing: Mutex<Option<Holders>>,
    /// The callable of `on_change`. It usually refers to this object: the garbage collector finds that cycle.
    callback: Mutex<Option<Arc<Callback>>>,
    descriptor: device_ipc::Descriptor,
    tensors: usize,
    /// The first one.
    device: DeviceOrdinal,
}

impl Export {
    pub(crate) fn new(export: device_ipc::Export, device: DeviceOrdinal) -> Self {
        let descriptor = export.descriptor().clone();
        let tensors = descriptor.tensors().len();
        note_use();
        Self {
            export: Mutex::new(Some(Arc::new(export))),
            closing: Mutex::default(),
            callback: Mutex::default(),
            descriptor,
            tensors,
            device,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<device_ipc::Export>>> {
        self.export.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self) -> PyResult<Arc<device_ipc::Export>> {
        check_fork()?;
        self.lock().clone().ok_or_else(|| PyValueError::new_err("the export is closed"))
    }
}

#[pymethods]
impl Export {
    /// The descriptor, which other processes open.
    #[getter]
    fn descriptor(&self) -> Descriptor {
        Descriptor { descriptor: self.descriptor.clone() }
    }

    /// The length of the memory in bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.descriptor.len()
    }

    /// The names of the tensors; empty for a single tensor without a name.
    #[getter]
    fn names(&self) -> Vec<String> {
        self.descriptor().names()
    }

    /// Returns the processes that hold a lease now. Another thread can call it while `close` waits; the list is then 50 ms old at most.
    fn holders(&self) -> PyResult<Vec<Holder>> {
        check_fork()?;
        if let Some(export) = self.lock().clone() {
            return Ok(export.holders().iter().map(Holder::from).collect());
        }
        let closing = self.closing.lock().unwrap_or_else(PoisonError::into_inner);
        let holders = closing.as_ref().ok_or_else(|| PyValueError::new_err("the export is closed"))?;
        Ok(holders.iter().map(Holder::from).collect())
    }

    /// Returns the processes that died while they used the memory, the last 64: killed, crashed, or ended before their device work had
    /// finished. What they were writing may be incomplete. Raises `ValueError` if the export is closed.
    fn died(&self) -> PyResult<Vec<Holder>> {
        Ok(self.get()?.holders().died().map(Holder::from).collect())
    }

    /// Takes back idle leases: those that only the import cache of a process keeps. Does not wait; the export stays open.
    fn recall(&self, py: Python<'_>) -> PyResult<()> {
        let export = self.get()?;
        py.detach(|| export.recall());
        Ok(())
    }

    /// The number of times that the export was opened.
    #[getter]
    fn opened(&self) -> PyResult<u64> {
        Ok(self.get()?.holders().opened())
    }

    /// Waits until a process has opened the export and no process holds it any longer. The export stays open. Without an exception,
    /// all device work of the importers with the memory has finished.
    ///
    /// `timeout` is in seconds; `None` is no limit. Raises `StillHeldError`, which lists the holders, after it,
    /// `HolderDiedError`, once for each death, if a process died while it used the memory, and `ValueError` if the export is closed.
    #[pyo3(signature = (timeout=None))]
    fn wait_released(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        self.get()?;
        let mut release = ReleaseWait::new(&self.descriptor, wait::limit(timeout)?);
        loop {
            let Some(export) = self.lock().clone() else { return Err(wait::closed_meanwhile("export")) };
            let slice = release.slice();
            let error = match py.detach(move || export.wait_released(slice)) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            match &error {
                Error::StillHeld { holders, .. } => release.check(py, holders)?,
                _ if error.kind() == ErrorKind::Timeout && !release.is_over() => py.check_signals()?,
                _ => return Err(wait::with_time(error, release.limit())).or_raise(py),
            }
        }
    }

    /// Waits until the export has been opened this many times.
    ///
    /// `count` is that number. `timeout` is in seconds; `None` is no limit. Raises `TimeoutError` after it, and
    /// `ValueError` if the export is closed.
    #[pyo3(signature = (count=1, timeout=None))]
    fn wait_opened(&self, py: Python<'_>, count: u64, timeout: Option<f64>) -> PyResult<()> {
        self.get()?;
        let export = || self.lock().clone();
        wait::while_open(py, wait::limit(timeout)?, "export", export, |export, slice| {
            export.wait_opened(count, slice)
        })
    }

    /// Waits until this many importers have called `Mapping.timeline`, and returns this side of their timelines, in the order in which
    /// the importers opened the export.
    ///
    /// `count` is that number. `timeout` is in seconds; `None` is no limit. Raises `TimeoutError` after it, and
    /// `ValueError` if the export is closed.
    #[pyo3(signature = (count=1, timeout=None))]
    fn timelines(&self, py: Python<'_>, count: usize, timeout: Option<f64>) -> PyResult<Vec<Timeline>> {
        self.get()?;
        let export = || self.lock().clone();
        let found = wait::while_open(py, wait::limit(timeout)?, "export", export, |export, slice| {
            export.timelines(count, slice)
        })?;
        let ipc = ipc(py, Some(self.descriptor.backend()))?;
        Ok(found.into_iter().map(|timeline| Timeline::new(timeline, ipc.clone(), self.device)).collect())
    }

    /// Returns a descriptor for `wait_released(timeout=0)` and `wait_opened(timeout=0)`.
    fn changes(&self) -> PyResult<Changes> {
        Ok(Changes(self.get()?.changes()))
    }

    /// Has a callable called, without arguments, after changes of `holders`. It runs on a thread of the library, must not wait,
    /// and replaces an earlier one.
    ///
    /// Raises `ValueError` if the export is closed. `callback` may be a method of an object that refers to the export.
    fn on_change(&self, callback: Bound<'_, PyAny>) -> PyResult<()> {
        let callback = Arc::new(Callback::new(callback));
        let export = self.get()?;
        *self.callback.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&callback));
        export.on_change(move || callback.call());
        Ok(())
    }

    /// Returns a right to open the export once: send its text beside the descriptor, and pass it to `open(…, grant=…)`. The memory
    /// stays until it is used, given back or `limit` seconds old, also if the export is dropped before.
    ///
    /// `limit` is in seconds; `None` is no limit. Raises `Error` if too many grants are unused, and `ValueError` if the
    /// export is closed.
    #[pyo3(signature = (limit=600.0))]
    fn grant(&self, py: Python<'_>, limit: Option<f64>) -> PyResult<Grant> {
        self.get()?.grant(wait::limit(limit)?).or_raise(py).map(Grant::from)
    }

    /// Ends the export, and waits until no process holds the memory and its owner has been dropped. After a timeout, call it
    /// again to wait longer.
    ///
    /// `timeout` is in seconds; `None` is no limit. Raises `StillHeldError`, which lists the holders, after it; the
    /// export then stays closed for new processes. Waits of other threads for the export end.
    #[pyo3(signature = (timeout=None))]
    fn close(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        check_fork()?;
        let limit = wait::limit(timeout)?;
        let Some(export) = self.lock().take() else { return Ok(()) };
        let export = wait::sole(py, export).map_err(|export| {
            *self.lock() = Some(export);
            PyValueError::new_err("another thread uses the export; close it when that call has returned")
        })?;
        let mut release = ReleaseWait::new(&self.descriptor, limit);
        let mut export = export;
        loop {
            let slice = release.slice();
            let Err(failed) = py.detach(move || export.close(slice)) else { return Ok(()) };
            let checked = match failed.error() {
                Error::StillHeld { holders, .. } => {
                    *self.closing.lock().unwrap_or_else(PoisonError::into_inner) = Some(holders.clone());
                    release.check(py, holders)
                }
                Error::Timeout { .. } if !release.is_over() => py.check_signals(),
                Error::Timeout { what, detail, .. } => {
                    let (what, detail) = (what.clone(), detail.clone());
                    Err(exception(py, &Error::Timeout { what, after: limit, detail }))
                }
                error => Err(exception(py, error)),
            };
            export = failed.into_inner();
            if let Err(error) = checked {
                *self.lock() = Some(Arc::new(export));
                return Err(error);
            }
        }
    }

    /// Whether the export was closed.
    #[getter]
    fn closed(&self) -> PyResult<bool> {
        check_fork()?;
        Ok(self.lock().is_none())
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*exception))]
    fn __exit__(&self, py: Python<'_>, exception: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        if exception.get_item(0).is_ok_and(|class| !class.is_none()) {
            // The block failed: end the export, but do not wait.
            drop(self.lock().take());
            return Ok(());
        }
        self.close(py, None)
    }

    fn __str__(&self) -> String {
        self.descriptor.to_string()
    }

    // The collector may run while another thread holds a lock. It then finds no cycle, and looks again later.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        let Ok(callback) = self.callback.try_lock() else { return Ok(()) };
        callback.as_ref().map_or(Ok(()), |callback| callback.traverse(&visit))
    }

    fn __clear__(&self) {
        let callback = self.callback.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(callback) = callback {
            callback.clear();
        }
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("an Export", "send its text, str(export), or export.descriptor"))
    }

    fn __repr__(&self) -> String {
        let state = if self.lock().is_none() { ", closed" } else { "" };
        let Self { descriptor, tensors, .. } = self;
        let (bytes, backend, access) = (descriptor.len(), descriptor.backend(), descriptor.access());
        format!("<device_ipc.Export of {tensors} tensors, {bytes} B, {backend}, {access}{state}>")
    }
}
