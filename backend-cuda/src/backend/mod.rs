//! The backend: CUDA behind the traits of device-ipc.

mod cuda;
mod diagnosis;
mod memory;
mod reservations;
mod shareable_pool;
mod test_kernels;
mod timelines;

pub(crate) use cuda::registered;
pub use cuda::{CudaBackend, REGISTRATION};
pub use shareable_pool::make_pool_shareable;
