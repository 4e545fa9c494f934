//! Errors of tensor layouts.

use super::Dtype;
use super::numbers::{MAX_DIMENSIONS, MAX_REPEATED_BYTES};
use crate::model::remedy::Remedy;

/// The reason why a layout is invalid, or does not fit its region or view.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// The element type is unknown to this version.
    #[error("the element type {0} is not known to this version of device-ipc; update the receiver")]
    UnknownDtype(u8),
    /// The tensor has too many dimensions.
    #[error("a tensor has at most {MAX_DIMENSIONS} dimensions, not {0}")]
    TooManyDimensions(usize),
    /// The number of strides is not the number of dimensions.
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
    /// The tensor extends beyond the end of its region.
    #[error("the tensor needs {needed} bytes, but its region has {region} bytes")]
    TooLarge {
        /// The size that the tensor needs, in bytes.
        needed: u64,
        /// The size of the region in bytes.
        region: u64,
    },
    /// An element type was stated without a shape for a region that is not a whole number of elements.
    #[error(
        "the region has {region} bytes, which is not a whole number of {dtype} elements of {element} bytes; {}, or \
         share a multiple of {element} bytes",
        Remedy::StateShape
    )]
    NotWholeElements {
        /// The element type.
        dtype: Dtype,
        /// The length of the region in bytes.
        region: u64,
        /// The size of an element in bytes.
        element: u64,
    },
    /// Neither the owner nor the caller stated the element type.
    #[error(
        "a shape or an offset was given, but the memory does not say its element type; {}",
        Remedy::StateDtype
    )]
    NoDtype,
    /// The view's element type is not the tensor's.
    #[error(
        "the elements are {actual}, and a view of {wanted} was asked for; view their bytes (view_bytes) if {wanted} is meant"
    )]
    WrongDtype {
        /// The element type of the tensor.
        actual: Dtype,
        /// The element type of the view.
        wanted: Dtype,
    },
    /// The tensor does not begin at a multiple of its element size.
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
    /// The bytes of a view are not whole, aligned elements.
    #[error("{len} bytes at {address:#x} are not whole, aligned elements of {element} bytes")]
    Misaligned {
        /// The address.
        address: u64,
        /// The length in bytes.
        len: u64,
        /// The size of an element in bytes.
        element: u64,
    },
    /// A view of elements needs a contiguous tensor.
    #[error(
        "the tensor is not contiguous (shape {shape:?}, strides {strides:?}); view its bytes (view_bytes), or copy its elements \
         (to_host)"
    )]
    NotContiguous {
        /// The tensor's shape.
        shape: Vec<u64>,
        /// The tensor's strides in elements.
        strides: Vec<u64>,
    },
    /// The elements would take much more memory on the host than on the device, because the tensor repeats elements.
    #[error(
        "the tensor has {bytes} B of elements in {memory} B of memory, as its strides repeat elements (shape {shape:?}, strides \
         {strides:?}), and at most {limit} B of repeated elements are copied to the host; view its bytes (view_bytes), and repeat \
         them there", limit = MAX_REPEATED_BYTES
    )]
    Repeated {
        /// The size of all elements in bytes.
        bytes: u64,
        /// The number of bytes from the first element to the end of the last.
        memory: u64,
        /// The tensor's shape.
        shape: Vec<u64>,
        /// The tensor's strides in elements.
        strides: Vec<u64>,
    },
    /// The destination of a copy is another tensor than its source.
    #[error(
        "the exporter's tensor is {exporter}, and the destination {destination}; pass a destination of the same type and shape"
    )]
    OtherTensor {
        /// Element type and shape of the exporter's tensor.
        exporter: String,
        /// Element type and shape of the destination.
        destination: String,
    },
    /// The export has another layout than the memory that a reserved mapping was opened with.
    #[error(
        "the export has another layout than the mapping: {what} is {found}, expected {expected}; export the same names, element \
         types, shapes, strides and offsets in regions of the same size, or open it as another mapping"
    )]
    Differs {
        /// The first difference.
        what: String,
        /// The value of the mapping.
        expected: String,
        /// The value of the export.
        found: String,
    },
    /// An unnamed tensor was requested from a mapping of named tensors.
    #[error("the mapping has {0} named tensors; {remedy}", remedy = Remedy::TakeByName)]
    Named(usize),
    /// A tensor was requested from a region without a layout.
    #[error("the exporter stated no element type for these bytes; {}", Remedy::TakeBytes)]
    NoTensor,
}
