//! Timelines: counters that streams and hosts of an exporter and an importer signal and wait for.

use device_ipc::{DeviceOrdinal, Ipc};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::error::OrRaise as _;
use crate::session::{check_fork, not_picklable};
use crate::stream::StreamArg;
use crate::wait;

/// Two counters between an exporter and one importer, for memory that is written repeatedly: each side signals its own and waits
/// for that of the peer, on streams or on the host.
///
/// The importer takes it from its mapping, `Mapping.timeline()`, and the exporter from its export, `Export.timelines()`. A counter
/// begins at 0, only grows, and stays below 2**62. When the peer ends, every wait of a stream for it is satisfied, also over memory
/// that was never written: call `check` when the work behind a wait has finished, before its result is used.
#[pyclass(frozen, weakref, module = "device_ipc")]
pub(crate) struct Timeline {
    timeline: device_ipc::Timeline,
    ipc: Ipc,
    /// The device of a stream that is passed as a number.
    device: DeviceOrdinal,
}

impl Timeline {
    pub(crate) const fn new(timeline: device_ipc::Timeline, ipc: Ipc, device: DeviceOrdinal) -> Self {
        Self { timeline, ipc, device }
    }

    fn stream(&self, py: Python<'_>, stream: Option<&Bound<'_, PyAny>>) -> PyResult<StreamArg> {
        check_fork()?;
        StreamArg::given_or_current(py, stream, &self.ipc, self.device)?.ok_or_else(|| {
            PyTypeError::new_err(
                "no framework that is in use has a current stream; pass a stream, or call signal_now or wait_now",
            )
        })
    }
}

#[pymethods]
impl Timeline {
    /// The process id of the peer; 0 for a process of another pid namespace.
    #[getter]
    fn peer(&self) -> u32 {
        self.timeline.peer()
    }

    /// The counter of the peer, as the host sees it now. Raises `GoneError` as `check` does.
    #[getter]
    fn value(&self, py: Python<'_>) -> PyResult<u64> {
        check_fork()?;
        self.timeline.value().or_raise(py)
    }

    /// The largest value that this side has signalled, or submitted to a stream.
    #[getter]
    fn last_signalled(&self) -> PyResult<u64> {
        check_fork()?;
        Ok(self.timeline.last_signalled())
    }

    /// Sets the counter of this side to `value` when the stream reaches this point; all earlier work of the stream is then visible to
    /// the peer. Does not wait.
    ///
    /// `stream` is by default the current stream of the framework in use. Raises `Error` for a value that is not above all earlier
    /// ones, `GoneError` if the peer or the lease has ended, `PlacementError` for a stream of another backend, and
    /// `TypeError` if there is no stream.
    #[pyo3(signature = (value, stream=None))]
    fn signal(&self, py: Python<'_>, value: u64, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let stream = self.stream(py, stream)?;
        py.detach(|| self.timeline.signal(value, &stream)).or_raise(py)
    }

    /// Makes work that is submitted to the stream from now on wait until the counter of the peer is at least `value`. The host does
    /// not wait.
    ///
    /// `stream` is by default the current stream of the framework in use. Raises `GoneError` if the peer or the lease has ended before
    /// the counter was `value`, `PlacementError` for a stream of another backend, `Error` for a value that is too large, and `TypeError`
    /// if there is no stream.
    #[pyo3(signature = (value, stream=None))]
    fn wait(&self, py: Python<'_>, value: u64, stream: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let stream = self.stream(py, stream)?;
        py.detach(|| self.timeline.wait(value, &stream)).or_raise(py)
    }

    /// Sets the counter of this side to `value` at once; what the host has written before is then visible to the peer.
    ///
    /// Raises `Error` for a value that is not above all earlier ones, and `GoneError` if the peer or the lease has ended.
    fn signal_now(&self, py: Python<'_>, value: u64) -> PyResult<()> {
        check_fork()?;
        self.timeline.signal_now(value).or_raise(py)
    }

    /// Waits on the host until the counter of the peer is at least `value`.
    ///
    /// `timeout` is in seconds; `None` is no limit. Raises `TimeoutError` after it, and `GoneError` if the peer or the lease ends before the
    /// counter is `value`.
    #[pyo3(signature = (value, timeout=None))]
    fn wait_now(&self, py: Python<'_>, value: u64, timeout: Option<f64>) -> PyResult<()> {
        check_fork()?;
        wait::wait(py, wait::limit(timeout)?, |slice| self.timeline.wait_now(value, slice))
    }

    /// Checks that neither the peer nor the lease has ended; raises `GoneError` otherwise.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        check_fork()?;
        self.timeline.check().or_raise(py)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("a Timeline", "take the other end there, with Mapping.timeline()"))
    }

    fn __repr__(&self) -> String {
        let (peer, signalled) = (self.timeline.peer(), self.timeline.last_signalled());
        format!("<device_ipc.Timeline with process {peer}, last signalled {signalled}>")
    }
}
