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
//! Memory of `cuMemAlloc` (`cudaMalloc`) travels as a legacy IPC handle of 64 bytes, see [`LEGACY`]. Importers pin the
//! memory, a mapping is always read-write, and neither side may have the other's process id in another pid
//! namespace. Memory of `cuMemAllocAsync`, of pools and of `cuMemCreate` has no such handle: the error
//! says which line of code to change ([`alloc_zeros`] and [`clone_htod`] for cudarc).
//!
//! # Contexts
//!
//! Everything happens in the primary context of a device, the one that the CUDA runtime, PyTorch and
//! `cudarc::driver::CudaContext::new` use. It is retained when a call first needs it, made current for the time
//! of a call only, and released with the backend. Listing devices creates none.
//!
//! Rules of the driver that the code relies on are in the CUDA Driver API manual,
//! <https://docs.nvidia.com/cuda/cuda-driver-api/>; the modules name the pages.

mod api;
mod backend;
mod context;
mod device;
mod driver;
mod event;
mod export;
pub mod interop;
mod kernel;
mod kinds;
mod library;
mod memory;
mod open;
mod relay;
mod staging;
mod status;
mod stream;

pub use backend::{CudaBackend, REGISTRATION};
pub use interop::{alloc_zeros, clone_htod};
pub use kinds::LEGACY;
pub use library::LIBRARY_VARIABLE;

/// The backend's name, in descriptors and in `DEVICE_IPC_BACKEND`.
pub const NAME: &str = "cuda";
