//! Interoperation with cudarc: its slices are shareable owners, its streams are accepted everywhere, and its kernels
//! and copies accept views of a mapping.
//!
//! cudarc and candle allocate from the device's memory pool. All of that memory is shareable after a call of
//! [`make_pool_shareable`](crate::make_pool_shareable) before the first allocation; without it, only slices of
//! [`alloc_zeros`] and [`clone_htod`] are.
//!
//! Streams and slices must belong to the device's primary context (`CudaContext::new`), in which memory is opened.
//!
//! Another version of cudarc in the dependency tree has other types: then pass a raw address with its owner
//! ([`OwnedRegion`](device_ipc_core::OwnedRegion)) and a raw stream
//! ([`BorrowedStream::from_raw`](device_ipc_core::BorrowedStream::from_raw)).

mod alloc;
mod caller;
mod error;
mod marker;
mod owner;
mod stream;
mod view;

pub use alloc::{alloc_zeros, clone_htod};
pub use marker::Cudarc;
pub use view::{CudaMapped, CudaMappedMut};
