//! Objects of the runtime: devices and their contexts, peer access, streams, events, host memory. Knows no kind of
//! device memory.

pub(crate) mod chip;
pub(crate) mod context;
pub(crate) mod device;
pub(crate) mod driver;
pub(crate) mod event;
pub(crate) mod host_pages;
pub(crate) mod peers;
pub(crate) mod relay;
pub(crate) mod retired;
pub(crate) mod staging;
pub(crate) mod stream;
pub(crate) mod timeline_trial;
pub(crate) mod value_operations;
