//! Why a layout makes no sense.

use super::{Dtype, MAX_DIMENSIONS};

/// Why a layout is not one, or does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The type's code is not known to this version.
    #[error("the element type {0} is not known to this version of device-ipc; update the receiver")]
    UnknownDtype(u8),
    /// Too many dimensions.
    #[error("a tensor has at most {MAX_DIMENSIONS} dimensions, not {0}")]
    TooManyDimensions(usize),
    /// The strides do not belong to the shape.
    #[error("{strides} strides were given for {dimensions} dimensions")]
    Strides {
        /// The number of dimensions.
        dimensions: usize,
        /// The number of strides.
        strides: usize,
    },
    /// The size does not fit 64 bits.
    #[error("the size of the tensor does not fit 64 bits")]
    Overflow,
    /// The tensor reaches behind the end of its region.
    #[error("the tensor needs {needed} bytes, but its region has {region} bytes")]
    TooLarge {
        /// Bytes the tensor needs.
        needed: u64,
        /// Bytes the region has.
        region: u64,
    },
    /// The owner of the memory does not say of what type its elements are.
    #[error(
        "a shape or an offset was given, but the memory does not say its element type; call ShareBuilder::dtype as well"
    )]
    NoDtype,
    /// A view of another element type than the tensor's.
    #[error(
        "the elements are {actual}, and a view of {wanted} was asked for; view their bytes (view_bytes) if {wanted} is meant"
    )]
    WrongDtype {
        /// The tensor's.
        actual: Dtype,
        /// The view's.
        wanted: Dtype,
    },
    /// The tensor would begin between elements.
    #[error(
        "the tensor begins at address {address:#x}, which is not a multiple of its element size of {element} bytes; place it \
         at a multiple of {element} bytes"
    )]
    Unaligned {
        /// The address of the region, or of a bundle's tensor in it.
        address: u64,
        /// The size of an element in bytes.
        element: u64,
    },
    /// A view of whole elements needs an address and a length that fit them.
    #[error("{len} bytes at {address:#x} are not whole, aligned elements of {element} bytes")]
    Misaligned {
        /// The address.
        address: u64,
        /// The length in bytes.
        len: u64,
        /// The size of an element in bytes.
        element: u64,
    },
    /// A view gives the elements side by side, and the tensor has gaps.
    #[error(
        "the tensor is not contiguous (shape {shape:?}, strides {strides:?}); view its bytes (view_bytes), or copy its elements \
         (to_host)"
    )]
    NotContiguous {
        /// Its shape.
        shape: Vec<u64>,
        /// Its strides, in elements.
        strides: Vec<u64>,
    },
    /// One tensor was asked for where there are named ones.
    #[error("the mapping has {0} named tensors; take one by Mapping::get, or all by Mapping::tensors")]
    Named(usize),
    /// A tensor was asked for where there are only bytes.
    #[error(
        "the exporter stated no element type for these bytes; take Mapping::view, or have it call ShareBuilder::dtype"
    )]
    NoTensor,
}
