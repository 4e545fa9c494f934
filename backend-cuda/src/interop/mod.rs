//! cudarc's types as arguments: its slices are shared as they are, its streams are accepted everywhere, and views of a
//! mapping go where its kernels and copies take a slice.
//!
//! A slice has to be memory of `cuMemAlloc`; see [`alloc_zeros`] and [`clone_htod`] for how to get one.
//!
//! Streams and slices must belong to the device's primary context (`CudaContext::new`), which is where memory is
//! opened.
//!
//! Another version of cudarc in the tree has other types: pass a raw address with its owner
//! ([`OwnedRegion`](device_ipc_core::OwnedRegion)) and a raw stream
//! ([`BorrowedStream::from_raw`](device_ipc_core::BorrowedStream::from_raw)) then.

mod alloc;
mod error;
mod owner;
mod stream;
mod view;

pub use alloc::{alloc_zeros, clone_htod};
pub use view::{CudaMapped, CudaMappedMut};

/// Marks the implementations for cudarc's types. Never named by callers: the compiler finds it.
#[derive(Clone, Copy, Debug)]
pub enum Cudarc {}
