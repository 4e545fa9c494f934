//! cudarc's types as arguments: its slices are shared as they are, its streams are accepted everywhere, and views of a
//! mapping go where its kernels and copies take a slice.
//!
//! cudarc and candle allocate from the device's memory pool. After one call of
//! [`make_pool_shareable`](crate::make_pool_shareable), before they do, all of that can be shared; without it, slices of
//! [`alloc_zeros`] and [`clone_htod`] can.
//!
//! Streams and slices must belong to the device's primary context (`CudaContext::new`), which is where memory is
//! opened.
//!
//! Another version of cudarc in the tree has other types: pass a raw address with its owner
//! ([`OwnedRegion`](device_ipc_core::OwnedRegion)) and a raw stream
//! ([`BorrowedStream::from_raw`](device_ipc_core::BorrowedStream::from_raw)) then.

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
