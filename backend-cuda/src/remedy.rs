//! What a user of CUDA can do about an error, for users of Rust and of Python.

use device_ipc_core::backend::{BackendRemedy, Remedy};

/// Pass a stream of the primary context.
pub(crate) const PASS_PRIMARY_STREAM: Remedy = Remedy::OfBackend(&BackendRemedy {
    rust: "pass a stream of cudaStreamCreate, of cudarc's CudaContext::new, or of cuStreamCreate with the context of \
           cuDevicePrimaryCtxRetain current",
    python: "pass a stream of the framework, or of cudaStreamCreate",
});

/// Allocate memory that can be shared.
pub(crate) const ALLOCATE_FROM_SHAREABLE_POOL: Remedy = Remedy::OfBackend(&BackendRemedy {
    rust: "call device_ipc::cuda::make_pool_shareable(device) once before the first allocation, or allocate this with \
           device_ipc::cuda::alloc_zeros(&stream, len) or device_ipc::cuda::clone_htod(&stream, &data), or share a copy \
           (Ipc::share_copy)",
    python: "allocate it inside of device_ipc.torch.pool(), or with device_ipc.empty, or share a copy (clone it there)",
});

/// Allocate memory outside of pools.
pub(crate) const ALLOCATE_OUTSIDE_POOLS: Remedy = Remedy::OfBackend(&BackendRemedy {
    rust: "allocate with device_ipc::cuda::alloc_zeros or device_ipc::cuda::clone_htod instead",
    python: "allocate with the default allocator of the framework instead of cudaMallocAsync",
});
