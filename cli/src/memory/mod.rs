//! What the commands do with device memory: values of any element type, and bytes in pieces of a bounded size.

mod bytes;
mod opened;
mod summary;
mod values;

pub(crate) use bytes::DeviceBytes;
pub(crate) use opened::{Opened, Place};
pub(crate) use summary::Summary;
pub(crate) use values::{add_to_bytes, bytes_of_value, dtype_of_name};
