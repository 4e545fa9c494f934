//! The layout of a tensor in a region.

use std::fmt;

use serde::ser::{Serialize, SerializeStruct as _, Serializer};

use super::numbers::{MAX_DIMENSIONS, Numbers};
use super::{Dtype, LayoutError};
use crate::model::address::DeviceRange;

/// Element type, shape, strides and offset of a tensor in a region.
///
/// Element `[i, j, …]` is at `offset + i * strides[0] + j * strides[1] + …` elements from the start of the region, as with
/// PyTorch's `storage_offset` and `stride`.
#[derive(Clone, PartialEq, Eq)]
pub struct TensorLayout {
    dtype: Dtype,
    numbers: Numbers,
    offset: u64,
    /// The result of [`start_bytes`](Self::start_bytes).
    start: u64,
    /// The result of [`span_bytes`](Self::span_bytes).
    span: u64,
}

impl TensorLayout {
    /// Creates a contiguous (row-major) tensor at the start of its region.
    ///
    /// # Errors
    ///
    /// [`LayoutError`] for too many dimensions, an unknown type, or a size that does not fit 64 bits.
    pub fn contiguous(dtype: Dtype, shape: impl AsRef<[u64]>) -> Result<Self, LayoutError> {
        let shape = shape.as_ref();
        check_dimensions(shape.len())?;
        let mut numbers = Numbers::of(shape.len());
        let (sizes, strides) = numbers.as_mut_slice().split_at_mut(shape.len());
        sizes.copy_from_slice(shape);
        let mut stride: u64 = 1;
        for (index, place) in strides.iter_mut().enumerate().rev() {
            *place = stride;
            if index > 0 {
                stride = stride.checked_mul(shape[index].max(1)).ok_or(LayoutError::Overflow)?;
            }
        }
        Self::checked(dtype, numbers, 0)
    }

    /// Creates a tensor at the start of its region with strides in elements.
    ///
    /// # Errors
    ///
    /// As for [`contiguous`](Self::contiguous), and [`LayoutError::Strides`].
    pub fn strided(
        dtype: Dtype,
        shape: impl AsRef<[u64]>,
        strides: impl AsRef<[u64]>,
    ) -> Result<Self, LayoutError> {
        let (shape, strides) = (shape.as_ref(), strides.as_ref());
        check_dimensions(shape.len())?;
        if strides.len() != shape.len() {
            return Err(LayoutError::Strides { dimensions: shape.len(), strides: strides.len() });
        }
        let mut numbers = Numbers::of(shape.len());
        let (sizes, places) = numbers.as_mut_slice().split_at_mut(shape.len());
        sizes.copy_from_slice(shape);
        places.copy_from_slice(strides);
        Self::checked(dtype, numbers, 0)
    }

    /// Creates the one-dimensional tensor from `offset` elements after the start of a region to the region's end.
    pub(crate) fn to_end(dtype: Dtype, offset: u64, region_bytes: u64) -> Result<Self, LayoutError> {
        let element = element_bytes(dtype)?;
        if !region_bytes.is_multiple_of(element) {
            return Err(LayoutError::NotWholeElements { dtype, region: region_bytes, element });
        }
        let start = offset.checked_mul(element).ok_or(LayoutError::Overflow)?;
        let bytes = region_bytes.checked_sub(start);
        let bytes = bytes.ok_or(LayoutError::TooLarge { needed: start, region: region_bytes })?;
        Self::contiguous(dtype, [bytes / element])?.with_element_offset(offset)
    }

    /// Creates a layout from the sizes of the dimensions, followed by the strides, and the offset. Further values are ignored.
    pub(crate) fn from_numbers(
        dtype: Dtype,
        dimensions: usize,
        values: impl Iterator<Item = u64>,
        offset: u64,
    ) -> Result<Self, LayoutError> {
        check_dimensions(dimensions)?;
        let mut numbers = Numbers::of(dimensions);
        numbers.as_mut_slice().iter_mut().zip(values).for_each(|(place, value)| *place = value);
        Self::checked(dtype, numbers, offset)
    }

    /// Creates a layout whose start and end in bytes do not exceed 64 bits.
    fn checked(dtype: Dtype, numbers: Numbers, offset: u64) -> Result<Self, LayoutError> {
        let element = element_bytes(dtype)?;
        let start = offset.checked_mul(element).ok_or(LayoutError::Overflow)?;
        let (shape, strides) = numbers.halves();
        if shape.contains(&0) {
            return Ok(Self { dtype, numbers, offset, start, span: 0 });
        }
        let mut elements: u64 = 1;
        let mut last = offset;
        for (&size, &stride) in shape.iter().zip(strides) {
            elements = elements.checked_mul(size).ok_or(LayoutError::Overflow)?;
            let reach = (size - 1).checked_mul(stride).ok_or(LayoutError::Overflow)?;
            last = last.checked_add(reach).ok_or(LayoutError::Overflow)?;
        }
        elements.checked_mul(element).ok_or(LayoutError::Overflow)?;
        let span = last.checked_add(1).and_then(|count| count.checked_mul(element));
        let span = span.ok_or(LayoutError::Overflow)?;
        Ok(Self { dtype, numbers, offset, start, span })
    }

