//! What the tests on a GPU share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use device_ipc_cuda::CudaBackend;

/// The backend, for one test at a time: delays and frees of one test would hold up the streams of another, and show in
/// the memory that it measures. Where there is no GPU it says so, and the test passes.
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
