//! Virtual memory that is shared by fabric handle ("Virtual Memory Management", `group__CUDA__VA`).

pub(crate) mod export;
pub(crate) mod import;
pub(crate) mod support;
