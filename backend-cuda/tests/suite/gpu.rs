//! Shared code of the tests on a GPU.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device_ipc_core::backend::{DeviceIpc, DeviceStream, Gate};
use device_ipc_cuda::CudaBackend;

/// Returns the backend, for one test at a time: gates and frees of one test would block the streams of another and
/// affect its memory measurements. Without a GPU, reports it and returns `None`.
pub(crate) fn backend() -> Option<(Arc<CudaBackend>, MutexGuard<'static, ()>)> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    match CudaBackend::load() {
        Ok(backend) => Some((backend, ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner))),
        Err(reason) => {
            eprintln!("skipped: {reason}");
            None
        }
    }
}

/// Closes a gate in a stream.
pub(crate) fn gate(backend: &Arc<CudaBackend>, stream: &dyn DeviceStream) -> Gate {
    let backend: Arc<dyn DeviceIpc> = backend.clone();
    Gate::close(&backend, stream.as_borrowed()).unwrap()
}
