//! Sharing of candle tensors between processes without a copy and without changes to candle or cudarc.
//!
//! # The exporter
//!
//! candle allocates through cudarc from the memory pool of the device. After a call of
//! [`make_pool_shareable`](device_ipc::cuda::make_pool_shareable) before the first allocation of candle, this pool can be
//! shared; then `share` shares a tensor in place.
//!
//! # The importer
//!
//! candle frees the memory of its tensors, but imported memory must not be freed. `MappedTensor` lends the memory to candle
//! while it is mapped, and takes it back before it releases the mapping: remaining clones of the tensor then have no memory,
//! and every operation on them is an error.
//!
//! Both sides use a device of [`Device::new_cuda_with_stream`](candle_core::Device::new_cuda_with_stream):
//! `Device::new_cuda` uses CUDA's per-thread stream, which differs between threads, so that work of two threads on one tensor
//! is unordered.

//!
//! # Weights
//!
//! [`Weights`] makes a [`VarBuilder`](candle_nn::VarBuilder) of the named tensors of a mapping, for example of a keeper's, so
//! that every model of candle loads them.
//!
//! # A part of an example, not of device-ipc
//!
//! The facade has no feature for candle. It would select a version of candle for every user, and candle's features of cudarc,
//! which link the CUDA libraries and need nvcc, for every build with all features. And lent memory relies on what candle does
//! not promise: that a storage is replaced as a whole, and that no operation accepts a 6-bit type. Copy the files instead.
//!
//! Without the feature `cuda`, only [`Weights`] remains, for [`Device::Cpu`](candle_core::Device::Cpu).

mod dtype;
#[cfg(feature = "cuda")]
mod lent;
#[cfg(feature = "cuda")]
mod mapped;
#[cfg(feature = "cuda")]
mod share;
mod weights;

#[cfg(feature = "cuda")]
pub use mapped::MappedTensor;
#[cfg(feature = "cuda")]
pub use share::share;
pub use weights::Weights;
