//! The readers of a ring, as its writer sees them.

use device_ipc::LeaseId;
use pyo3::prelude::*;

use crate::session::{check_fork, not_picklable};

/// A reader that the next `Ring.write` waits for.
#[pyclass(frozen, module = "device_ipc")]
pub(crate) struct ReaderPosition {
    lease: LeaseId,
    /// The process id, 0 for a process of another pid namespace.
    #[pyo3(get)]
    pid: u32,
    /// The program.
    #[pyo3(get)]
    program: String,
    /// The first sequence that the reader has not released.
    #[pyo3(get)]
    sequence: u64,
}

#[pymethods]
impl ReaderPosition {
    fn __repr__(&self) -> String {
        let Self { pid, program, sequence, .. } = self;
        format!("<device_ipc.ReaderPosition process {pid} ({program}), has not released sequence {sequence}>")
    }
}

/// The readers of a ring, for threads that watch them while another thread waits in `write` or in `close`. It does not keep the
/// memory.
#[pyclass(frozen, weakref, skip_from_py_object, module = "device_ipc")]
#[derive(Clone)]
pub(crate) struct RingReaders(pub(super) device_ipc::RingReaders);

#[pymethods]
impl RingReaders {
    /// The number of readers.
    #[getter]
    pub(super) fn count(&self) -> PyResult<usize> {
        check_fork()?;
        Ok(self.0.count())
    }

    /// Returns the readers that the next `Ring.write` waits for, the slowest first.
    pub(super) fn readers_behind(&self) -> PyResult<Vec<ReaderPosition>> {
        check_fork()?;
        let position = |behind: device_ipc::ReaderPosition| ReaderPosition {
            lease: behind.lease,
            pid: behind.pid,
            program: behind.program,
            sequence: behind.sequence,
        };
        Ok(self.0.readers_behind().into_iter().map(position).collect())
    }

    /// Dismisses a reader, and returns whether it was one. Streams that wait for it continue, its slots are overwritten, and its next
    /// call raises `Error`. It may join the ring again.
    ///
    /// `reader` is one of `readers_behind()`. Raises `TypeError` for another object.
    pub(super) fn dismiss(&self, py: Python<'_>, reader: &Bound<'_, ReaderPosition>) -> PyResult<bool> {
        check_fork()?;
        let lease = reader.get().lease;
        Ok(py.detach(|| self.0.dismiss(lease)))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(not_picklable("the readers of a ring", "pass what readers_behind() states"))
    }

    fn __repr__(&self) -> String {
        format!("<device_ipc.RingReaders, {} readers>", self.0.count())
    }
}
