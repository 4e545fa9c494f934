//! The NVIDIA CUDA backend of device-ipc.
//!
//! # Function table
//!
//! The backend searches for libcuda at run time, so that one binary works with and without a GPU. A missing library, a
//! missing function or an unknown status must be an error with a remedy; the loader of cudarc panics on the first two,
//! and its `CUresult` is an exhaustive enum. So IPC calls go through a private function table with integer statuses,
//! and cudarc is used for [`interop`] only: its slices and streams are accepted as arguments.
//!
//! # Kinds of memory
//!
//! The address determines the source of memory, and thus the kind of handle by which it travels. Neither the exporter
//! nor the importer states a kind: the same calls work for all of them.
//!
//! | memory | kind | read-only | importers reach | pid namespaces |
//! |---|---|---|---|---|
//! | `cuMemAlloc` (`cudaMalloc`) | [`LEGACY`]: 64 bytes | no | the pages of 2 MiB that the block lies in | not with equal process ids |
//! | `cuMemCreate`, with a file descriptor (PyTorch's expandable segments) | [`VIRTUAL_MEMORY`]: a file descriptor for each block | by the hardware | the blocks | any |
//! | `cuMemAllocAsync`, after [`make_pool_shareable`] (cudarc, candle) | [`POOL`]: the pool's file descriptor, 64 bytes | no | the pool | any |
//! | `cuMemCreate`, with a fabric handle alone | [`FABRIC`]: 64 bytes for each block | by the hardware | the blocks | any |
//!
//! Importers pin the memory in every case. Memory without a handle (of a default pool, of `cuMemCreate` without a type
//! of handle, managed memory) causes an error that names its source and the line of code to change.
//!
//! [`DeviceMemory::allocate_as`](device_ipc_core::backend::DeviceMemory::allocate_as) allocates memory of any kind;
//! [`alloc_zeros`] and [`clone_htod`] return cudarc's slices with memory of `cuMemAlloc`.
//!
//! # Contexts
//!
//! All calls use the primary context of a device, like the CUDA runtime, PyTorch and
//! `cudarc::driver::CudaContext::new`. The first call that needs it retains it, each call makes it current for its
//! duration, and dropping the backend releases it. Listing devices creates none. Streams must belong to it; streams of
//! other contexts are refused. After a reset of the device (`cudaDeviceReset`) its memory, mappings, events and streams
//! no longer exist: every call for that device then fails, and a new backend can use it again (before CUDA 12 the
//! driver reports a reset only until the next retain).
//!
//! # Captures
//!
//! Calls leave the captures of streams into graphs intact. Work on memory becomes nodes of the graph; operations that
//! must execute immediately (a record or a wait, host bytes, a timeline's value) return
//! [`Error::StreamCapturing`](device_ipc_core::Error::StreamCapturing), except for a wait for an event that has already
//! completed. Waiting for a whole device, as in the drop of a mapping, leaves a capture intact if its stream was used
//! with this crate during the capture, or synchronises with the legacy default stream: CUDA has no query for others.
//!
//! # Layers
//!
//! `bindings` (declarations of `cuda.h`) → `library` (the loaded libcuda, statuses, errors) → `objects` (devices,
//! contexts, streams, events) → `memory` (each kind, with export and import) → `backend` (the traits of device-ipc) →
//! [`interop`], [`raw`]. Each layer uses only those before it.
//!
//! The code relies on rules of the CUDA Driver API manual, <https://docs.nvidia.com/cuda/cuda-driver-api/>; the modules
//! name the pages.

/// cudarc in the version that [`interop`] implements its traits for.
pub use cudarc;

mod backend;
mod bindings;
pub mod interop;
mod library;
mod memory;
mod objects;
pub mod raw;
mod remedy;

pub use backend::{CudaBackend, REGISTRATION, make_pool_shareable};
pub use interop::{alloc_zeros, clone_htod};
pub use library::NAME;
pub use library::search::LIBRARY_VARIABLE;
pub use memory::fabric::support::FabricSupport;
pub use memory::kind::{FABRIC, LEGACY, POOL, VIRTUAL_MEMORY};

/// The target of the log events of this crate; `docs/guide/operations.md` lists all targets.
const LOG: &str = "device_ipc::cuda";
