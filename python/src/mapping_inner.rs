//! Mappings behind a lock, for the calls that exchange their memory.
//!
//! Threads that wait for the lock release the interpreter lock. The exchanging thread may run handlers of signals, and the
//! library's threads run callbacks: on a thread that holds the lock, or that the library may wait for, no call waits for it.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, TryLockError};
use std::time::Duration;

use device_ipc::{Access, Descriptor, DeviceOrdinal, Error, Ipc, Mapping, Result};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::RwLockExt as _;

use crate::error::{OrRaise as _, exception};
use crate::stream::StreamArg;
use crate::uses::Uses;
use crate::wait;

thread_local! {
    static MUST_NOT_WAIT: Cell<usize> = const { Cell::new(0) };
}

/// While it exists, calls of this thread do not wait for a mapping's lock.
pub(crate) struct NoWait(());

impl NoWait {
    pub(crate) fn begin() -> Self {
        MUST_NOT_WAIT.set(MUST_NOT_WAIT.get() + 1);
        Self(())
    }
}

impl Drop for NoWait {
    fn drop(&mut self) {
        MUST_NOT_WAIT.set(MUST_NOT_WAIT.get() - 1);
    }
}

/// A mapping with what its tensors need; each tensor and each DLPack capsule has a reference.
pub(crate) struct MappingInner {
    mapping: RwLock<Mapping>,
    /// Whether the addresses hold no memory, as of the last exchange.
    is_suspended: AtomicBool,
    /// The descriptor that the memory was opened by first: names and layouts of later ones are the same.
    pub(crate) contents: Descriptor,
    pub(crate) device: DeviceOrdinal,
    pub(crate) nbytes: u64,
    pub(crate) access: Access,
    pub(crate) backend: &'static str,
    /// The stream that waits for the bytes; the host has waited where there is none.
    pub(crate) stream: Option<Arc<StreamArg>>,
    pub(crate) allow_read_only: bool,
    /// How further versions are opened at reserved addresses.
    pub(crate) reserved: Option<ReservedOpen>,
    pub(crate) uses: Uses,
}

/// The users and the time limit with which memory was opened at reserved addresses.
pub(crate) struct ReservedOpen {
    pub(crate) ipc: Ipc,
    pub(crate) limit: Duration,
}

impl MappingInner {
    pub(crate) fn new(
        mapping: Mapping,
        backend: &'static str,
        stream: Option<Arc<StreamArg>>,
        allow_read_only: bool,
    ) -> Self {
        Self {
            is_suspended: AtomicBool::new(false),
            contents: mapping.descriptor().clone(),
            device: mapping.device(),
            nbytes: mapping.len(),
            access: mapping.access(),
            mapping: RwLock::new(mapping),
            backend,
            stream,
            allow_read_only,
            reserved: None,
            uses: Uses::default(),
        }
    }

    pub(crate) fn is_writable(&self) -> bool {
        self.access == Access::ReadWrite
    }

    pub(crate) fn is_suspended(&self) -> bool {
        self.is_suspended.load(Ordering::Acquire)
    }

    /// Fails if the addresses hold no memory.
    pub(crate) fn check_mapped(&self, py: Python<'_>) -> PyResult<()> {
        if self.is_suspended() { Err(exception(py, &Error::Suspended)) } else { Ok(()) }
    }

    /// Calls a function that runs no Python, after other threads have exchanged the memory.
    pub(crate) fn read<R>(&self, py: Python<'_>, call: impl FnOnce(&Mapping) -> R) -> PyResult<R> {
        let mapping = match self.mapping.try_read() {
            Ok(mapping) => mapping,
            Err(TryLockError::Poisoned(mapping)) => mapping.into_inner(),
            Err(TryLockError::WouldBlock) => {
                check_may_wait()?;
                self.mapping.read_py_attached(py).unwrap_or_else(PoisonError::into_inner)
            }
        };
        let _no_wait = NoWait::begin();
        Ok(call(&mapping))
    }

    /// As [`read`](Self::read), for places of memory: fails if the addresses hold none.
    pub(crate) fn view<R>(&self, py: Python<'_>, call: impl FnOnce(&Mapping) -> R) -> PyResult<R> {
        self.read(py, |mapping| if mapping.is_suspended() { None } else { Some(call(mapping)) })?
            .ok_or_else(|| exception(py, &Error::Suspended))
    }

    /// As [`read`](Self::read), without waiting: `None` while another thread exchanges the memory.
    pub(crate) fn try_read<R>(&self, call: impl FnOnce(&Mapping) -> R) -> Option<R> {
        let mapping = match self.mapping.try_read() {
            Ok(mapping) => mapping,
            Err(TryLockError::Poisoned(mapping)) => mapping.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let _no_wait = NoWait::begin();
        Some(call(&mapping))
    }

    /// Exchanges the memory. Ctrl-C ends the waits of the call.
    pub(crate) fn exchange<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Mapping) -> Result<R> + Send,
    ) -> PyResult<R> {
        check_may_wait()?;
        let exchange = || {
            let mut mapping = self.mapping.write().unwrap_or_else(PoisonError::into_inner);
            let _no_wait = NoWait::begin();
            let exchanged = call(&mut mapping);
            self.is_suspended.store(mapping.is_suspended(), Ordering::Release);
            exchanged
        };
        wait::interruptible(py, exchange)?.or_raise(py)
    }

    /// Returns the mapping and the stream that it was opened on.
    pub(crate) fn into_mapping(self) -> (Mapping, Option<Arc<StreamArg>>) {
        (self.mapping.into_inner().unwrap_or_else(PoisonError::into_inner), self.stream)
    }
}

/// Fails on a thread that would wait for itself.
fn check_may_wait() -> PyResult<()> {
    if MUST_NOT_WAIT.get() == 0 {
        return Ok(());
    }
    Err(PyRuntimeError::new_err(
        "the memory of the mapping is being suspended, resumed or replaced, and a callback of the library or a handler of a \
         signal must not wait for that; use the mapping on another thread, which the callback can notify",
    ))
}
