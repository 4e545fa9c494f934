//! Sharing of candle tensors between processes without a copy and without changes to candle or cudarc.
//!
//! # The exporter
//!
//! candle allocates through cudarc from the memory pool of the device. After a call of
//! [`make_pool_shareable`](device_ipc::cuda::make_pool_shareable) before the first allocation of candle, this pool can be
//! shared; then [`share`] shares a tensor in place.
//!
//! # The importer
//!
//! candle frees the memory of its tensors, but imported memory must not be freed. [`MappedTensor`] lends the memory to candle
//! while it is mapped, and takes it back before it releases the mapping: remaining clones of the tensor then have no memory,
//! and every operation on them is an error.
//!
//! Both sides use a device of [`Device::new_cuda_with_stream`](candle_core::Device::new_cuda_with_stream):
//! `Device::new_cuda` uses CUDA's per-thread stream, which differs between threads, so that work of two threads on one tensor
//! is unordered.

mod dtype;
mod mapped;
mod share;

pub use mapped::MappedTensor;
pub use share::share;
