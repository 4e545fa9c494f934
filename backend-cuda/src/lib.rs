//! The NVIDIA CUDA backend of device-ipc.
//!
//! # Why an own table of functions
//!
//! libcuda is looked for when the program runs, so that one binary works with and without a GPU. A missing library, a
//! missing function or a status number that nobody knows yet has to be an error that says what to do; the loader of
//! cudarc panics on the first two, and its `CUresult` is an exhaustive enum. So IPC calls go through a table of our
//! own with integer statuses, and cudarc serves for [`interop`]: its slices and streams are accepted as they are.
//!
//! # What is shared, and how
//!
//! The address tells what memory is, and by which kind of handle it travels. Nobody has to say: not the sender, who
//! shares what he has, and not the receiver, who makes the same call and gets the same mapping.
//!
//! | memory | kind | read-only | importers reach | pid namespaces |
//! |---|---|---|---|---|
//! | `cuMemAlloc` (`cudaMalloc`) | [`LEGACY`]: 64 bytes | no | the pages of 2 MiB that the block lies in | not with the same process id |
//! | `cuMemCreate`, with a file descriptor (PyTorch's expandable segments) | [`VIRTUAL_MEMORY`]: a file descriptor for each block | by the hardware | the blocks | any |
//! | `cuMemAllocAsync`, after [`make_pool_shareable`] (cudarc, candle) | [`POOL`]: the pool's file descriptor, 64 bytes | no | the pool | any |
//! | `cuMemCreate`, with a fabric handle alone | [`FABRIC`]: 64 bytes for each block | by the hardware | the blocks | any |
//!
//! Importers pin the memory in every case. What has no handle (a default pool's memory, `cuMemCreate` without a type of
//! handle, managed memory) gets an error that says what it is and which line of code to change.
//!
//! Who has no allocator of his own gets memory of any kind from
//! [`DeviceMemory::allocate_as`](device_ipc_core::DeviceMemory::allocate_as); [`alloc_zeros`] and [`clone_htod`] give
//! cudarc's slices of memory of `cuMemAlloc`.
//!
//! # Contexts
//!
//! Everything happens in the primary context of a device, the one that the CUDA runtime, PyTorch and
//! `cudarc::driver::CudaContext::new` use. It is retained when a call first needs it, made current for the time
//! of a call only, and released with the backend. Listing devices creates none. Streams have to belong to it; one of
//! another context is refused. After a reset of the device (`cudaDeviceReset`) its memory, mappings, events and streams
//! are gone: every call for that device says so then, and a new backend may use it again (before CUDA 12 the driver
//! tells a reset only as long as nobody has retained the context anew).
//!
//! # Captures
//!
//! While a stream is being captured into a graph, calls leave the capture intact. Work on memory becomes nodes of the
//! graph; what has to happen now (a record or a wait, bytes of the host, a timeline's value) is
//! [`Error::StreamCapturing`](device_ipc_core::Error::StreamCapturing), except that there is nothing to wait for where an
//! event has been reached. Waiting for a whole device, as dropping a mapping does, leaves a capture intact if its stream
//! was used with this crate during the capture, or waits for the legacy default stream: CUDA does not tell of others.
//!
//! Rules of the driver that the code relies on are in the CUDA Driver API manual,
//! <https://docs.nvidia.com/cuda/cuda-driver-api/>; the modules name the pages.

mod backend;
mod bindings;
pub mod interop;
mod library;
mod memory;
mod objects;
pub mod raw;

pub use backend::{CudaBackend, REGISTRATION, make_pool_shareable};
pub use interop::{alloc_zeros, clone_htod};
pub use library::NAME;
pub use library::search::LIBRARY_VARIABLE;
pub use memory::fabric::support::FabricSupport;
pub use memory::kind::{FABRIC, LEGACY, POOL, VIRTUAL_MEMORY};
