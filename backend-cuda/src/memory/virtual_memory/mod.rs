//! Virtual memory: blocks of `cuMemCreate`, shared by file descriptor ("Virtual Memory Management", `group__CUDA__VA`).

pub(crate) mod block;
pub(crate) mod export;
pub(crate) mod import;
pub(crate) mod reserved;