    /// Returns the layout with its first element at this offset from the start of the region.
    ///
    /// # Errors
    ///
    /// [`LayoutError::Overflow`] if the end exceeds 64 bits.
    pub fn with_element_offset(self, elements: u64) -> Result<Self, LayoutError> {
        Self::checked(self.dtype, self.numbers, elements)
    }

    /// Returns the element type.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the size of each dimension in elements.
    pub fn shape(&self) -> &[u64] {
        self.numbers.halves().0
    }

    /// Returns the stride of each dimension in elements.
    pub fn strides(&self) -> &[u64] {
        self.numbers.halves().1
    }

    /// Returns the offset of the first element from the start of the region in elements.
    pub const fn element_offset(&self) -> u64 {
        self.offset
    }

    /// Returns the offset of the first element from the start of the region in bytes.
    pub const fn start_bytes(&self) -> u64 {
        self.start
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> u64 {
        // In an empty tensor the product of the other sizes may overflow.
        if self.is_empty() { 0 } else { self.shape().iter().product() }
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.shape().contains(&0)
    }

    /// Returns whether the elements are contiguous in row-major order. Those of an empty tensor are.
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        self.is_empty()
            || self.shape().iter().zip(self.strides()).rev().all(|(&size, &stride)| {
                let fits = size == 1 || stride == expected;
                expected *= size;
                fits
            })
    }

    /// Returns whether the elements have neither gaps between them nor bytes in common, in any order of the dimensions.
    pub(crate) fn is_dense(&self) -> bool {
        let axes = self.shape().iter().zip(self.strides()).filter(|(size, _)| **size > 1);
        let mut axes: Vec<_> = axes.map(|(size, stride)| (*stride, *size)).collect();
        axes.sort_unstable();
        let mut expected = 1;
        self.is_empty()
            || axes.into_iter().all(|(stride, size)| {
                let fits = stride == expected;
                expected *= size;
                fits
            })
    }

    /// Returns the number of bytes from the start of the region to the end of the tensor's last element; 0 for a tensor without
    /// elements.
    pub const fn span_bytes(&self) -> u64 {
        self.span
    }

    /// Returns the range of the tensor in its region, from its first element to the end of its last.
    pub(crate) fn elements_in(&self, region: DeviceRange) -> Result<DeviceRange, LayoutError> {
        self.check_fits(region.len)?;
        let (start, end) = if self.is_empty() { (0, 0) } else { (self.start_bytes(), self.span_bytes()) };
        region.slice(start, end - start).ok_or(LayoutError::Overflow)
    }

    /// Checks that the tensor is inside a region of `region_bytes`.
    ///
    /// # Errors
    ///
    /// [`LayoutError::TooLarge`].
    pub fn check_fits(&self, region_bytes: u64) -> Result<(), LayoutError> {
        let needed = self.span;
        if needed > region_bytes {
            return Err(LayoutError::TooLarge { needed, region: region_bytes });
        }
        Ok(())
    }
}

/// Checks that an address is a multiple of the element size.
pub(crate) fn check_alignment(dtype: Dtype, address: u64) -> Result<(), LayoutError> {
    let element = element_bytes(dtype)?;
    if address.is_multiple_of(element) { Ok(()) } else { Err(LayoutError::Unaligned { address, element }) }
}

fn check_dimensions(dimensions: usize) -> Result<(), LayoutError> {
    if dimensions > MAX_DIMENSIONS { Err(LayoutError::TooManyDimensions(dimensions)) } else { Ok(()) }
}

fn element_bytes(dtype: Dtype) -> Result<u64, LayoutError> {
    dtype.bytes().ok_or(LayoutError::UnknownDtype(dtype.code()))
}

impl fmt::Debug for TensorLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorLayout")
            .field("dtype", &self.dtype)
            .field("shape", &self.shape())
            .field("strides", &self.strides())
            .field("element_offset", &self.offset)
            .finish()
    }
}

impl Serialize for TensorLayout {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("TensorLayout", 4)?;
        fields.serialize_field("dtype", &self.dtype)?;
        fields.serialize_field("shape", self.shape())?;
        fields.serialize_field("strides", self.strides())?;
        fields.serialize_field("element_offset", &self.offset)?;
        fields.end()
    }
}

#[cfg(test)]
mod tests;
