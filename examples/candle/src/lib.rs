//! candle's tensors between processes: the bytes stay where they are, and neither candle nor cudarc is changed.
//!
//! # The exporter
//!
//! candle allocates by cudarc from the device's memory pool. [`make_pool_shareable`](device_ipc::cuda::make_pool_shareable),
//! called before candle allocates anything, makes that pool one that can be shared; then [`share`] shares a tensor where it
//! lies.
//!
//! # The importer
//!
//! candle frees what its tensors hold, and memory of another process is not ours to free. [`MappedTensor`] lends candle
//! the memory for as long as it is mapped, and takes it back before it is let go of: clones of the tensor that are left
//! over then hold no memory, and every operation with them is an error.
//!
//! Both sides take a device of [`Device::new_cuda_with_stream`](candle_core::Device::new_cuda_with_stream):
//! `Device::new_cuda` works on CUDA's per-thread stream, which is another one in each thread, and nothing orders a tensor
//! that goes from one thread to another there.

mod dtype;
mod mapped;
mod share;

pub use mapped::MappedTensor;
pub use share::share;
