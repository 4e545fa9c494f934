//! Objects of the driver: devices and their contexts, streams, events, host memory. Knows no kind of device memory.

pub(crate) mod add_f32;
pub(crate) mod capture;
pub(crate) mod context;
pub(crate) mod copy_blocks;
pub(crate) mod device;
pub(crate) mod driver;
pub(crate) mod event;
pub(crate) mod host_pages;
pub(crate) mod kernel;
mod mps;
pub(crate) mod relay;
pub(crate) mod staging;
pub(crate) mod stream;
pub(crate) mod value_operations;
