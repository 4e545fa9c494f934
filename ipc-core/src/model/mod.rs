//! Values without input or output: devices, addresses, element types, tensors, leases, errors.

pub(crate) mod access;
pub(crate) mod address;
pub(crate) mod availability;
pub(crate) mod device;
pub(crate) mod error;
pub(crate) mod layout;
pub(crate) mod lease;
pub(crate) mod one_or_many;
pub(crate) mod placement;
pub(crate) mod printable;
pub(crate) mod remedy;
pub(crate) mod tensor;
