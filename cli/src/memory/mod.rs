//! Access to device memory for the commands: values of any element type, and bytes in pieces of bounded size.

mod bytes;
mod open;
mod summary;
mod values;

pub(crate) use bytes::DeviceBytes;
pub(crate) use open::{OpenArguments, OpenTensor};
pub(crate) use summary::Summary;
pub(crate) use values::{add_to_bytes, bytes_of_value, dtype_of_name};
