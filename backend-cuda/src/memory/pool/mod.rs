//! Memory of pools, shared by the pool's file descriptor ("Stream Ordered Memory Allocator",
//! `group__CUDA__MALLOC__ASYNC`).

pub(crate) mod export;
pub(crate) mod handle;
pub(crate) mod import;
pub(crate) mod own;
